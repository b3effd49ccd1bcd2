"""Sink rates by length, kind of input, domain, size and head, against NumPy on full maps."""

import dataclasses

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import chat, domains, heads, kinds, lengths, maps, scale
from sink_jax.analyses.loaded_models import LoadedModel
from sink_jax.data.tokenizer import Bytes
from sink_jax.evaluate.inputs import open_source, random_tokens
from sink_jax.models.config import Layer, Mamba
from sink_jax.models.sizes import parameter_count
from sink_jax.paper import numbers
from sink_jax.paper.numbers import PILE, table_number
from sink_jax.pretrained.hub import family_of, known_model
from tests.analyses.small import (
  check_png,
  check_rows,
  drawn,
  lines,
  options,
  random_inputs,
  small_run,
)


def sharp_run(name='sharp', **changes):
  """Attention sharp enough for sinks in some heads and sequences, and none in others."""
  run = small_run(name, **changes)
  query = run.params['blocks']['attention']['query']
  return dataclasses.replace(run, params=run.params | {'blocks': run.params['blocks'] | {
      'attention': run.params['blocks']['attention'] | {
          'query': query | {'kernel': 5 * query['kernel']}}}})


@pytest.fixture(scope='module')
def run():
  return sharp_run()


def importance(run, tokens):
  """alpha (N, S, H, T) from the maps, float64."""
  record = sj.RecordOptions(maps=True)
  maps = np.asarray(run.record(tokens, record).layers.proxy_maps_BxHxTxT, np.float64)
  length = maps.shape[-1]
  return np.stack([maps[..., k:, k].sum(-1) / (length - k) for k in range(length)], -1)


def percent(alpha, epsilon):
  rate = 100 * (alpha > epsilon).mean()
  assert abs(alpha - epsilon).min() > 1e-5  # no tie that rounding could decide
  return rate


def test_lengths(run, tmp_path):
  inputs, epsilons = random_inputs(4, 12), (0.2, 0.3, 0.5)
  found = lengths.measure(run, inputs, options(lengths=(12, 4), epsilons=epsilons, length=12))
  assert found['lengths'] == [4, 12] and np.shape(found['sink']) == (3, 2, 4)
  rates = set()
  for t, length in enumerate(found['lengths']):
    alpha = importance(run, inputs.tokens[:, :length])
    assert found['mean_importance'][t] == pytest.approx(alpha[..., 0].mean(), rel=1e-5)
    for e, epsilon in enumerate(epsilons):
      for k in range(4):
        # The shortest inputs tie: importance of the last key is the diagonal alone, or 1.
        expected = 100 * (alpha[..., k] > epsilon).mean()
        assert found['sink'][e][t][k] == pytest.approx(expected, abs=1e-4)
        rates.add(expected)
  assert len(rates) > 5 and found['model'] == 'sharp' and found['epsilons'] == list(epsilons)
  lengths.draw([found, found], tmp_path / 'lengths.png')
  check_png(tmp_path / 'lengths.png')
  table = check_rows(lengths, [found])
  assert table[0][2:] == ['T=4', 'T=12'] and table[1][2] == f'{found["sink"][0][0][0]:.2f}'
  with pytest.raises(ValueError, match='--lengths: 13 exceeds the 12'):
    lengths.measure(run, inputs, options(lengths=(13,)))
  with pytest.raises(ValueError, match='only|exceed the 8 learned'):
    learned = small_run(attention=sj.AttentionSpec(position=sj.Learned(max_length=8)))
    lengths.make_inputs(LoadedModel(learned), options(lengths=(4, 9), inputs='random'))


def test_lengths_take_the_first_tokens_of_the_same_sequences():
  made = lengths.make_inputs(LoadedModel(small_run()), options(
      inputs='random', lengths=(4, 9), sequences=2, seed=5))
  expected = random_tokens(13, sequences=2, length=9, seed=5)
  np.testing.assert_array_equal(made.tokens, expected.tokens)


