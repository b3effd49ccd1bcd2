"""The paper's rows and figures of open models, beside what analyses wrote."""

import functools
import json
import os
import random
import shutil

import pytest

from sink_jax.analyses.registry import ANALYSES
from sink_jax.cli.report import make_report
from sink_jax.models.sizes import parameter_count
from sink_jax.paper import numbers
from sink_jax.paper.analysed import Analysed, read_analyses
from sink_jax.paper.open_models import figure_of, models_of
from sink_jax.paper.open_protocol import EXPECTED
from sink_jax.paper.report import as_text, build, paper_report
from sink_jax.paper.tables import tables
from sink_jax.pretrained.families import family_for
from sink_jax.pretrained.hub import MODELS
from tests.analyses.small import analyse_models
from tests.paper.analysed_files import content, inputs, write
from tests.pretrained.test_parity import FIXTURES
from tests.report.test_report import Page

FIGURES = {figure.key: figure for figure in numbers.FIGURES
           if figure.needs == 'open models'}
TABLES = {item.key: item for item in numbers.ALL_TABLES
          if item.needs == 'open models'}

SEVEN = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
             num_attention_heads=32, num_key_value_heads=8, vocab_size=32000)


def entry_of(tables, key, setting):
  """What was measured for a row; None where nothing was."""
  table = next(table for table in tables if table.paper.key == key)
  row = next(row for row in table.rows if row.paper.setting == setting)
  return row.entries[0] if row.entries else None


def tables_of(*results):
  """The tables of these results, without a picture."""
  return tables([], Analysed(list(results)))


def read(tmp_path):
  return read_analyses([str(tmp_path)], {name: each.module for name, each in ANALYSES.items()})


def test_every_row_and_figure_has_models_of_the_catalogue_and_an_analysis():
  rows = [(item, row) for item in TABLES.values() for row in item.rows]
  assert len(rows) == 24 and len(FIGURES) == 26
  for item, row in rows:
    assert set(models_of(item, row).values()) <= set(MODELS), row
  for figure in FIGURES.values():
    assert set(figure.models or ()) <= set(MODELS)
    assert (figure.analysis == 'domains') == (figure.epsilon is not None)
  used = {item.analysis for item in [*TABLES.values(), *FIGURES.values()]}
  assert used == set(EXPECTED) <= set(ANALYSES)


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
  """Stored tiny models called like the paper's, and what the analyses write about them."""
  base = tmp_path_factory.mktemp('open')
  shutil.copytree(FIXTURES / 'gpt2', base / 'models/gpt2-xl')
  shutil.copytree(FIXTURES / 'gpt_neox', base / 'models/pythia-14m')
  xl, pythia = (str(base / 'models' / name) for name in ('gpt2-xl', 'pythia-14m'))
  carry = functools.partial(analyse_models, workdirs=[], out=base / 'analyses', sequences=2,
                            length=12)
  carry('kinds', [xl], inputs='random')
  carry('positions', [xl], positions=(5, 10))
  carry('heads', [xl, pythia], inputs='random')
  return base / 'analyses'


