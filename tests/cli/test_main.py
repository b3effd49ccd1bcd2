"""Parts that all commands share: config files, help, exit codes, and one-line errors."""

import os
import subprocess
import sys

import pytest

from sink_jax.attention.mask import Window
from sink_jax.cli import main, train
from sink_jax.data.sources import TextFolder
from sink_jax.sweep.pool import SweepStopped
from sink_jax.sweep.trials import read_config_file
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.evaluation import Diverged
from sink_jax.train.multihost import Interrupted, Unsaved
from tests.commands import run_here
from tests.train.runs import ROOT

QUICK = f'{ROOT}/configs/quickstart.py'
LIGHT = ('train', 'sweep', 'report', 'export')  # their --help does not wait for jax


def test_a_config_file_is_named_with_its_trial_and_changed_by_key():
  read = read_config_file(
    f'{QUICK}:text-k-bias',
    {
      'steps': '3',
      'attention.mask': 'Window(size=4)',
      'model.layers': '2',
      'data.bos': 'true',
      'optimizer.learning_rate': '1',
    },
  )
  assert (read.label.trial, read.steps, read.data.bos) == ('text-k-bias', 3, True)
  assert read.attention.mask == Window(4)
  assert read.optimizer.learning_rate == 1.0 and read.model.layers == 2
  assert read_config_file(f'{QUICK}:text-k-bias', {'model.layers': 'null'}).model.layers is None
  paper = read_config_file(f'{ROOT}/configs/paper.py:default,budget=tenth,protocol=released', {})
  assert (paper.label.budget, paper.label.protocol) == ('tenth', 'released')
  options, extras = main.parse(
    'train',
    [
      f'--config={QUICK}:text-softmax',
      '--workdir=a',
      "--config.data.source=TextFolder(path='a=b')",
    ],
  )
  assert options.workdir == 'a'
  assert extras['experiment'].data.source == TextFolder(path='a=b')
  options, extras = main.parse(
    'sweep', [f'--config={QUICK}', '--list', '--seeds=1,2', '--config.batch_size=2']
  )
  assert (options.seeds, options.list) == ((1, 2), True)
  assert extras == {'settings': {'batch_size': '2'}}
  options, extras = main.parse('evaluate', ['--workdir=a', '--length=8', '--sequences', '3'])
  assert (options.length, options.sequences) == (8, 3)
  assert extras['given'] == {'length', 'sequences', 'workdir'}


def test_a_config_file_imports_others_of_its_own_folder(tmp_path):
  folder = tmp_path / 'mine' / 'configs'
  folder.mkdir(parents=True)
  (folder / 'table_of_mine.py').write_text('TRIALS = {"one": {"steps": 3}}')
  (folder / 'trials.py').write_text(
    'import table_of_mine\nfrom configs import base\n'
    'def get_config(name): return base.trial(table_of_mine.TRIALS, name)\n'
  )
  assert read_config_file(f'{folder}/trials.py:one', {}).label.trial == 'one'


CONFIG = [f'--config={QUICK}:text-softmax', '--workdir=a']
FIXTURES = ROOT / 'tests/pretrained/fixtures'
LLAMA, GPT2 = (f'--checkpoint={FIXTURES / name}' for name in ('llama', 'gpt2'))