def test_kinds(run, tmp_path):
  subject = LoadedModel(dataclasses.replace(run, name='GPT2-XL'),
                        task='a task')  # whose probe tokens stand for text
  subject = dataclasses.replace(subject, run=dataclasses.replace(
      subject.run, probe_tokens=random_inputs(6, 12).tokens))
  chosen = options(sequences=5, length=12, seed=1)
  made = kinds.make_inputs(subject, chosen)
  assert made.tokens.shape == (15, 12)
  assert [own['kind'] for own in made.description['kinds']] == ['natural', 'random', 'repeat']
  found = kinds.measure(subject.run, made, chosen)
  for i, kind in enumerate(('natural', 'random', 'repeat')):
    alpha = importance(run, made.tokens[5 * i:5 * i + 5])[..., 0]
    assert found['sink_1'][kind] == pytest.approx(percent(alpha, 0.3))
    assert found['mean_importance'][kind] == pytest.approx(alpha.mean(), rel=1e-5)
  assert found['paper'] == {} == found['difference']  # T is not the paper's
  kinds.draw([found, found], tmp_path / 'kinds.png')
  check_png(tmp_path / 'kinds.png')
  check_rows(kinds, [found])
  alone = kinds.make_inputs(subject, dataclasses.replace(chosen, inputs='repeat'))
  assert list(kinds.measure(run, alone, chosen)['sink_1']) == ['repeat']
  with pytest.raises(ValueError, match='takes one threshold'):
    kinds.measure(run, made, options(epsilons=(0.2, 0.3)))


def test_kinds_beside_the_paper(monkeypatch, tmp_path):
  monkeypatch.setattr(numbers, 'LENGTH', 6)
  run = sharp_run('GPT2-XL')
  subject, chosen = LoadedModel(run), options(length=6, sequences=2, inputs='random')
  found = kinds.measure(run, kinds.make_inputs(subject, chosen), chosen)
  assert found['paper'] == {'random': 70.29}
  assert found['difference']['random'] == pytest.approx(found['sink_1']['random'] - 70.29)
  assert '(70.29)' in check_rows(kinds, [found])[1][2]
  kinds.draw([found], tmp_path / 'kinds.png')
  made = kinds.make_inputs(subject, chosen)
  other = kinds.measure(dataclasses.replace(run, name='Pythia-1B'), made, chosen)
  assert other['paper'] == {}
  made.description['kinds'][0]['bos']['protocol'] = 'force'  # which the paper did not do
  assert kinds.measure(run, made, chosen)['paper'] == {}


def test_what_is_known_by_name():
  assert known_model('gpt2-xl') is known_model('GPT2-XL') is known_model('openai-community/GPT2-xl')
  assert known_model('my-model') is None
  families = {name: family_of(name) for name in ('LLaMA3.1-8B Base', 'pythia-14m', 'mine')}
  assert families == {'LLaMA3.1-8B Base': 'LLaMA3.1', 'pythia-14m': 'Pythia', 'mine': 'other'}
  assert table_number('table-1-left', 'LLaMA3-8B Base', 'sink_1_natural') == 99.02
  assert table_number('table-1-left', 'Pythia-1B', 'sink_1_natural') is None


def test_chat(run, tmp_path, monkeypatch):
  inputs = random_inputs(4, 12)
  found = chat.measure(run, inputs, options())
  assert found['sink_1'] == pytest.approx(percent(importance(run, inputs.tokens)[..., 0], 0.3))
  assert found['tuned'] is found['counterpart'] is found['paper'] is None
  monkeypatch.setattr(numbers, 'LENGTH', 12)
  text = dataclasses.replace(inputs, description=inputs.description | {
      'kind': 'natural', 'bos': {'protocol': 'tokenizer', 'applied': 'none'}})
  named = lambda name: chat.measure(dataclasses.replace(run, name=name), text, options())
  base, tuned = named('LLaMA2-7B Base'), named('LLaMA2-7B Chat')
  instruct, missing = named('Mistral-7B Instruct'), named('LLaMA3.1-8B Base')
  assert (base['paper'], tuned['paper'], instruct['paper']) == (92.47, 92.88, 88.34)
  assert missing['paper'] is None and tuned['difference'] == tuned['sink_1'] - 92.88
  results = [tuned, found, instruct, base, missing, found, found]
  assert chat.pairs(results) == [(None, instruct), (base, tuned), (missing, None), (found, found),
                                 (found, None)]
  chat.draw(results, tmp_path / 'chat.png')
  check_png(tmp_path / 'chat.png')
  alone = ['LLaMA2-7B Base', f'{base["sink_1"]:.2f} (92.47)', '-', '-']
  assert chat.rows([base, found])[1] == alone
  assert chat.rows(results)[2][2:] == ['LLaMA2-7B Chat', f'{tuned["sink_1"]:.2f} (92.88)']