def test_what_analyses_wrote_is_on_the_page(measured, tmp_path):
  printed = make_report(tmp_path / 'out', None, [str(measured)])
  report = json.loads((tmp_path / 'out/report.json').read_text())
  rows_of = {table['paper']['key']: {row['paper']['setting']: row['entries']
                                     for row in table['rows']} for table in report['tables']}
  written = json.loads((measured / 'kinds.json').read_text())['results'][0]
  cell = rows_of['table-1-left']['GPT2-XL'][0]['cells']['sink_1_random']
  assert cell['measured']['mean'] == pytest.approx(written['sink_1']['random'])
  assert (cell['paper'], cell['difference']) == (70.29, None)
  assert cell['measured']['runs'] == ['analyses/kinds.json']
  own, = [model for model in rows_of['table-1-left']['GPT2-XL'][0]['models']
          if model['inputs']['kind'] == 'random']
  assert (own['file'], own['model']['name']) == ('analyses/kinds.json', 'GPT2-XL')
  assert (own['inputs']['length'], own['inputs']['bos']) == (12, 'none')
  assert cell['remark'].startswith(
      'sequences 2 instead of 100; T = 12 instead of 64; another model')
  assert '1.6 B' not in cell['remark'] and 'instead of 1.5 B' in cell['remark']
  rows = json.loads((measured / 'positions.json').read_text())['results'][0]['rows']
  for change in ('replaced', 'swapped'):
    by = 'by' if change == 'replaced' else 'with'
    settings = rows_of[f'table-7-{change}']
    ours, = settings[f'first position vector {change} {by} the 10th']
    own = next(row for row in rows if (row['change'], row['position']) == (change, 10))
    for measure in ('sink_1', 'sink_t'):
      assert ours['cells'][measure]['measured']['mean'] == pytest.approx(own[measure])
    assert settings[f'first position vector {change} {by} the 15th'] == []
  for key, model in (('figure-22', 'GPT2-XL'), ('figure-23', 'Pythia-14M')):
    figure = next(figure for figure in report['figures'] if figure['paper']['key'] == key)
    picture, = figure['pictures']
    assert [own['model']['name'] for own in picture['models']] == [model]
    assert (tmp_path / 'out' / picture['file']).read_bytes().startswith(b'\x89PNG')
    assert 'T = 12 instead of 64' in picture['note'] and 'another model' in picture['note']
  assert '7 of 24 rows are measured, 0 of them in the paper\'s protocol; 2 of 26 figures are ' in (
      ' '.join(printed.split()))
  page = ' '.join(Page((tmp_path / 'out/index.html').read_text()).text.split())
  assert 'another model of that name' in page and 'Not run: needs a published checkpoint' in page
  assert page.count('not compared') >= 6 and 'Nothing has been run' not in page
  assert 'analysed by' in report['provenance'] and set(report['analyses']) == {
      'analyses/kinds.json', 'analyses/positions.json', 'analyses/heads.json'}


def test_a_row_in_the_papers_protocol_has_a_difference(tmp_path):
  write(tmp_path / 'kinds.json', 'kinds', [
      content('kinds', 'GPT2-XL'), content('kinds', 'jamba-v0.1')])
  write(tmp_path / 'chat.json', 'chat', [content('chat', 'LLaMA2-7B Base', sink_1=93.0),
                                         content('chat', 'Llama-2-7b-chat-hf', sink_1=92.0)])
  write(tmp_path / 'positions.json', 'positions', [
      content('positions', 'openai-community/gpt2-xl', inputs('repeat'))])
  shown = tables_of(*read(tmp_path).results)
  of = lambda *place: {metric: (cell.measured.text, round(cell.difference, 6), cell.remark)
                       for metric, cell in entry_of(shown, *place).cells.items()}
  assert of('table-1-left', 'GPT2-XL') == {
      'sink_1_natural': ('80.00', 3.0, ''), 'sink_1_random': ('70.00', -0.29, ''),
      'sink_1_repeat': ('60.00', -2.28, '')}
  assert of('table-1-right', 'LLaMA2-7B') == {
      'sink_1_base': ('93.00', 0.53, ''), 'sink_1_chat': ('92.00', -0.88, '')}
  assert of('table-7-replaced', 'untouched') == {'sink_1': ('62.00', -0.28, '')}
  assert of('table-7-swapped', 'first position vector swapped with the 5th') == {
      'sink_1': ('1.44', 0.0, ''), 'sink_t': ('50.00', -7.63, '')}
  assert of('text-jamba', 'Jamba-v0.1') == {'sink_1': ('80.00', -8.48, '')}
  assert entry_of(shown, 'table-1-left', 'Mistral-7B') is None
  left = next(table for table in shown if table.paper.key == 'table-1-left')
  assert '--checkpoint="Mistral-7B,LLaMA2-7B Base,LLaMA3-8B Base" --out=' in left.status


