"""Sink rates by input type, pair, size, domain, length and head, against NumPy on full maps."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import models
from sink_jax.analyses.models import InputOptions, Model
from sink_jax.evaluate.inputs import natural, open_source, random_tokens
from sink_jax.models.sizes import parameter_count
from tests.analyses.small import HYBRID, VOCABULARY, importance, near, small_run, tokens


@pytest.fixture(scope='module')
def run():
  return small_run(sharp=5.0)


def percent(alpha, epsilon=0.3):
  assert abs(alpha - epsilon).min() > 1e-6  # no value so close that rounding could decide
  return pytest.approx(100 * (alpha > epsilon).mean(), abs=1e-4)


def test_lengths_are_beginnings_of_the_same_sequences(run):
  ids = tokens()
  found = {}
  result = sj.analyse(
    'lengths',
    run,
    ids,
    lengths=(12, 4),
    epsilons=(0.25, 0.35),
    batch_size=3,
  )

  for row in result.rows:
    alpha = importance(run, ids[:, : row['length']])
    for k in range(4):
      found[row['length'], row['epsilon'], k] = row[f'sink_{k + 1}']
      assert row[f'sink_{k + 1}'] == percent(alpha[..., k], row['epsilon'])
    expected = alpha[..., 0].mean()
    assert row['importance'] == near(expected)
    assert 'sink_5' not in row

  assert len(found) == 16
  assert len(set(found.values())) > 4

  made = sj.analyse(
    'lengths',
    run,
    inputs='random',
    lengths=(4, 9),
    sequences=2,
    seed=5,
  )
  drawn = random_tokens(
    VOCABULARY,
    sequences=2,
    length=9,
    seed=5,
    tokenizer=run.tokenizer,
  )
  [inputs] = made.models[0]['inputs']

  assert inputs['first_token_ids'] == drawn.tokens[0, :4].tolist()

  with pytest.raises(ValueError, match='--lengths'):
    sj.analyse('lengths', run, ids, lengths=(13,))
  with pytest.raises(ValueError, match='tokens is a list'):
    sj.analyse('lengths', run, [[1, 2], [3]])


def test_kinds_have_their_own_first_tokens_and_the_papers_numbers():
  run = dataclasses.replace(small_run(sharp=5.0), name='gpt2-xl')
  result = sj.analyse('kinds', run, sequences=5)

  assert [row['kind'] for row in result.rows] == ['natural', 'random', 'repeat']
  assert [row['paper'] for row in result.rows] == [77.00, 70.29, 62.28]

  protocols = [made['bos']['protocol'] for made in result.models[0]['inputs']]

  assert protocols == ['tokenizer', 'none', 'none']

  text = natural(run.tokenizer, open_source(), sequences=5).tokens
  drawn = [
    random_tokens(
      VOCABULARY,
      sequences=5,
      tokenizer=run.tokenizer,
      repeat=repeat,
    ).tokens
    for repeat in (False, True)
  ]

  for row, ids in zip(result.rows, (text, *drawn), strict=True):
    assert row['sink_1'] == percent(importance(run, ids)[..., 0])
  for changed in (
    dict(length=32),
    dict(epsilon=0.2),
    dict(bos='force'),
  ):
    # It is not the protocol of the paper.
    rows = sj.analyse(
      'kinds',
      run,
      sequences=2,
      **changed,
    ).rows
    assert 'paper' not in rows[1]


def test_chat_models_pair_with_their_base(run):
  rows = [
    sj.analyse('chat', dataclasses.replace(run, name=name), sequences=3).rows[0]
    for name in ('Mistral-7B', 'Mistral-7B Instruct', 'mine')
  ]

  assert [(row['pair'], row['version'], row.get('paper')) for row in rows] == [
    ('Mistral-7B', 'base', 97.49),
    ('Mistral-7B', 'chat', 88.34),
    ('mine', 'model', None),
  ]


def test_scale_and_heads(run):
  ids = tokens()
  alpha = importance(run, ids)[..., 0]
  [row] = sj.analyse('scale', dataclasses.replace(run, name='Pythia-14M'), ids, epsilon=0.25).rows

  assert row['family'] == 'Pythia'
  assert row['parameters'] == parameter_count(run.config)
  assert row['sink_1'] == percent(alpha, 0.25)
  assert row['sink_1'] > 0

  rows = sj.analyse('heads', run, ids).rows

  for row in rows:
    own = alpha[row['block'] - 1, :, row['head'] - 1]
    assert row['importance'] == near(own.mean())
    assert row['sink_1'] == percent(own)

  assert np.mean([row['sink_1'] for row in rows]) == percent(alpha)
  assert len(rows) == 8

  hybrid = sj.analyse('heads', small_run(layers=4, pattern=HYBRID), ids).rows

  assert {row['block'] for row in hybrid} == {2, 4}  # the blocks that have attention


def test_domains(run, tmp_path):
  counts = {
    'ArXiv': 4,
    'Github': 3,
    'short': 0,
  }
  for domain, texts in counts.items():
    (tmp_path / domain).mkdir()
    (tmp_path / domain / 'x.txt').write_text('x')
    for i in range(texts):
      (tmp_path / domain / f'{i}.txt').write_text(f'{i} of {domain} documents')

  rows = sj.analyse(
    'domains', run, source=str(tmp_path), sequences=3, length=12, epsilons=(0.2, 0.4)
  ).rows

  assert [(row['domain'], row['sequences'], row['epsilon']) for row in rows] == [
    (domain, 3, epsilon) for domain in ('ArXiv', 'Github') for epsilon in (0.2, 0.4)
  ]

  for row in rows:
    texts = [run.tokenizer.encode(f'{i} of {row["domain"]} documents') for i in range(3)]
    ids = [run.tokenizer.with_prefix(text, 'tokenizer')[:12] for text in texts]
    assert row['sink_1'] == percent(importance(run, np.stack(ids))[..., 0], row['epsilon'])
  for given in (dict(tokens=tokens()), dict(inputs='random')):
    with pytest.raises(ValueError, match='source='):
      sj.analyse('domains', run, **given)


@pytest.mark.parametrize(
  'options, words',
  [
    (dict(epsilon=30), 'between 0 and 1'),
    (dict(inputs='text'), '--inputs'),
    (dict(bos='never'), '--bos'),
    (dict(dtype='float16'), '--dtype'),
    (dict(sequences=0), '--sequences'),
    (dict(length=1), '--length'),
  ],
)
def test_options_that_cannot_be(run, options, words):
  with pytest.raises(ValueError, match=words):
    sj.analyse('scale', run, **options)


def test_wrong_options_are_refused_before_anything_is_measured(run, monkeypatch):
  monkeypatch.setattr(Model, 'batches', None)
  for name, options in (('angles', dict(heads=('3.1',))), ('lengths', dict(epsilons=(0.3, 30)))):
    with pytest.raises(ValueError, match=f'--{[*options][0]}'):
      sj.analyse(name, run, tokens(), **options)


def test_long_work_shows_how_far_it_is(run, monkeypatch):
  monkeypatch.setattr(models, 'Progress', bar := mock.Mock())
  sj.analyse('scale', run, tokens(5), batch_size=2)

  assert bar.return_value.method_calls == [
    *(mock.call.update(done) for done in (2, 4, 5)),
    mock.call.close(),
  ]


def test_what_an_analysis_does_not_have(run):
  with pytest.raises(TypeError, match='epsilons'):
    sj.analyse('scale', run, tokens(), epsilons=(0.2,))
  for ids in (
    [[1, VOCABULARY]],
    np.zeros((0, 5), int),
    [1, 2],
  ):
    with pytest.raises(ValueError):
      sj.analyse('norms', run, np.asarray(ids))


def test_more_tokens_than_positions_and_no_tokenizer():
  learned = small_run(attention=sj.AttentionSpec(position=sj.Learned(max_length=8)))

  with pytest.raises(ValueError, match='8 learned positions'):
    Model(learned, InputOptions(length=9, inputs='random')).inputs()

  bare = dataclasses.replace(learned, read_tokenizer=None)

  with pytest.raises(ValueError, match='--inputs=random'):
    Model(bare, InputOptions(length=8)).inputs()

  assert Model(bare, InputOptions(length=8, inputs='random')).inputs().tokens.shape == (100, 8)
