"""The sweep as a command: several processes, kills, what a person sees."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sink_jax.cli.report import make_report
from sink_jax.cli.parser import parse
from sink_jax.cli.sweep import run_sweep
from sink_jax.sweep.batched import run_batched
from sink_jax.sweep.options import Options
from sink_jax.sweep.runner import run_trial
from sink_jax.sweep.trials import load_trials
from sink_jax.train.workdir import read_status
from tests.train import runs

ROOT = Path(__file__).parents[2]
TABLE = '''
from configs import base, remedies
from tests.train.runs import SMALL

SLOW = SMALL | {{'steps': 80, 'checkpoint_every': 8, 'log_every': 5, 'probe.every': 50,
                'validation.every': 0}}
TRIALS = {trials}


def get_config(name):
  return base.trial(TRIALS, name)
'''
THREE = """{'a': SMALL, 'b': SMALL | {'seed': 1},
            'bad': SMALL | {'data.source': "Jsonl(path='x')"}}"""
# Trials of the leaderboard with fewer steps and more checkpoints, and so small that the sums of a
# step are computed by one thread: those of several may differ in their last digit.
REMEDIES = """{name: remedies.TRIALS[name] | {
    'steps': 80, 'checkpoint_every': 8, 'log_every': 5, 'probe.every': 40, 'validation.every': 40,
    'batch_size': 8, 'model.d_model': 16}
    for name in ('trigger-softmax', 'trigger-k-bias', 'trigger-sink-logit')}"""
SLOW = "{name: SLOW | {'seed': i} for i, name in enumerate('abc')}"


def start(folder, trials, *options):
  (folder / 'table.py').write_text(TABLE.format(trials=trials))
  return subprocess.Popen(
      [sys.executable, '-m', 'sink_jax.sweep', f'--config={folder / "table.py"}',
       f'--workdir={folder / "runs"}', *options], text=True, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, env=dict(os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT)))


def run_here(folder, trials, *options):
  """The exit code of the command in this process, for what trains nothing."""
  (folder / 'table.py').write_text(TABLE.format(trials=trials))
  words = [f'--config={folder / "table.py"}', f'--workdir={folder / "runs"}', *options]
  return run_sweep(parse(Options, words, 'python -m sink_jax.sweep'))


def finish(process):
  out, err = process.communicate(timeout=300)
  return process.returncode, out, err


def wait_for(condition, process, seconds=120):
  deadline = time.monotonic() + seconds
  while not condition():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline, 'it did not happen'
    time.sleep(0.05)


def steps_of(folder, name):
  path = folder / 'runs' / name / 'metrics.jsonl'
  lines = path.read_text().splitlines() if path.exists() else []
  return max([json.loads(line)['step'] for line in lines if line.endswith('}')], default=0)


def workers_of(process):
  found = []
  for stat in Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = stat.read_text().rpartition(')')[2].split()
      if int(fields[1]) == process.pid and b'spawn_main' in (stat.parent / 'cmdline').read_bytes():
        found.append(int(stat.parent.name))
    except (OSError, IndexError):
      continue
  return found


@pytest.mark.full
def test_two_at_a_time_equal_one_after_the_other(tmp_path):
  code, out, err = finish(start(tmp_path, THREE, '--processes=2'))
  assert code == 1 and out.splitlines() == ['a: done', 'b: done', 'bad: failed']
  assert '3 trials' in err and re.search(r'\[3/3\] \w+: \w+', err)
  for name, trial in load_trials(tmp_path / 'table.py').items():
    assert f'{name}: {run_trial(trial, tmp_path / "one", show_progress=False)}' in out
  for name in ('a', 'b'):
    assert runs.rows(tmp_path / 'one' / name) == runs.rows(tmp_path / 'runs' / name)
    command = read_status(tmp_path / 'runs' / name)['command']
    assert command.startswith('python -m sink_jax.sweep') and '--processes=2' in command
  summary = (tmp_path / 'runs/summary.md').read_text()
  assert '# Not running' in summary and '2 done, 1 failed' in summary
  assert re.search(r'\| a \| done \| 8 of 8 \| \d+\.\d \| \d\.\d+ \|', summary)
  assert re.search(r"\| bad \| failed \|.*x does not exist", summary)


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
def test_a_sweep_survives_kills_of_workers_and_of_itself(tmp_path):
  sweep = start(tmp_path, REMEDIES, '--processes=2', '--noestimate')
  wait_for(lambda: len(workers_of(sweep)) == 2, sweep)
  os.kill(workers_of(sweep)[0], signal.SIGKILL)  # before it began
  *first, last = load_trials(tmp_path / 'table.py')
  wait_for(lambda: steps_of(tmp_path, last) > 20, sweep)
  os.kill(workers_of(sweep)[0], signal.SIGKILL)  # as the kernel does when memory is short
  sweep.kill()
  assert 'Traceback' not in sweep.communicate()[1]
  records = [read_status(tmp_path / 'runs' / name) for name in first]
  assert 'died (SIGKILL)' in next(r['error'] for r in records if r['status'] == 'failed')
  code, out, _ = finish(start(tmp_path, REMEDIES, '--processes=2', '--noestimate'))
  assert code == 0 and out.splitlines() == [f'{name}: done' for name in (*first, last)]
  for name, trial in load_trials(tmp_path / 'table.py').items():
    run_trial(trial, tmp_path / 'whole', show_progress=False)
    assert runs.rows(tmp_path / 'runs' / name) == runs.rows(tmp_path / 'whole' / name)
  for folder in ('runs', 'whole'):
    make_report(tmp_path / 'page' / folder, tmp_path / folder, kind='leaderboard')
  page = lambda folder, name: (tmp_path / 'page' / folder / name).read_bytes()
  for name in ('report.json', 'report.md', 'index.html', 'differences.png'):
    assert page('runs', name) == page('whole', name)
  assert b'| k-bias | done' in page('runs', 'report.md')


@pytest.mark.parametrize('options', [
    pytest.param((), marks=pytest.mark.full), ('--processes=2',)], ids=['one', 'two'])
def test_a_stopped_sweep_saves_and_says_so(tmp_path, options):
  sweep = start(tmp_path, SLOW, '--noestimate', *options)
  wait_for(lambda: steps_of(tmp_path, 'a') > 20, sweep)
  sweep.send_signal(signal.SIGTERM)
  code, _, err = finish(sweep)
  assert code == 42 and 'resumes' in err and 'Traceback' not in err
  assert '1 interrupted' in (tmp_path / 'runs/summary.md').read_text() or options
  status = read_status(tmp_path / 'runs/a')
  assert status['status'] == 'interrupted' and status['step'] == status['last_good_checkpoint']


@pytest.mark.full
def test_a_group_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path):
  batched = start(tmp_path, SLOW, '--batched', '--width=3', '--only=a,b')
  wait_for(lambda: steps_of(tmp_path, 'b') > 20, batched)
  batched.kill()
  assert 'Traceback' not in batched.communicate()[1]
  code, out, err = finish(start(tmp_path, SLOW, '--batched', '--only=a,b'))
  assert code == 0 and out.splitlines() == ['a: done', 'b: done']
  assert '2 trials in a group of 2: a, b' in err and 'resuming from step' in err
  table = load_trials(tmp_path / 'table.py')
  del table['c']
  assert dict(run_batched(table, tmp_path / 'whole')) == {'a': 'done', 'b': 'done'}
  for name in table:
    assert runs.rows(tmp_path / 'runs' / name) == runs.rows(tmp_path / 'whole' / name)


@pytest.mark.parametrize('options', [
    ('--batched', '--processes=2'), pytest.param(('--width=2',), marks=pytest.mark.full)])
def test_options_of_groups_are_refused_before_anything_begins(tmp_path, options):
  code, _, err = finish(start(tmp_path, SLOW, *options))
  assert code == 1 and err.startswith('error: --') and not (tmp_path / 'runs').exists()


def test_status_shards_and_costs_without_running(tmp_path, capsys):
  here = functools.partial(run_here, tmp_path, THREE)
  (tmp_path / 'runs' / 'other').mkdir(parents=True)
  (tmp_path / 'runs' / 'other' / 'config.json').write_text('{}')
  assert here('--status', '--shard=1/2') == 0
  out = capsys.readouterr().out
  assert '2 not run' in out and '| bad |' in out and '| b |' not in out
  assert out.endswith('Not among these trials, and in the folder: other\n')
  shutil.rmtree(tmp_path / 'runs')
  with pytest.raises(ValueError, match='--workdir=.*runs: there is no such folder'):
    here('--status')
  assert here('--list', '--seeds=0,1', '--only=a,b-seed-1') == 0
  assert capsys.readouterr().out.split() == ['a-seed-0', 'a-seed-1', 'b-seed-1']
  # Without their seeds, which would make a list many times as long.
  with pytest.raises(ValueError, match="--only: unknown trial 'bd'. Did you mean bad.* a, b, bad"):
    here('--list', '--seeds=0,1', '--only=bd')
  with pytest.raises(ValueError, match='--claims=emergence needs default, which.*desk.py'):
    here('--list', '--claims=emergence')
  assert here('--dry_run', '--only=a,b') == 0 and not (tmp_path / 'runs').exists()
  out = capsys.readouterr().out
  assert re.search(r'^a +[\d,]+ +8 +1,024 ', out, re.M) and 'device-hours' in out
  with pytest.raises(ValueError, match='x does not exist'):
    here('--data_only', '--only=a,bad')
  out = capsys.readouterr().out
  assert re.fullmatch(r'a: BigramBackcopy\(.*\): endless training tokens\n', out)
  assert not (tmp_path / 'runs').exists()
  with pytest.raises(ValueError, match='--processes=0'):
    here('--processes=0')