@pytest.mark.parametrize('made, changes, words', [
    (inputs(sequences=20), {}, 'sequences 20 instead of 100'),
    (inputs(length=16), {}, 'T = 16 instead of 64'),
    (inputs('random'), {}, 'inputs random instead of natural'),
    (inputs(bos='force'), {}, 'BOS protocol force'),
    (None, {'epsilon': 0.2}, 'epsilon 0.2 instead of 0.3'),
    (None, {'dtype': 'bfloat16'}, 'dtype bfloat16 instead of float32'),
    (None, {'checkpoint': {'dtype': 'float32', 'parameters': 12_345}},
     'another model of that name: 12 k parameters instead of 7 B')])
def test_another_protocol_is_named_and_not_compared(tmp_path, made, changes, words):
  write(tmp_path / 'chat.json', 'chat', [content('chat', 'Mistral-7B', made, **changes)])
  cell = entry_of(tables_of(*read(tmp_path).results), 'table-1-right', 'Mistral-7B').cells[
      'sink_1_base']
  assert (cell.measured.text, cell.difference, cell.remark) == ('80.00', None, words)


@pytest.mark.parametrize('stored, name, changes', [
    ('gpt2', 'GPT2-XL', dict(n_embd=1600, n_inner=6400, n_layer=48, n_head=25, vocab_size=50257,
                             n_positions=1024)),
    ('gpt_neox', 'Pythia-14M', dict(hidden_size=128, intermediate_size=512, num_hidden_layers=6,
                                    num_attention_heads=4, vocab_size=50304)),
    ('opt', 'OPT-350M', dict(hidden_size=1024, word_embed_proj_dim=512, ffn_dim=4096,
                             num_hidden_layers=24, num_attention_heads=16, vocab_size=50272,
                             max_position_embeddings=2048)),
    ('mistral', 'Mistral-7B', SEVEN), ('jamba', 'Jamba-v0.1', SEVEN | dict(
        vocab_size=65536, attn_layer_period=8, attn_layer_offset=4, num_experts=16,
        mamba_dt_rank=256))])
def test_the_size_of_a_real_model_is_the_papers(tmp_path, stored, name, changes):
  hf = json.loads((FIXTURES / stored / 'config.json').read_text()) | changes
  hf.pop('head_dim', None)
  size = parameter_count(family_for(hf).model_config(hf))
  own = content('chat', name, checkpoint={'dtype': 'float32', 'parameters': size})
  write(tmp_path / 'chat.json', 'chat', [own])
  assert read(tmp_path).results[0].other_model == []


def test_other_text_is_compared_and_marked(tmp_path):
  own = content('chat', 'Mistral-7B', inputs(source="Stdlib(domains='docs')"))
  del own['checkpoint']['parameters']
  write(tmp_path / 'own/chat.json', 'chat', [own])
  report = paper_report([], tmp_path / 'out', read(tmp_path / 'own'))
  cell = entry_of(report.tables, 'table-1-right', 'Mistral-7B').cells['sink_1_base']
  assert cell.difference == pytest.approx(80 - 97.49)
  assert cell.remark == ("other text, Stdlib(domains='docs'); the file does not say how many "
                            'parameters the model has')
  markdown = (tmp_path / 'out/report.md').read_text()
  line = next(line for line in markdown.splitlines()
              if line.startswith('| Mistral-7B | 97.49 | 80'))
  assert line == ('| Mistral-7B | 97.49 | 80.00 | -17.49† | 88.34 |  |  | measured; Mistral-7B '
                  'Instruct not run *(own/chat.json)* |')
  assert "†: other text, Stdlib(domains='docs')" in markdown