@pytest.mark.parametrize(
  'name, words, named',
  [
    ('train', [f'--config={QUICK}', '--workdir=a'], 'Name a trial'),
    ('train', [f'--config={QUICK}:text-k', '--workdir=a'], 'Did you mean text-k-bias'),
    ('train', [f'--config={ROOT}/configs/base.py:text', '--workdir=a'], 'has no trials'),
    ('train', ['--config=configs/none.py:a', '--workdir=a'], 'configs/none.py'),
    ('train', ['--config=broken.py', '--workdir=a'], 'broken.py: ModuleNotFoundError'),
    ('train', ['--config=disk.py', '--workdir=a'], '/no/such/file'),
    ('train', [*CONFIG, '--config.stepz=1'], 'Did you mean "steps"'),
    ('train', [*CONFIG, '--config.steps', '3'], 'write --config.KEY=VALUE'),
    ('train', [*CONFIG, '--config.steps=many'], 'steps=many'),
    ('train', [*CONFIG, '--config.model=x'], '--config.model=x'),
    ('train', [*CONFIG, '--devices=8'], '--devices=8 is for --dry_run'),
    (
      'sweep',
      [f'--config={QUICK}', '--list', '--seeds=1,2', '--config.seed=3'],
      'seed and --seeds',
    ),
    ('sweep', [f'--config={QUICK}:text-softmax', '--list'], '--only=text-softmax'),
    (
      'sweep',
      [f'--config={QUICK}', '--list', '--only=text'],
      'Did you mean text-softmax? Choices: ',
    ),
    ('sweep', [f'--config={QUICK}', '--list', '--config.model.size=2b'], 'tiny, 60m, 1b'),
    ('sweep', [f'--config={QUICK}', '--processes=-1', '--workdir=a'], '--processes=-1'),
    ('generate', [], 'either --checkpoint or --workdir'),
    ('evaluate', ['--checkpoint=Pythia-15M', '--out=x'], 'Pythia-14M'),
    ('evaluate', [LLAMA, '--out=x'], 'no tokenizer'),
    ('evaluate', [GPT2, '--out=x', '--inputs=random'], '16 learned positions'),
    ('report', ['--runs=folder', '--out=file'], '--out=file'),
    ('analyses', ['lengths', '--out=out'], 'name a model'),
    ('trian', [], 'Did you mean train? Choices: train, evaluate'),
  ],
  ids=lambda value: value if isinstance(value, str) and len(value) < 30 else '',
)
def test_what_cannot_be_is_one_line_that_names_it(tmp_path, monkeypatch, name, words, named):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'broken.py').write_text('import no_such_module')
  (tmp_path / 'disk.py').write_text('def get_config(name=""): open("/no/such/file")')
  (tmp_path / 'folder').mkdir()
  (tmp_path / 'file').write_bytes(b'\xff')
  code, _, said = run_here(name, *words)
  assert code == 1 and said.startswith('error: ') and named in said, said
  assert len(said.splitlines()) == 1 and not (tmp_path / 'a').exists()


def test_help_names_the_options_and_light_commands_import_no_jax():
  look = (
    'import sys\nfrom sink_jax.cli import main\nsys.argv = ["sink_jax", *sys.argv[1:]]\n'
    'try: main.main()\nfinally: print("jax" in sys.modules, file=sys.stderr)'
  )
  start = lambda name: subprocess.Popen(
    [sys.executable, '-P', '-c', look, name, '--help'],
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    env=dict(os.environ, PYTHONPATH=str(ROOT)),
  )
  wanted = {
    'sweep': '--dry_run',
    'report': '--analyses',
    'export': '--as',
    'evaluate': '--checkpoint',
    'train': 'optimizer.learning_rate = 0.0004',
  }
  for word, code in (('--help', 0), ('', 2)):
    found, out, _ = run_here(word)
    assert found == code and all(f'  {name} ' in out for name in main.COMMANDS)
  for name, option in wanted.items():
    out, err = start(name).communicate(timeout=120)
    assert option in out and f'python -m sink_jax {name}' in out, (name, out)
    assert err.strip() == str(name not in LIGHT or name == 'train'), (name, err)


@pytest.mark.parametrize(
  'error, code, words',
  [
    (Interrupted(3, 9), 42, 'Stopped and saved at step 3 of 9; the same command resumes.'),
    (SweepStopped(), 42, 'Stopped and saved; the same command resumes.'),
    (KeyboardInterrupt(), 42, 'Stopped and saved'),
    (Unsaved(), 130, 'a second Ctrl-C'),
    (Diverged(2, 1.0), 1, 'error: Step 2 diverged'),
    (ValueError('a key'), 1, 'error: a key'),
    (CheckpointError('damaged'), 1, 'error: damaged'),
    (RuntimeError('INTERNAL: Out of memory allocating'), 1, 'these help: a smaller batch_size'),
    (
      OSError('disk full'),
      1,
      'error: disk full. Checkpoints that were complete are kept in runs/a;',
    ),
    (KeyError('a defect'), 1, 'Traceback'),
    (ConnectionResetError('by peer'), 175, 'error: by peer. It may pass'),
  ],
  ids=lambda value: type(value).__name__,
)
def test_every_way_in_which_training_ends_has_its_exit_code(
  error, code, words, monkeypatch, capsys
):
  monkeypatch.setattr(os, '_exit', sys.exit)  # the real one cannot be caught
  with pytest.raises(SystemExit) as end:
    with train.training_ends('runs/a'):
      raise error
  said = capsys.readouterr().err if isinstance(end.value.code, int) else end.value.code
  assert (end.value.code if isinstance(end.value.code, int) else 1) == code and words in said
