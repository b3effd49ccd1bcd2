"""A run's folder is data: reading it executes nothing, and opens nothing else."""

import contextlib
import json
import os
import shutil
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from markdown_it import MarkdownIt

import sink_jax as sj
from sink_jax.analyses import card
from sink_jax.data.packed import Packed
from sink_jax.data.tokenizer import Bytes
from sink_jax.io.paths import inside
from sink_jax.pretrained.files import INDEX, Checkpoint
from sink_jax.report.html_page import to_html
from sink_jax.report.runs import write_runs
from sink_jax.sweep.runner import run_trial
from sink_jax.sweep.trials import Trial
from sink_jax.train import checkpoint
from sink_jax.train.checkpoint import CheckpointError, saved_steps
from sink_jax.train.loop import train
from tests.commands import run_here
from tests.pretrained import tiny
from tests.report import fake_runs
from tests.train import runs

LABEL = '<script>alert(1)</script>[x](http://x) `<b>`'
PLANTED = """
open({marker!r}, 'w').close()
from sink_jax.attention.similarity import Exp

class Planted(Exp):
  pass
"""
_WATCHED = []  # [(a folder, the paths in it that were opened)]


def _watch(event, arguments):
  if event in ('open', 'os.listdir', 'os.scandir') and isinstance(arguments[0], (str, os.PathLike)):
    for folder, opened in _WATCHED:
      path = os.path.realpath(arguments[0])
      opened += [path] * path.startswith(f'{folder}/')


sys.addaudithook(_watch)