def test_of_several_files_the_nearest_to_the_paper_then_the_newest_is_shown(tmp_path):
  later = {'date': '2027-01-01T00:00:00+00:00'}
  write(tmp_path / 'a/kinds.json', 'kinds', [content('kinds', 'GPT2-XL')])
  write(tmp_path / 'b/kinds.json', 'kinds', [content('kinds', 'GPT2-XL', sink_1={
      'natural': 81.0})], **later)
  write(tmp_path / 'c/kinds.json', 'kinds', [
      content('kinds', 'GPT2-XL', inputs(length=16), sink_1={'natural': 5.0})],
      date='2028-01-01')
  ours = entry_of(tables_of(*read(tmp_path).results), 'table-1-left', 'GPT2-XL')
  place = tmp_path.name
  assert ours.cells['sink_1_natural'].measured.mean == 81.0
  assert ours.cells['sink_1_random'].measured.mean == 70.0  # which the newest has not
  assert ours.sources == [f'{place}/b/kinds.json', f'{place}/a/kinds.json']
  assert ours.status == f'measured; also in {place}/a/kinds.json, {place}/c/kinds.json'


def test_files_that_cannot_be_used_are_named(tmp_path):
  good = content('chat', 'Mistral-7B')
  write(tmp_path / 'good.json', 'chat', [
      good, good | {'sink_1': 700}, good | {'model': 'Mistral-7B@step1000'},
      good | {'checkpoint': {'dtype': 'float32', 'step': 3}}],
      [{'model': 'LLaMA2-7B Chat', 'error': 'it is\ngated'}])
  write(tmp_path / 'old.json', 'chat', [], versions={'sink_jax': '0.0.1'})
  write(tmp_path / 'streaming.json', 'streaming', [{'model': 'x'}])
  write(tmp_path / 'nan.json', 'chat', [good | {'sink_1': float('nan')}])
  write(tmp_path / 'endless.json', 'chat', [good | {'sink_1': '1e999'}])
  text = (tmp_path / 'endless.json').read_text()
  (tmp_path / 'endless.json').write_text(text.replace('"1e999"', '1e999'))
  write(tmp_path / 'half.json', 'chat', [good])
  (tmp_path / 'half.json').write_text((tmp_path / 'half.json').read_text()[:200])
  (tmp_path / 'deep.json').write_text('[' * 100_000)
  (tmp_path / 'other.json').write_text('{"a": 1}')
  (tmp_path / 'list.json').write_text('{"analysis": "chat", "results": {}, "failed": []}')
  os.mkfifo(tmp_path / 'pipe.json')
  with open(tmp_path / 'large.json', 'wb') as file:
    file.truncate((1 << 25) + 1)
  analysed = read(tmp_path)
  place = tmp_path.name
  lines = {line.split(':')[0]: line for line in analysed.lines}
  assert lines.pop('Not of an analysis') == f'Not of an analysis: {place}/other.json.'
  damaged = lines.pop('Damaged, and left out')
  for name, why in (('nan', 'NaN is not a finite number'), ('endless', '1e999 is not a finite'),
                    ('half', 'line 1'), ('deep', 'nested too deeply'),
                    ('large', 'not a file of at most'), ('list', 'results is no list'),
                    ('pipe', 'not a file')):
    assert f'{place}/{name}.json (' in damaged and why in damaged, name
  assert f'{place}/old.json (0.0.1)' in lines.pop('Read, but written by another version than 0.1.0')
  assert f'{place}/streaming.json' in lines.pop(
      'Of analyses that no table or figure of this page is about')
  assert lines.pop('Results that cannot be used').endswith(
      f': Mistral-7B in {place}/good.json (sink_1 is no number from 0 to 100.001).')
  assert lines.pop('Models that failed in their analysis').endswith(
      f'LLaMA2-7B Chat in {place}/good.json (it is gated).')
  assert lines.pop("2 models are none of the paper's") == (
      f"2 models are none of the paper's: Mistral-7B@step1000 ({place}/good.json), Mistral-7B "
      f'({place}/good.json).')
  assert not lines and [result.model.name for result in analysed.results] == ['Mistral-7B']
  ours = tables([], analysed)
  assert entry_of(ours, 'table-1-right', 'LLaMA2-7B').status.startswith(
      'LLaMA2-7B Base not run; LLaMA2-7B Chat failed: it is gated (')
  assert 'failed' not in entry_of(ours, 'table-1-right', 'Mistral-7B').status
  assert entry_of(ours, 'table-1-right', 'Mistral-7B').cells.keys() == {'sink_1_base'}