def test_chat_keeps_models_of_one_name_apart(run, monkeypatch):
  named = lambda name, rate: chat.measure(dataclasses.replace(run, name=name), random_inputs(),
                                          options()) | {'sink_1': rate}
  results = [named('LLaMA2-7B Chat', 10.0), named('LLaMA2-7B Base', 20.0),
             named('LLaMA2-7B Base', 30.0), named('mine', 40.0), named('mine', 50.0)]
  rates = [[own and own['sink_1'] for own in couple] for couple in chat.pairs(results)]
  assert rates == [[20, 10], [30, None], [40, 50]]
  ax = drawn(chat, results, monkeypatch).axes[0]
  bars = [(round(bar.get_x() + bar.get_width() / 2, 2), bar.get_height()) for bar in ax.patches
          if bar.get_height()]
  assert sorted(bars) == [(-0.18, 20), (0.18, 10), (0.82, 30), (1.82, 40), (2.18, 50)]


def test_a_folder_brings_no_counterpart(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'Mistral-7B').mkdir()
  assert chat.companions(['Mistral-7B', 'other']) == ['Mistral-7B', 'other']


def test_a_model_of_the_catalogue_brings_its_counterpart():
  assert chat.companions(['LLaMA2-7B Base', 'x']) == ['LLaMA2-7B Base', 'LLaMA2-7B Chat', 'x']
  assert chat.companions(['mistralai/Mistral-7B-Instruct-v0.1']) == [
      'mistralai/Mistral-7B-Instruct-v0.1', 'Mistral-7B']
  assert chat.companions(['LLaMA2-7B Base'] * 2) == [
      'LLaMA2-7B Base', 'LLaMA2-7B Chat', 'LLaMA2-7B Base']
  both = ['LLaMA2-7B Chat', 'LLaMA2-7B Base']
  assert chat.companions(both) == both and chat.companions(['a', 'b']) == ['a', 'b']


def test_scale(run, tmp_path):
  inputs = random_inputs(4, 12)
  found = [scale.measure(dataclasses.replace(run, name=name), inputs, options(epsilons=(0.25,)))
           for name in ('Pythia-14M', 'Pythia-1B', 'mine')]
  expected = percent(importance(run, inputs.tokens)[..., 0], 0.25)
  assert [r['sink_1'] for r in found] == pytest.approx([expected] * 3) and expected > 0
  assert [r['family'] for r in found] == ['Pythia', 'Pythia', 'other']
  assert found[0]['parameters'] == parameter_count(run.config)
  scale.draw(found, tmp_path / 'scale.png')
  check_png(tmp_path / 'scale.png')
  check_rows(scale, found)


def test_scale_has_parameters_across_and_the_rate_up(run, monkeypatch):
  own = scale.measure(run, random_inputs(), options())
  sizes = [(f'family {i}', 10 ** (6 + j), 5.0 * i + j) for i in range(9) for j in (1, 0)]
  results = [own | {'family': family, 'parameters': size, 'sink_1': rate}
             for family, size, rate in sizes]
  figure = drawn(scale, results, monkeypatch)
  [ax] = figure.axes
  for i, (name, points) in enumerate(lines(ax).items()):
    assert name == f'family {i}'
    np.testing.assert_allclose(points, [(1e6, 5 * i), (1e7, 5 * i + 1)])
  assert len({(line.get_color(), line.get_marker()) for line in ax.get_lines()}) == 9
  assert (ax.get_xlabel(), ax.get_xscale()) == ('parameters', 'log')
  figure.draw_without_rendering()
  assert ax.get_legend().get_window_extent().x0 >= ax.get_window_extent().x1


def test_heads_go_across_and_blocks_down(run, monkeypatch):
  result = heads.measure(run, random_inputs(), options()) | {
      'layers': [1, 3], 'importance': [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]}
  ax = drawn(heads, [result], monkeypatch).axes[0]
  [image] = ax.get_images()
  np.testing.assert_allclose(image.get_array(), result['importance'])
  assert image.origin == 'upper' and image.get_clim() == (0, 1)
  assert [tick.get_text() for tick in ax.get_yticklabels()] == ['2', '4']
  assert [tick.get_text() for tick in ax.get_xticklabels()] == ['1', '2', '3', '4']
  assert (ax.get_xlabel(), ax.get_ylabel()) == ('head', 'block')


