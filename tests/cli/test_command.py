"""What all commands share: config files, and errors in one line."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

from configs import quickstart, window
from sink_jax.analyses import lm_eval_package
from sink_jax.cli import command, entry, options, parser, plan, train
from sink_jax.data import inputs
from sink_jax.models.kv_cache import POSITIONS
from sink_jax.models.sizes import SIZES
from sink_jax.pretrained.parameters import DTYPES
from sink_jax.sweep.pool import SweepStopped
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.experiment import from_dict
from sink_jax.train.outcome import Diverged, Interrupted
from sink_jax.train.stop_handler import Unsaved
from tests.train.runs import ROOT

# As `python -m sink_jax train` reads its options, over and over in one process.
READER = """
import json, sys, types
from sink_jax.cli import command

def read(options):
  print(json.dumps(options.settings['label']['trial']))

sys.modules['sink_jax.cli.train'] = types.SimpleNamespace(main=read)
for line in sys.stdin:
  try:
    command.run('train', ['--workdir=a', *json.loads(line)])
  except SystemExit as end:
    if end.code:
      print(json.dumps(end.code))
"""


def read(*command_lines, **options):
  """The trial that each command line names, or the error it ends with."""
  done = subprocess.run(
      [sys.executable, '-P', '-c', READER], text=True, capture_output=True, **options,
      input=''.join(json.dumps(line) + '\n' for line in command_lines))
  assert done.returncode == 0, done.stderr
  return list(map(json.loads, done.stdout.splitlines()))


def test_a_config_file_is_named_with_its_trial_or_refused_in_one_line(tmp_path):
  (tmp_path / 'broken.py').write_text('import no_such_module')
  (tmp_path / 'disk.py').write_text('def get_config(): open("/no/such/file")')
  quick = f'--config={ROOT}/configs/quickstart.py'
  cases = [
      ([f'{quick}:text-k-bias', '--config.steps=3'], 'text-k-bias'),
      ([f'{quick}:text-k-bias', '--config.steps', '3', '-noconfig.data.bos'], 'text-k-bias'),
      ([quick], 'error: .*quickstart.py: Name a trial .* Choices: text-softmax, text-sigmoid, '),
      ([f'{quick}:text-k'], "error: .*Unknown trial 'text-k'. Did you mean text-k-bias. Choices: t"),
      ([f'--config={ROOT}/configs/base.py:text'], 'error: .*has no trials'),
      (['--config=configs/none.py:a'], 'error: .*there is no file configs/none.py'),
      (['--config=' + str(tmp_path / 'broken.py')], 'error: .*broken.py: ModuleNotFoundError'),
      (['--config=' + str(tmp_path / 'disk.py')], 'error: .*/no/such/file'),
      ([f'{quick}:text-softmax', '--config.stepz=1'], "error: the config has no such key: 'stepz'"),
      ([f'{quick}:text-softmax', '--config.steps=many'],
       'error: steps=many: it takes a whole number'),
      ([f'{quick}:text-softmax', '--wrkdir=1'],
       'error: there is no option --wrkdir. Did you mean --workdir?'),
      ([f'{quick}:text-softmax', '--config.data.bos', 'x'], 'error: .*true or false'),
      ([f'{quick}:text-softmax', '--noconfig.data.bos=x'], 'error: .*write --config.data.bos=x or'),
  ]
  found = read(*(line for line, _ in cases), env={'PYTHONPATH': str(ROOT)})
  assert len(found) == len(cases)
  for text, (_, words) in zip(found, cases):
    assert re.match(words, text), text
    assert '\n' not in text and 'Traceback' not in text


def test_a_config_file_imports_others_of_its_own_repository_from_any_folder(tmp_path):
  folder = tmp_path / 'mine' / 'configs'
  folder.mkdir(parents=True)
  (folder / '__init__.py').write_text('')
  (folder / 'base.py').write_text((ROOT / 'configs/base.py').read_text())
  (folder / 'table.py').write_text('TRIALS = {"one": {"steps": 3}}')
  (folder / 'trials.py').write_text(
      'from configs import base, table\n'
      'def get_config(name): return base.trial(table.TRIALS, name)\n')
  found = read([f'--config={folder}/trials.py:one'], cwd=tmp_path, env={'PYTHONPATH': str(ROOT)})
  assert found == ['one']
  found = read(['--config=configs/trials.py:one'], cwd=tmp_path / 'mine',
               env={'PYTHONPATH': str(ROOT)})
  assert found == ['one']


@pytest.mark.parametrize('module, text', [(quickstart, ''), (window, ''), (window, ',budget=smoke')])
def test_a_config_file_takes_none_of_its_trials_by_itself(module, text):
  with pytest.raises(ValueError, match=f'Name a trial.*{next(iter(module.TRIALS))}'):
    module.get_config(text)


def test_options_that_nothing_reads_are_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  # As if the harness were installed.
  monkeypatch.setattr(lm_eval_package, 'imported', lambda: None)
  (tmp_path / 'runs').mkdir()
  (tmp_path / 'runs' / 'file').write_bytes(b'\xff')
  folders = [f'--runs={tmp_path}/runs', f'--out={tmp_path}/out']
  table, quick = [f'--table={tmp_path}'], f'--config={ROOT}/configs/quickstart.py'
  cases = {
      'train': [
          (['--config=', '--workdir=a'], '--config= is empty'),
          ([f'{quick}:text-softmax', '--workdir=a', '--config.steps=2', '--config.steps=3'],
           'the config key steps is set twice'),
          ([f'{quick}:text-softmax', '--workdir=a', '--config.optimizer.schedule=constant',
            '--config.optimizer.final_fraction=0.5'], 'optimizer.final_fraction has no effect'),
          ([f'{quick}:text-softmax', '--workdir=a', '--config.init.source=a',
            '--config.model.size=1b'], 'model.size has no effect beside init.source')],
      'data_build': [(['--config.data.context=0'], 'data.context=0 must')],
      'benchmark': [
          (['show', f'{tmp_path}/no.json'], '.*/no.json: No such file or directory.'),
          (['show', f'{tmp_path}/runs/file'], '.*/file is no file that a benchmark wrote'),
          (['loss', f'--json={tmp_path}'], '--json=.* is a folder')],
      'evaluate': [(['--workdir=a', '--fsdp=1'], '--fsdp is for published models: a run is loaded')],
      'analyses': [
          (['lengths', '--workdir=runs,./runs/', '--out=runs/x'], './runs/ is named twice'),
          (['--list', '--checkpoint=a'], '--checkpoint is not used: --list'),
          (['hellaswag', '--checkpoint=a', '--out=runs/a', '--hellaswag=no.jsonl'],
           '.*(no such file|-harness is needed)'),
          (['lengths', '--checkpoint=a', '--out=runs/a', '--fsdp=3'], '--fsdp=3 does not divide')],
      'plan': [
          ([*table, '--config.steps=3'], '--config is for the plan of one run'),
          ([*table, '--topology=v5e:4x4'], '--topology is for the plan of one run: --table'),
          ([*table, '--scaling=a'], '--scaling is for'), (['--search', '--scaling=a'], '--search is'),
          (['--topology=v5e:1x1', '--step_seconds=1', '--share=0.5'], '--share is not used'),
          (['--topology=v5e:1x1', '--vocab=0'], '--vocab=0 must be at least 1'), ([], '--topology is missing'),
          (['--table='], '--table= is empty'),
          (['--table', '--scaling'], '--table is missing its value'),
          (['--topology=v5e:1x1', '--step_seconds=0'], '--step_seconds=0 is no time'),
          (['--topology=v5e:1x1', '--step_seconds=inf'], '--step_seconds=inf is no time'),
          (['--topology=v5e:1x1', '--step_seconds=1', '--search'], '--step_seconds is of one run'),
          (['--topology=v5e:1x1', f'--json={tmp_path}'], '--json=.* is a folder: name a file'),
          (['--topology=v5e:2x2', '--size=tiny', '--fsdp=3'],
           '.*their product .*--fsdp and --tensor set'),
          (['--topology=v5e:1x1', '--size=1b', '--config.init.source=a'], '--size has no effect'),
          (['--topology=v5e:1x1', quick], '.*Name a trial'),
          *[(['--topology=v5e:1x1', f'--{name}=1', f'--config.{key}=1'], f'--{name} and --config.{key}')
            for name, key in (('context', 'data.context'), ('vocab', 'model.vocab_size'))]],
      'sweep': [
          ([quick, '--list', '--dry_run'], '--list and --dry_run exclude'),
          ([quick, '--list', '--seeds=1,1'], 'different numbers'),
          ([quick, '--list', '--seeds=1,2', '--set=seed=3'], '.*key seed is set, and the seeds'),
          ([quick, '--status', '--workdir=none'], '--workdir=none: there is no such folder'),
          ([quick + ':text-softmax', '--list'], '.*Trials are chosen by --only=text-softmax'),
          ([quick, '--status'], '--workdir is needed with --status'),
          ([quick, '--list', '--seeds=-1'], 'from 0 to'), ([quick, 'more'], "argument 'more'"),
          ([quick, '--list', '--set=model.size=2b'], 'tiny, 60m, 1b'),
          ([quick, '--list', '--config.model.size=2b'], 'tiny, 60m, 1b'),
          ([quick, '--list', '--set=steps=3', '--config.steps=3'], 'steps is set twice')],
      'generate': [
          (['--checkpoint=a', '--sinks=2'], '--sinks is for a cache .* --cache_size'),
          (['--checkpoint=a', '--positions=text'], '--positions is for a cache'),
          (['--checkpoint=a', '--top_k=3'], '--top_k is for sampling: add --temperature'),
          (['--checkpoint=a', '--seed=3'], '--seed is for sampling'),
          (['--checkpoint=a', '--temperature=-1'], '--temperature=-1'),
          (['--checkpoint=a', '--temperature=inf'], '--temperature=inf'),
          (['--checkpoint=a', '--temperature=1', '--top_p=2'], '--top_p=2 must'),
          (['--checkpoint=a', '--cache_size=4'], '--cache_size=4 must be greater than --sinks=4'),
          (['--checkpoint=a', f'--prompt_file={tmp_path}'], '--prompt_file=.*: Is a directory.'),
          (['--checkpoint=a', f'--prompt_file={tmp_path}/runs/file'], '--prompt_file=.* is no UTF-8'),
          (['--checkpoint=a', '--cache_size=0'], '--cache_size=0')],
      'lm_eval': [
          ([], 'either --checkpoint or --workdir'), (['--checkpoint=a', '--workdir=b'], 'either'),
          (['--workdir=a', '--fsdp=2'], '--fsdp is for published models'),
          (['--checkpoint=a', '--limit=0'], '--limit=0 must be at least 1'),
          (['--checkpoint=a', '--num_fewshot=-1'], '--num_fewshot=-1'),
          (['--checkpoint=a', '--batch_size=many'], '--batch_size=many: write a whole number'),
          (['--checkpoint=a', '--bos=maybe'], '--bos=maybe: choose'),
          (['--checkpoint=a'], '--out is needed'),
          (['--checkpoint=a', f'--out={tmp_path}'], 'holds runs: name a new folder')],
      'report': [
          ([*folders, '--nomaps', '--kind=paper'], '--maps is for a comparison of runs'),
          ([folders[0], f'--out={tmp_path}/runs/file'], '--out=.*/file cannot be written to'),
          ([f'--analyses={tmp_path}/runs/file', folders[1]], '--analyses=.*/file is no .json file')],
  }
  for name, lines in cases.items():
    for line, words in lines:
      with pytest.raises(SystemExit) as end:
        command.run(name, line)
      text = end.value.code
      assert re.match(f'error: .*{words}', text) and '\n' not in text, (text, words)


def test_help_ends_well_and_imports_no_jax():
  """Every command at once, by its two names; its options offer what the modules behind it know."""
  wanted = {
      'train': '--config', 'sweep': '--dry_run', 'evaluate': f'{", ".join(inputs.BOS[:1])}',
      'analyses': '--checkpoint', 'report': '--kind', 'plan': f': {", ".join(SIZES)}.',
      'benchmark': 'train_step', 'generate': f'{{{",".join(POSITIONS)}}}',
      'export': f'{{{",".join(DTYPES)}}}', 'lm_eval': '--num_fewshot', 'data_build': '--workers'}
  look = ('import runpy, sys\n'
          'try: runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)\n'
          'finally: print("jax" in sys.modules, file=sys.stderr)')
  assert set(wanted) == set(options.COMMANDS)
  # Every other command by its older name.
  words = {name: [f'sink_jax.{name}'] if number % 2 else ['sink_jax', name]
           for number, name in enumerate(wanted)}
  started = {name: subprocess.Popen(
      [sys.executable, '-P', '-c', look, *words[name], '--help'], text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=str(ROOT)))
             for name in wanted}
  for name, process in started.items():
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err.strip()) == (0, 'False'), (name, err)
    assert ''.join(wanted[name].split()) in ''.join(out.split()), (name, out)
    # What it does in a sentence, an example, and the options with their defaults.
    assert re.match(rf'[A-Z][^\n]*\.\n\n    python -m sink_jax {name} [^\n]*-', out), out
    assert f'usage: python -m sink_jax {name} ' in out and '\x1b' not in out
    assert "(default: )" not in out and 'None)' not in out, out


def test_scores_without_the_harness_end_in_one_line_before_jax():
  script = ('import sys\nsys.modules["lm_eval"] = None\nfrom sink_jax.cli import entry\n'
            'sys.argv = ["sink_jax", "lm_eval", "--checkpoint=a"]\n'
            'try: entry.main()\nfinally: print("jax" in sys.modules)')
  done = subprocess.run([sys.executable, '-P', '-c', script], text=True, capture_output=True,
                        env=dict(os.environ, PYTHONPATH=str(ROOT)))
  assert (done.returncode, done.stdout.strip(), done.stderr.count('\n')) == (1, 'False', 1)
  assert re.match(r"error: .*pip install 'sink_jax\[evaluation\]'", done.stderr)


@pytest.mark.parametrize('error, code, words', [
    (Interrupted(3, 9), 42, 'Stopped and saved at step 3 of 9; the same command resumes.'),
    (SweepStopped(), 42, 'Stopped and saved; the same command resumes.'),
    (KeyboardInterrupt(), 42, 'Stopped and saved'), (Unsaved(), 130, 'a third Ctrl-C'),
    (Diverged(2, 1.0), 1, 'error: Step 2 diverged'), (ValueError('a key'), 1, 'error: a key'),
    (CheckpointError('damaged'), 1, 'error: damaged'),
    (RuntimeError('INTERNAL: Out of memory allocating'), 1, 'these help: a smaller batch_size'),
    (OSError('disk full'), 1, 'error: disk full. Checkpoints that were complete are kept in runs/a;'),
    (KeyError('a defect'), 1, 'Traceback')], ids=lambda value: type(value).__name__)
def test_every_way_in_which_training_ends_has_its_exit_code(error, code, words, monkeypatch, capsys):
  monkeypatch.setattr(os, '_exit', sys.exit)  # which nobody could catch
  with pytest.raises(SystemExit) as end:
    with train.training_ends('runs/a'):
      raise error
  said = capsys.readouterr().err if isinstance(end.value.code, int) else end.value.code
  assert (end.value.code if isinstance(end.value.code, int) else 1) == code and words in said


def test_a_command_is_named_or_the_nearest_is(monkeypatch, capsys):
  def ended(*words):
    monkeypatch.setattr(sys, 'argv', ['sink_jax', *words])
    with pytest.raises(SystemExit) as end:
      entry.main()
    return end.value.code

  assert ended('trian') == (
      "error: there is no command 'trian'. Did you mean train? It is one of "
      f'{", ".join(options.COMMANDS)}.')
  assert ended('--help') == ended('-h') == 0 and ended() == 2
  assert capsys.readouterr().out.count('data_build') == 3


def test_every_older_name_of_a_command_starts_it():
  package = ROOT / 'sink_jax'
  for name in options.COMMANDS.keys() - {'data_build'}:
    path = package / (name.replace('.', '/') + '.py')
    path = path if path.exists() else package / name / '__main__.py'
    assert f"start('{name}')" in path.read_text()


def test_a_plan_of_a_config_of_bytes_has_their_vocabulary():
  experiment = from_dict(quickstart.get_config('text-softmax').to_dict())
  chosen = parser.parse(options.Plan, ['--config=configs/quickstart.py:text-softmax',
                                       '--topology=v5e:1x1'], 'python -m sink_jax plan')
  assert plan._vocab(experiment, chosen) == 258
  # So has one without a file whose tokenizer was chosen; without either it is the paper's.
  for words, size in ((['--config.data.tokenizer=Bytes()'], 258), ([], 50432)):
    assert _job(*words).model.vocab_size == size


def _job(*words):
  chosen = parser.parse(options.Plan, ['--topology=v5e:1x1', *words], '')
  return plan._job(dataclasses.replace(chosen, settings=command.read_config(chosen)))


def test_the_size_of_a_plan_takes_the_place_of_a_config_files_numbers():
  text = f'--config={ROOT}/configs/quickstart.py:text-softmax'
  shape = lambda job: (job.model.layers, job.model.d_model, job.model.heads, job.model.ffn_hidden)
  assert shape(_job(text)) != shape(_job(text, '--size=60m')) == (10, 768, 8, 1536)
  assert shape(_job(text, '--size=60m', '--config.model.layers=3')) == (3, 768, 8, 1536)