def test_a_threshold_that_is_no_number_spares_the_page(tmp_path):
  write(tmp_path / 'norms.json', 'norms', [content('norms', 'LLaMA2-7B Base', epsilon='x')])
  analysed = read(tmp_path)
  assert '(epsilon is no number from 0 to 1)' in analysed.lines[0]
  assert figure_of(FIGURES['figure-11'], analysed).status.startswith('not run')


@pytest.mark.parametrize('options, words', [
    (dict(runs=None), '--runs=, a folder of runs, --analyses='),
    (dict(analyses=['nowhere'], runs=None), '--analyses=nowhere is neither a file nor a folder'),
    (dict(analyses=['.'], runs=None), '--analyses=. holds no .json file: name the folders'),
    (dict(analyses=['.'], runs='.', kind='runs'), '--analyses belongs to the report of the paper')])
def test_what_cannot_be_reported_is_one_line(tmp_path, monkeypatch, options, words):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError) as error:
    make_report('out', **options)
  assert words in str(error.value) and '\n' not in str(error.value)
  assert not (tmp_path / 'out').exists()


def test_names_are_text_on_every_page(tmp_path):
  evil = '<img src=x onerror=alert(1)> [a](http://b) `c` | d\n# e\x1b[2J'
  write(tmp_path / 'chat.json', 'chat', [content('chat', evil)], command=f'x {evil}')
  report = paper_report([], tmp_path / 'out', read(tmp_path))
  line = next(line for line in report.open_models if 'none of the paper' in line)
  assert '\n' not in line and '\x1b' not in line and '1 model is none of the paper' in line
  assert '\x1b' not in as_text(report)
  source = (tmp_path / 'out/index.html').read_text()
  assert '<img src=x' not in source and '&lt;img src=x' in source
  markdown = (tmp_path / 'out/report.md').read_text()
  assert '\\<img' in markdown and r'\[a\](http' in markdown and '\n# e' not in markdown
  assert r'\`c\`' in markdown


@pytest.mark.every(4)
@pytest.mark.parametrize('key', [
    'figure-2-top', 'figure-2-bottom', 'figure-3', 'figure-4-left', 'figure-9-middle', 'figure-10',
    'figure-19', 'figure-25', 'streaming-llm-figure-12',
    *(pytest.param(key, marks=pytest.mark.full) for key in (
        'figure-9-left', 'figure-9-right', *(f'figure-{n}' for n in (
            *range(11, 19), *range(20, 25), 26, 27))))])
def test_every_figure_is_drawn_of_its_models(tmp_path, key):
  figure = FIGURES[key]
  analysis, names = figure.analysis, figure.models or ['Pythia-14M', 'GPT2']
  made = inputs(sequences=256, length=4096) if analysis == 'last_query' else inputs()
  results = [content(analysis, name, made) for name in [*names[:2], 'OPT-125M', 'mine']]
  write(tmp_path / 'x.json', analysis, results)
  made = figure_of(figure, read(tmp_path))
  picture, = made.pictures
  assert made.status == 'drawn' and picture.png.startswith(b'\x89PNG')
  assert picture.file == f'{key}.png'
  expected = names[:2] + ([] if figure.models or key == 'figure-3' else [])
  shown = [own.model.name for own in picture.models]
  assert set(shown) == set(expected) | ({'OPT-125M'} if figure.models is None else set())
  assert shown == [name for name in MODELS if name in shown]  # in the order of Table 8
  assert picture.missing == [f'{name} (not run)' for name in names[2:]]
  assert "Not the paper's" not in picture.note and 'other text' not in picture.note
  assert all(name in json.dumps(picture.numbers) for name in shown)
  assert 'whatever' not in json.dumps(picture.numbers)