def test_many_maps_go_on_in_the_next_row(run, monkeypatch):
  found = maps.measure(run, random_inputs(), options(layers=(0, 1), heads=(0, 1, 2)))
  figure = drawn(maps, [found], monkeypatch)
  panels = [ax for ax in figure.axes if ax.get_images()]
  assert len(panels) == 6 and len({ax.get_position().x0 for ax in panels}) == 4
  for ax, own in zip(panels, found['heads']):
    assert f'block {own["layer"] + 1}, head {own["head"] + 1}' in ax.get_title()
    shown = np.tril(np.ma.filled(ax.get_images()[0].get_array(), 0))
    np.testing.assert_allclose(shown, np.tril(own['map']))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ('key', 'query')


def test_bars_of_kinds_and_domains(run, monkeypatch):
  subject, chosen = LoadedModel(run), options(length=6, sequences=2, inputs='random')
  result = kinds.measure(run, kinds.make_inputs(subject, chosen), chosen) | {
      'sink_1': {'natural': 10.0, 'random': 20.0, 'repeat': 30.0}}
  bars = lambda ax: sorted((round(bar.get_x() + bar.get_width() / 2, 2), bar.get_height())
                           for bar in ax.patches if bar.get_height())
  ax = drawn(kinds, [result], monkeypatch).axes[0]
  assert bars(ax) == [(-0.26, 10), (0, 20), (0.26, 30)]
  one = {'model': 'a', 'epsilons': [0.2], 'domains': ['x', 'y'], 'sink_1': [[10.0, 20.0]]}
  ax = drawn(domains, [one, one | {'domains': ['y'], 'sink_1': [[30.0]]}], monkeypatch).axes[0]
  assert bars(ax) == [(-0.2, 10), (0.8, 20), (1.2, 30)]
  assert [tick.get_text() for tick in ax.get_xticklabels()] == ['x', 'y']


def corpus(tmp_path):
  for domain, texts in {'wikipedia-EN': 5, 'Enron_Emails': 3, 'ArXiv': 4, 'extra': 2}.items():
    for i in range(texts):
      (tmp_path / 'corpus' / domain).mkdir(parents=True, exist_ok=True)
      (tmp_path / 'corpus' / domain / f'{i}.txt').write_text(f'{domain}, text {i} of {texts}')
  (tmp_path / 'corpus' / 'Github').mkdir()
  (tmp_path / 'corpus' / 'Github' / 'short.txt').write_text('x')
  return str(tmp_path / 'corpus')


def test_domains(tmp_path):
  run = sharp_run(vocab_size=258)
  tokenizer = Bytes().open()
  subject = LoadedModel(run, tokenizer)
  chosen = options(sequences=4, length=12, epsilons=(0.2, 0.4), source=corpus(tmp_path))
  made = domains.make_inputs(subject, chosen)
  found = domains.measure(run, made, chosen)
  # The Pile's order and spelling; what is not of the Pile comes last.
  assert found['domains'] == ['ArXiv', 'wikipedia-EN', 'Enron_Emails', 'extra']
  assert found['sequences'] == [4, 4, 3, 2] and len(found['missing']) == 14
  assert 'Github' in found['missing'] and 'ArXiv' not in found['missing']
  for d, (name, count) in enumerate(zip(found['domains'], found['sequences'])):
    rows = [tokenizer.with_prefix(tokenizer.encode(document.text), 'tokenizer')[:12]
            for document in open_source(chosen.source).documents() if document.domain == name]
    tokens = np.stack([row for row in rows if len(row) == 12][:count])
    for e, epsilon in enumerate((0.2, 0.4)):
      assert found['sink_1'][e][d] == pytest.approx(
          percent(importance(run, tokens)[..., 0], epsilon))
  assert len(set(map(tuple, found['sink_1']))) == 2
  domains.draw([found, found], tmp_path / 'domains.png')
  check_png(tmp_path / 'domains.png')
  assert check_rows(domains, [found])[-1][2] == 'missing'