@contextlib.contextmanager
def nothing_opened(folder):
  """Fails if the block opens or lists something in a folder, through whatever link."""
  opened = []
  _WATCHED.append((os.path.realpath(folder), opened))
  yield
  _WATCHED.pop()
  assert not opened


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A run on text, as its own person made it."""
  folder = tmp_path_factory.mktemp('own')
  texts = folder / 'texts'
  texts.mkdir()
  for n in range(40):
    (texts / f'{n}.txt').write_text(f'{n} is the number of this text, which goes on. ' * 9)
  config = runs.config(
    data__source=f"TextFolder(path='{texts}')", steps=4, data__cache_dir=str(folder / 'cache')
  )
  train(config, folder / 'run', show_progress=False)
  return folder / 'run'


@pytest.fixture
def planted(trained, tmp_path):
  """The folder as somebody else sends it. Its config names what lies in `outside`."""
  folder, outside = tmp_path / 'sent/run', tmp_path / 'outside'
  shutil.copytree(trained, folder)
  shutil.copytree(trained, outside / 'run')
  Bytes().open().save(outside / 'tokenizer')
  code = PLANTED.format(marker=str(tmp_path / 'executed'))
  for place in (folder, outside):
    (place / 'planted.py').write_text(code)
  change(
    folder / 'config.json',
    {
      'plugins': f'{folder}/planted.py,{outside}/planted.py,planted.py',
      'init': {'source': str(outside / 'run')},
      'label': {'trial': LABEL},
      'data': {
        'source': f"TextFolder(path='{outside}/run')",
        'cache_dir': str(outside),
        'tokenizer': f"HuggingFace(path='{outside}/tokenizer')",
        'valid_source': f"PackedDataset(path='{outside}/run')",
      },
    },
  )
  change(folder / 'status.json', {'label': {'trial': LABEL, 'run': '../../outside/run'}})
  return folder


def change(file, changes):
  """Changes keys of a JSON file, also those of its sections."""
  value = json.loads(file.read_text())
  for key, new in changes.items():
    both = isinstance(new, dict) and isinstance(value.get(key), dict)
    value[key] = value[key] | new if both else new
  file.write_text(json.dumps(value))


def commands(folder, out):
  """Every command that takes a run, with options that make it fast."""
  of_run = f'--workdir={folder}'
  return [
    ('evaluate', of_run, '--sequences=2'),
    ('analyses', 'norms', of_run, '--sequences=2', '--length=16', f'--out={out / "analyses"}'),
    ('card', of_run, f'--out={out / "card"}'),
    ('generate', of_run, '--prompt=The', '--length=2'),
    ('export', of_run, f'--out={out / "exported"}'),
    ('report', f'--runs={folder.parent}', f'--out={out / "report"}'),
  ]


@pytest.fixture(autouse=True)
def small_cards(monkeypatch):
  monkeypatch.setattr(card, 'PARTS', {'signature': card.PARTS['signature']})


def status_of_sweep(folder, config):
  return run_here('sweep', f'--config={config}', f'--workdir={folder.parent}', '--status')


@pytest.fixture
def sweep_file(tmp_path):
  file = tmp_path / 'trials.py'
  file.write_text(
    "from configs import base\nTRIALS = {'run': {}}\n"
    "get_config = lambda name='': base.trial(TRIALS, name, 'x')\n"
  )
  return file


def test_what_a_config_names_is_neither_executed_nor_opened(
  planted, tmp_path, monkeypatch, sweep_file
):
  monkeypatch.chdir(planted)  # where a relative name would be found
  with nothing_opened(tmp_path / 'outside'):
    run = sj.load_run(planted)
    assert run.tokenizer.decode(sj.tokenize(run, 'abc')[0]) == 'abc'
    read = sj.read_runs(planted.parent)
    for words in commands(planted, tmp_path):
      code, _, error = run_here(*words)
      assert code == 0, (words, error)
    code, table, _ = status_of_sweep(planted, sweep_file)
    assert code == 0 and '| done |' in table
  assert list(read.runs.run) == ['run'] and list(read.runs.trial) == [LABEL]
  assert not (tmp_path / 'executed').exists()


def test_a_component_of_a_planted_file_is_refused_and_its_rows_are_read(
  planted, tmp_path, monkeypatch
):
  change(planted / 'config.json', {'attention': {'similarity': 'Planted()'}})
  monkeypatch.chdir(planted)
  with nothing_opened(tmp_path / 'outside'):
    with pytest.raises(ValueError, match='attention.similarity needs .*planted.py.*--plugins='):
      sj.load_run(planted)
    *of_run, report = commands(planted, tmp_path)
    for words in of_run:
      code, _, error = run_here(*words)
      line = error.strip().splitlines()[-1]
      assert code == 1 and 'planted.py' in line and '--plugins=' in line, words
    assert run_here(*report)[0] == 0
    read = sj.read_runs(planted.parent)
  assert not (tmp_path / 'executed').exists()
  [row] = read.runs.itertuples()
  assert (row.status, row.attention, row.proxy) == ('done', 'Planted()', False)
  assert row.steps == 4 and row.heads == 8 and np.isnan(row.uniform_importance)
  assert json.loads(row.settings)['attention.similarity'] == 'Planted()'
  # Its measurements are those of the run that it is a copy of.
  own = sj.read_runs(tmp_path / 'outside/run').metrics
  columns = ['metric', 'step', 'block', 'value']
  assert len(own) > 50 and own[columns].equals(read.metrics[columns])
  words = [str(tmp_path / 'outside/planted.py'), str(planted)]
  shown = runs.run_python(
    '-c',
    (
      'import sys\nimport sink_jax as sj\n'
      'print(sj.load_run(sys.argv[2], plugins=sys.argv[1]).config.attention.similarity)'
    ),
    *words,
  )
  assert 'Planted(' in shown and (tmp_path / 'executed').exists()  # once it is named


READ_BY_REPORT = ['config.json', 'status.json', 'data.json', 'metrics.jsonl', 'analyses.json']


@pytest.mark.parametrize(
  'name',
  [
    *READ_BY_REPORT,
    'probe_tokens.npy',
    'tokenizer',
    'tokenizer/tokenizer.json',
    'checkpoints',
    'checkpoints/4/state',
    'checkpoints/4/state/manifest.ocdbt',
    'checkpoints/4/state/_METADATA',
    'checksums',
    'evaluation',
    'anything',
  ],
)
def test_a_link_out_of_the_folder_is_refused(planted, tmp_path, sweep_file, name):
  link, outside = linked_out(planted, name, tmp_path / 'outside/moved')
  with nothing_opened(tmp_path / 'outside'):
    with pytest.raises(ValueError, match=f'{link} .*link'):
      sj.load_run(planted)
    [row] = sj.read_runs(planted.parent).runs.itertuples()
    _, table, _ = status_of_sweep(planted, sweep_file)
  assert (row.status == 'unreadable') == (name in READ_BY_REPORT)
  assert ('not read' in table) == (name in ('status.json', 'metrics.jsonl'))


@pytest.mark.parametrize('name', ['status.json', 'checkpoints/4/state', 'evaluation'])
def test_no_command_follows_a_link_out_of_the_folder(planted, tmp_path, name):
  link, outside = linked_out(planted, name, tmp_path / 'outside/moved')
  with nothing_opened(tmp_path / 'outside'):
    for words in commands(planted, tmp_path):
      code, _, error = run_here(*words)
      assert words[0] == 'report' or code == 1 and str(link) in error, words
  assert not (outside / 'index.html').exists()


def linked_out(folder, name, outside):
  """Moves a file or folder outside, or makes one, and links it; returns the link and its end."""
  link = folder / name
  if link.exists():
    link.rename(outside)
  elif name.endswith('json'):
    outside.write_text('{}')
  else:
    outside.mkdir()
  link.symlink_to(outside)
  return link, outside


def test_links_within_the_folder_and_to_the_folder_are_followed(planted):
  (planted / 'checkpoints').rename(planted / 'elsewhere')
  (planted / 'checkpoints').symlink_to('elsewhere')
  (planted.parent / 'link').symlink_to(planted)
  assert sj.load_run(planted.parent / 'link').step == 4
  assert not sj.read_runs(planted).runs.status.eq('unreadable').any()


def test_names_in_checkpoints_lead_nowhere_else(planted, tmp_path, monkeypatch):
  secret = tmp_path / 'outside/planted.py'
  for step in saved_steps(planted):
    change(planted / f'checksums/{step}.0.json', {str(secret): '0'})
  with nothing_opened(secret.parent), pytest.raises(CheckpointError):
    sj.load_run(planted)
  shutil.rmtree(planted / 'checksums')
  assert sj.load_run(planted).step == 4
  for step in saved_steps(planted):  # names of arrays are then paths
    change(planted / f'checkpoints/{step}/state/_METADATA', {'use_ocdbt': False})
  readers = []  # of Orbax, which would open them
  monkeypatch.setattr(checkpoint.ocp, 'PyTreeCheckpointHandler', lambda: readers.append('made'))
  with pytest.raises(CheckpointError):
    sj.load_run(planted)
  assert not readers


@pytest.mark.parametrize('name', ['../outside/run', '{outside}/run', 'link'])
def test_a_table_of_runs_names_only_runs_of_its_folder(planted, tmp_path, name):
  root, outside = planted.parent, tmp_path / 'outside'
  (root / 'link').symlink_to(outside / 'run')
  read = sj.read_runs(root)
  shutil.rmtree(planted)
  for frame in read:
    frame['run'] = name.format(outside=outside)
  write_runs(read, root)
  with nothing_opened(outside):
    code, _, error = run_here('report', f'--runs={root}', f'--out={tmp_path / "report"}')
  assert code == 0, error
  assert 'No attention map of' in (tmp_path / 'report/report.md').read_text()
  (root / 'metrics.csv.gz').rename(outside / 'metrics.csv.gz')
  (root / 'metrics.csv.gz').symlink_to(outside / 'metrics.csv.gz')
  with nothing_opened(outside), pytest.raises(ValueError, match='metrics.csv.gz .*link'):
    sj.read_runs(root)


def test_analyses_and_evaluations_of_others_are_read_from_their_folders(planted, tmp_path):
  assert run_here('evaluate', f'--workdir={planted}', '--sequences=2')[0] == 0
  evaluation, outside = planted / 'evaluation', tmp_path / 'outside'
  report = ('report', f'--runs={planted}', f'--out={tmp_path / "report"}', '--no-maps')
  for name in ('norms.png', 'sink_report.json'):
    (evaluation / name).rename(outside / name)
    (evaluation / name).symlink_to(outside / name)
    with nothing_opened(outside):
      code, _, error = run_here(*report, f'--evaluation={evaluation}')
    assert code == 1 and str(evaluation / name) in error
  (tmp_path / 'found').mkdir()
  (tmp_path / 'found/norms.json').symlink_to(outside / 'sink_report.json')
  with nothing_opened(outside):
    code, _, error = run_here(*report, f'--analyses={tmp_path / "found"}')
  assert code == 1 and 'norms.json' in error


def test_an_own_config_decides_which_data_are_opened_for_analyses(trained, tmp_path):
  """The analyses of a sweep validate on the data of its config, whatever the stored one names."""
  config = runs.config(
    data__source=f"TextFolder(path='{trained.parent}/texts')",
    steps=4,
    data__cache_dir=str(trained.parent / 'cache'),
    attention__kv_bias='KBias()',
  )
  trial = Trial('biased', config)
  assert run_trial(trial, tmp_path, show_progress=False) == 'done'
  analyses = tmp_path / 'biased/analyses.json'
  found = analyses.read_text()
  analyses.unlink()
  change(tmp_path / 'biased/config.json', {'data': {'cache_dir': str(tmp_path / 'outside')}})
  assert run_trial(trial, tmp_path, show_progress=False) == 'done'
  assert analyses.read_text() == found and not (tmp_path / 'outside').exists()


def test_packed_data_of_others_name_only_their_own_files(trained, tmp_path):
  [folder] = [path.parent for path in (trained.parent / 'cache').rglob('manifest.json')]
  copy, outside = tmp_path / 'packed', tmp_path / 'outside'
  shutil.copytree(folder, copy)
  outside.mkdir()
  [shard] = [path.name for path in copy.glob('*.bin')]
  (copy / shard).rename(outside / shard)
  (copy / shard).symlink_to(outside / shard)
  manifest = json.loads((copy / 'manifest.json').read_text())
  for name in (shard, f'../outside/{shard}', str(outside / shard)):
    manifest['shards'][0] = name
    (copy / 'manifest.json').write_text(json.dumps(manifest))
    with nothing_opened(outside), pytest.raises(ValueError, match=shard):
      Packed(copy)


def test_validation_text_is_packed_without_the_path_of_the_packed_tokenizer(trained, tmp_path):
  [folder] = [path.parent for path in (trained.parent / 'cache').rglob('manifest.json')]
  copy, texts = tmp_path / 'packed', trained.parent / 'texts'
  shutil.copytree(folder, copy)
  Bytes().open().save(tmp_path / 'outside')
  shutil.copy(tmp_path / 'outside/tokenizer.json', copy)
  change(
    copy / 'manifest.json',
    {'tokenizer': f"HuggingFace(path='{tmp_path}/outside')", 'valid_fraction': 0},
  )
  config = runs.config(
    data__source=f"PackedDataset(path='{copy}')",
    steps=1,
    data__valid_source=f"TextFolder(path='{texts}')",
    data__cache_dir=str(tmp_path / 'cache'),
  )
  with nothing_opened(tmp_path / 'outside'):
    train(config, tmp_path / 'run', show_progress=False)


def test_an_index_of_weights_names_only_files_of_its_folder(tmp_path):
  tiny.write(tmp_path / 'model', files=3)
  index = json.loads((tmp_path / 'model' / INDEX).read_text())
  for name in ('../x.safetensors', str(tmp_path / 'x.safetensors')):
    weights = dict.fromkeys(index['weight_map'], name)
    (tmp_path / 'model' / INDEX).write_text(json.dumps(index | {'weight_map': weights}))
    with pytest.raises(ValueError, match=INDEX):
      Checkpoint(tmp_path / 'model')


@pytest.mark.parametrize('name', ['', 'a/../b', '..', '/etc/passwd', 'out/x', 'out'])
def test_names_that_lead_out_of_a_folder(tmp_path, name):
  (tmp_path / 'in').mkdir()
  (tmp_path / 'in/out').symlink_to(tmp_path)
  if name:
    with pytest.raises(ValueError):
      inside(tmp_path / 'in', name)
  else:
    (tmp_path / 'link').symlink_to(tmp_path / 'in')
    assert inside(tmp_path / 'link', 'new/file') == tmp_path / 'link/new/file'


class Tags(HTMLParser):
  """The tags of a page, its title, and where its links and pictures lead."""

  def __init__(self, page):
    super().__init__()
    self.tags, self.title, self.places, self._inside = set(), '', [], ''
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self.places += [value for key, value in attrs if key in ('src', 'href')]
    self._inside = tag

  def handle_data(self, data):
    self.title += data if self._inside == 'title' else ''

  def handle_endtag(self, tag):
    self._inside = ''


PLAIN = {
  'html',
  'meta',
  'title',
  'style',
  'main',
  'h1',
  'h2',
  'p',
  'img',
  'em',
  'strong',
  'code',
  'div',
  'table',
  'thead',
  'tbody',
  'tr',
  'th',
  'td',
  'ul',
  'li',
  'details',
  'summary',
}


def test_names_put_no_markup_into_pages(trained, tmp_path):
  name = '<script>alert(1)<b> [x](http:x) &amp; `<i>`'
  shutil.copytree(trained, tmp_path / name)
  assert run_here('evaluate', f'--workdir={tmp_path / name}', '--sequences=2')[0] == 0
  evaluation = tmp_path / name / 'evaluation'
  page = Tags((evaluation / 'index.html').read_text())
  assert page.title == name and page.tags <= PLAIN
  assert all(place.startswith('data:image/png') for place in page.places)

  # Every text of a run's files that a page shows.
  root = tmp_path / 'runs'
  for trial in ('default', 'sigmoid'):
    folder = fake_runs.write_run(
      root,
      trial,
      task='',
      reason=LABEL,
      config={'label.trial': trial + LABEL, 'data.source': f"TextFolder(path='){LABEL}')"},
    )
    change(folder / 'status.json', dict.fromkeys(('hardware', 'code', 'command'), LABEL))
    change(folder / 'status.json', {'status': 'done' if trial == 'default' else f'failed{LABEL}'})
  out = tmp_path / 'report'
  code, _, error = run_here(
    'report', f'--runs={root}', f'--out={out}', f'--evaluation={evaluation}'
  )
  assert code == 0, error
  page = Tags((out / 'index.html').read_text())
  assert page.tags <= PLAIN and all(place.startswith('data:image/png') for place in page.places)
  assert page.title == name


@pytest.mark.parametrize('task', ['paper', 'lm', 'grid', 'sft', 'graft', LABEL])
def test_names_put_no_markup_into_the_results(tmp_path, task):
  """Pages in Markdown, rendered with HTML as markup, as other programs show them."""
  root = tmp_path / 'runs'
  trials = ['default', 'softmax', 'continued', 'sft-softmax', 'sft-sigmoid', LABEL]
  for trial in [f'rate-1-product-{LABEL}'] if task == 'grid' else trials:
    for seed in (0, 1):
      folder = fake_runs.write_run(
        root,
        trial.replace('/', ''),
        seed,
        task=task,
        config={'label.trial': trial, 'label.protocol': LABEL, 'label.budget': LABEL},
      )
      texts = ('hardware', 'code', 'command', 'date')
      change(folder / 'status.json', dict.fromkeys(texts, LABEL))
  fake_runs.write_run(root, 'paper', task='paper')
  failed = fake_runs.write_run(root, 'failed', task=task, config={'label.budget': 'desk'})
  change(failed / 'status.json', {'status': LABEL})
  code, _, error = run_here('report', f'--runs={root}', f'--out={tmp_path / "out"}')
  assert code == 0, error
  for file in (tmp_path / 'out').glob('*.md'):
    html = MarkdownIt('commonmark', {'html': True}).enable('table').render(file.read_text())
    page = Tags(html)
    assert page.tags <= PLAIN | {'a', 'ol', 'h3'}, file
    assert not [place for place in page.places if ':' in place], file


def test_a_page_holds_its_own_pictures_only():
  text = (
    '# Title\n\n![a](a.png) ![b](../b.png) ![c](http://host/c.png)\n'
    '<img src="../b.png"> <b onclick="x">\n'
  )
  page = Tags(to_html(text, {'a.png': b'a'}))
  assert page.places == ['data:image/png;base64,YQ==', '', ''] and 'b' not in page.tags