def test_a_picture_has_one_protocol_and_names_what_it_leaves_out(tmp_path):
  short = inputs(length=16)
  write(tmp_path / 'a.json', 'scale', [content('scale', name, short) for name in (
      'GPT2', 'GPT2-XL', 'OPT-125M')])
  write(tmp_path / 'b.json', 'scale', [content('scale', 'GPT2')])
  picture, = figure_of(FIGURES['figure-4-left'], read(tmp_path)).pictures
  assert [own.model.name for own in picture.models] == ['GPT2']
  place = tmp_path.name
  assert picture.note == (
      f'Drawn from {place}/b.json: natural inputs, 100 sequences, T = 64, epsilon 0.3, BOS protocol '
      f'tokenizer, float32. Not drawn with these: GPT2 of {place}/a.json, GPT2-XL of '
      f'{place}/a.json, OPT-125M of {place}/a.json.')
  (tmp_path / 'b.json').unlink()
  picture, = figure_of(FIGURES['figure-4-left'], read(tmp_path)).pictures
  assert len(picture.models) == 3
  assert "Not the paper's protocol: T = 16 instead of 64." in picture.note


def test_the_domains_of_another_threshold_or_corpus(tmp_path):
  own = content('domains', 'GPT2', epsilons=[0.2], sink_1=[[1.0] * 17])
  few = content('domains', 'OPT-125M', inputs(sequences=90), epsilons=[0.2], sink_1=[[1.0] * 17],
                sequences=[100] * 16 + [90])  # other tokenizers leave other documents out
  write(tmp_path / 'd.json', 'domains', [own, few], [{'model': 'GPT2-XL', 'error': 'no memory'}])
  analysed = read(tmp_path)
  picture, = figure_of(FIGURES['figure-9-left'], analysed).pictures
  assert len(picture.models) == 2
  assert "Not the paper's protocol: 90 sequences of a domain instead of 100." in picture.note
  right = figure_of(FIGURES['figure-9-right'], analysed)
  assert right.pictures == [] and right.status.endswith(
      f'd.json has no epsilon 0.4; GPT2-XL failed: no memory ({tmp_path.name}/d.json)')
  own |= {'domains': ['a$b', 'c_d'], 'sequences': [100, 100], 'sink_1': [[1.0, 2.0]]}
  write(tmp_path / 'd.json', 'domains', [own])
  picture, = figure_of(FIGURES['figure-9-left'], read(tmp_path)).pictures
  assert "domains of another corpus than the Pile's" in picture.note


def test_changed_files_never_end_a_report(tmp_path):
  """One value at a time becomes another; what is left out is named, and the rest is drawn."""
  rng, figures = random.Random(0), {figure.analysis: figure for figure in FIGURES.values()}
  others = [None, -1, 1e29, 10**400, 'x', '$\\', [], {}, [[]], True, [1, 'a'], {'a': []}, 0]
  for analysis in ('kinds', 'chat', 'positions', *figures):
    models = (figures[analysis].models if analysis in figures else None) or ['GPT2-XL']
    for number in range(5):
      own = content(analysis, models[0])
      place, path = own, []
      while isinstance(place, (dict, list)) and place and (not path or rng.random() < 0.8):
        path.append(rng.choice(list(place) if isinstance(place, dict) else range(len(place))))
        parent, place = place, place[path[-1]]
      parent[path[-1]] = rng.choice(others)
      write(tmp_path / 'x.json', analysis, [own])
      analysed = read(tmp_path)
      assert analysed.results or analysed.lines, path
      tables([], analysed)
      if analysed.results and analysis in figures and number == 0:
        figure_of(figures[analysis], analysed)


def test_a_report_without_analyses_is_as_before(tmp_path):
  (tmp_path / 'runs').mkdir()
  assert 'Nothing has been run: begin' in make_report(tmp_path / 'out', str(tmp_path / 'runs'))
  page = Page((tmp_path / 'out/index.html').read_text()).text
  assert 'Nothing has been run' in page and 'python -m sink_jax sweep' in page
  report = build([])
  assert report.analyses == {} and not report.open_models
  for item in [*report.tables, *report.figures]:
    if item.paper.needs == 'open models':
      assert item.status.startswith('not run: needs a published checkpoint, and python -m ')
      assert f'sink_jax analyses {item.paper.analysis} --checkpoint=' in item.status
