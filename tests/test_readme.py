"""The examples of README.md, with --full of docs/ too, run unchanged but with short trials."""

import contextlib
import json
import re
import shlex
import shutil
import tomllib
from unittest import mock

import pytest

from sink_jax.pretrained.hub import PACKAGED
from tests.commands import run_here
from tests.documents import ROOT, TEXTS, blocks
from tests.train.runs import run_python

README, BUILD = TEXTS['README.md'], (ROOT / 'BUILD.md').read_text()
# Examples that name it are left out if it is not installed.
PUBLISHED = 'SmolLM2-135M-Instruct'
WALKS = [f'docs/add_{what}.md' for what in ('variant', 'analysis', 'family')]
# Makes a block of code a module of the package, as if it were a file with this title.
MODULES = """
import importlib, sys, types
def add_module(title, source):
  name = title.removesuffix('.py').replace('/', '.')
  parent, _, last = name.rpartition('.')
  sys.modules[name] = module = types.ModuleType(name)
  setattr(importlib.import_module(parent), last, module)
  exec(compile(source, title, 'exec'), vars(module))
"""


@pytest.fixture(scope='module')
def project(tmp_path_factory, request):
  """A folder with the configs, after all examples have run, and the names that they define."""
  folder = tmp_path_factory.mktemp('project')
  shutil.copytree(ROOT / 'configs', folder / 'configs')
  trials = folder / 'configs' / 'quickstart.py'
  short, count = re.subn(
    r"(steps|batch_size|validation.batches)': \d+", r"\1': 4", trials.read_text()
  )
  assert count == 3
  trials.write_text(short)
  shutil.copy(ROOT / 'LICENSE', folder)  # a text that an example reads
  for name in ('docs', 'results'):
    shutil.copytree(ROOT / name, folder / name)
  names, seen, full = {}, set(), request.config.getoption('--full')
  chosen = [
    (path, language, block)
    for path, language, _, block in blocks()
    if path not in WALKS and (full or path == 'README.md')
  ]
  # Python runs last: it may load what the commands have made.
  for path, language, block in sorted(chosen, key=lambda one: one[1] == 'python'):
    if language == 'python' and not published(full):
      block = block.replace(PUBLISHED, 'exported')  # uses a small model instead
    if language == 'python':
      with contextlib.chdir(folder):
        exec(compile(block, path, 'exec'), names)
    elif language == 'bash':
      for name, text in re.findall(
        r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$", block, re.DOTALL | re.MULTILINE
      ):
        (folder / name).write_text(text)
      for line in block.splitlines():
        command = re.match(r'(?:python -m sink_jax[. ]|sink-jax )(.*)', line)
        # Some lines appear both in the README and on a page.
        needs_quickstart = '=quickstart/' in line  # what launch/quickstart.sh made
        if command is None or command[1] in seen or needs_quickstart:
          continue
        if PUBLISHED not in line or published(full):
          seen.add(command[1])
          _run(shlex.split(command[1], comments=True), folder)
  return folder, names


def published(full):
  """True if the examples of the published model run unchanged, which takes a minute."""
  return full and PACKAGED[PUBLISHED].find() is not None


def _run(words, folder):
  """Runs a shortened command of a document."""
  name, *options = words
  line = ' '.join(words)
  if name == 'sweep':  # other processes would need the devices of this one
    options += ['--processes=1']
  if 'synthetic' in line:
    options += ['--only=synthetic-default-seed-0', '--config.steps=12']
  elif '--budget=desk' in line:
    options += ['--only=default,heads-1', '--config.steps=12', '--config.validation.batches=1']
  elif 'benchmark attention' in line:
    options += ['--shape', '1', '1', '64', '16']
  elif 'configs/base.py' in line:
    options += ['--config.validation.batches=1', '--config.probe.sequences=4']
  elif name == 'card':  # for a small model
    options = ['--checkpoint=exported', *options[1:]]
  elif 'analyses streaming' in line:
    options += ['--sequences=2', '--length=100']  # later options replace earlier ones
  with contextlib.chdir(folder), mock.patch('sink_jax.train.multihost.init_distributed'):
    code, _, error = run_here(name, *options)
  assert code == 0, f'{line}\n{error}'


def test_commands_and_snippets(project, request):
  folder, names = project
  for file in (
    'analyses/lengths.png',
    'exported/tokenizer.json',
    'runs/report/index.html',
    'runs/quickstart/text-sigmoid/status.json',
  ):
    assert (folder / file).exists(), file
  assert names['report'].sink_rate() >= 0 and (folder / 'importance.png').stat().st_size > 5000
  graft = names['gated'].graft
  assert graft.exact and abs(graft.loss_after - graft.loss_before) < 1e-4
  if published(request.config.getoption('--full')):
    summary = json.loads((folder / f'evaluation-{PUBLISHED}' / 'sink_report.json').read_text())[
      'summary'
    ]
    assert f'Sink_1 = {summary["sink_1"]:.1f} %' in README
    assert f'# Sink_1 = {100 * names["report"].sink_rate():.1f} %' in README
    assert f'{max(summary["hidden_ratio"]):.0f} times' in README
  if request.config.getoption('--full'):
    assert 'heads-1-seed-0 | not expressible' in (folder / 'runs/desk/summary.md').read_text()
    assert (
      'Table 15' in (folder / 'report/README.md').read_text() and (folder / 'lengths.png').exists()
    )
    assert names['text'].shape == (1, 40) and len(names['words']) == 2
    assert names['out'].shape == (2, 256, 4, 32) and names['alpha'].raw.shape == (2, 4, 256)


@pytest.mark.full
def test_walk_throughs(project):
  """Runs in a separate process, because it adds a component, an analysis and a family."""
  folder, _ = project
  program = MODULES + ''.join(
    f'add_module({title!r}, {block!r})\n' if title else block
    for path, language, title, block in blocks()
    if path in WALKS and language == 'python'
  )
  assert re.search(r'^text +1 ', run_python('-c', program, cwd=folder), re.MULTILINE)
  assert (folder / 'strongest.png').stat().st_size > 5000


def test_extras_that_are_named_exist():
  extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
  modules = (ROOT / 'sink_jax').rglob('*.py')
  texts = [*TEXTS.values(), BUILD, *(path.read_text() for path in modules)]
  named = [found for text in texts for found in re.findall(r'(?:sink_jax|"\.)\[([\w,]+)\]', text)]
  assert 'gpu' in named and set(','.join(named).split(',')) <= set(extras)