def test_sources_without_domains(tmp_path):
  subject = LoadedModel(small_run(vocab_size=258), Bytes().open())
  (tmp_path / 'a.txt').write_text('only text, of one domain')
  with pytest.raises(ValueError, match="one domain, 'text'.*pile_set_name"):
    domains.make_inputs(subject, options(length=5, source=str(tmp_path)))
  for name in ('a', 'b'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'a.txt').write_text('text of another domain')
  made = domains.make_inputs(subject, options(length=5, sequences=1, source=str(tmp_path)))
  assert made.description['missing'] == []  # nothing of this is the Pile


def test_domains_of_the_pile():
  assert len(set(map(domains._key, PILE))) == 17


def test_heads(run, tmp_path):
  inputs = random_inputs(4, 12)
  found = heads.measure(run, inputs, options())
  alpha = importance(run, inputs.tokens)[..., 0]
  np.testing.assert_allclose(found['importance'], alpha.mean(1), rtol=1e-5)
  assert found['sink_1'] == pytest.approx(percent(alpha, 0.3)) and found['layers'] == [0, 1]
  heads.draw([found] * 4, tmp_path / 'heads.png')
  check_png(tmp_path / 'heads.png')
  layer, head = np.unravel_index(alpha.mean(1).argmax(), (2, 4))
  assert check_rows(heads, [found])[1][3] == f'{layer + 1}, {head + 1}'


def test_maps(run, tmp_path):
  inputs = random_inputs(4, 12)
  weights = np.asarray(run.record(inputs.tokens, sj.RecordOptions(maps=True)).layers.maps_BxHxTxT,
                       np.float64).mean(1)
  found = maps.measure(run, inputs, options())
  assert (found['sequences'], found['length'], len(found['heads'])) == (4, 12, 4)
  mean = importance(run, inputs.tokens)[..., 0].mean(1)
  ordered = np.sort(mean, None)
  for own, value in zip(found['heads'], [*ordered[:-3:-1], *ordered[1::-1]], strict=True):
    assert own['importance'] == pytest.approx(value, rel=1e-5) == mean[own['layer'], own['head']]
    np.testing.assert_allclose(own['map'], weights[own['layer'], own['head']], atol=6e-5)
  chosen = maps.measure(run, inputs, options(layers=(1,), heads=(0, 3)))
  assert [(own['layer'], own['head']) for own in chosen['heads']] == [(1, 0), (1, 3)]
  strongest = maps.measure(run, inputs, options(layers=(1, 0)))['heads']
  assert [(own['layer'], own['head']) for own in strongest] == [(1, mean[1].argmax()),
                                                                (0, mean[0].argmax())]
  maps.draw([found, strongest and chosen], tmp_path / 'maps.png')
  check_png(tmp_path / 'maps.png')
  check_rows(maps, [found, chosen])
  with pytest.raises(ValueError, match='--layers=3'):
    maps.measure(run, inputs, options(layers=(2,)))


def test_maps_whose_rows_do_not_sum_to_one(tmp_path):
  run = small_run(attention=sj.AttentionSpec('Sigmoid()', 'Unnormalized()'))
  inputs = random_inputs(2, 7)
  found = maps.measure(run, inputs, options(layers=(0,), heads=(1,)))
  layers = run.record(inputs.tokens, sj.RecordOptions(maps=True)).layers
  own = found['heads'][0]
  for key, stored in (('map', layers.proxy_maps_BxHxTxT), ('raw_map', layers.maps_BxHxTxT)):
    np.testing.assert_allclose(own[key], np.asarray(stored)[0, :, 1].mean(0), atol=6e-5)
  maps.draw([found], tmp_path / 'maps.png')
  check_png(tmp_path / 'maps.png')


def test_blocks_without_attention_are_counted_but_not_shown(tmp_path):
  run = small_run(layers=4, pattern=(Layer(mamba=Mamba(inner=8, state=2, conv=2, rank=2)), Layer()))
  inputs = random_inputs(2, 7)
  found = heads.measure(run, inputs, options())
  assert found['layers'] == [1, 3] and np.shape(found['importance']) == (2, 4)
  heads.draw([found], tmp_path / 'heads.png')
  with pytest.raises(ValueError, match='--layers=3.*2,4'):
    maps.measure(run, inputs, options(layers=(2,)))
  one = maps.measure(run, inputs, options(layers=(3,), heads=(2,)))['heads'][0]
  alpha = importance(run, inputs.tokens)[1, :, 2, 0].mean()
  assert (one['layer'], one['head']) == (3, 2)
  assert one['importance'] == pytest.approx(alpha, rel=1e-5)
