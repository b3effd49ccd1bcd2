"""The sweep as a command: several processes, kills, and what a person sees."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sink_jax.sweep.runner import run_trial
from sink_jax.sweep.trials import load_trials
from sink_jax.train.workdir import read_status
from tests.commands import run_here
from tests.train import runs
from tests.train.test_loop import stop_after

ROOT = Path(__file__).parents[2]
TABLE = """
from configs import base, remedies
from tests.train.runs import SMALL

SLOW = SMALL | {{'steps': 80, 'checkpoint_every': 8, 'log_every': 5, 'probe.every': 50,
                'validation.every': 0}}
TRIALS = {trials}


def get_config(name):
  return base.trial(TRIALS, name)
"""
THREE = """{'a': SMALL, 'b': SMALL | {'seed': 1},
            'bad': SMALL | {'data.source': "Jsonl(path='x')"}}"""
# Remedies with fewer steps and more checkpoints. The models are so small that one thread computes
# the sums of a step. Sums by several threads may differ in the last digit.
REMEDIES = """{name: remedies.TRIALS[name] | {
    'steps': 80, 'checkpoint_every': 8, 'log_every': 5, 'probe.every': 40, 'validation.every': 40,
    'batch_size': 8, 'model.d_model': 16}
    for name in ('trigger-softmax', 'trigger-k-bias', 'trigger-sink-logit')}"""
SLOW = "{name: SLOW | {'seed': i} for i, name in enumerate('abc')}"


def start(folder, trials, *options):
  (folder / 'table.py').write_text(TABLE.format(trials=trials))
  return subprocess.Popen(
    [
      sys.executable,
      '-m',
      'sink_jax',
      'sweep',
      f'--config={folder / "table.py"}',
      f'--workdir={folder / "runs"}',
      *options,
    ],
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    env=dict(os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT)),
  )


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
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
def test_a_sweep_survives_kills_of_trials_and_of_itself(tmp_path):
  sweep = start(tmp_path, REMEDIES, '--processes=2')
  runs.wait_for(lambda: len(workers_of(sweep)) == 2, sweep)
  os.kill(workers_of(sweep)[0], signal.SIGKILL)  # before its trial began
  *first, last = load_trials(tmp_path / 'table.py')
  runs.wait_for(lambda: runs.last_step(tmp_path / 'runs' / last) > 20, sweep)
  os.kill(workers_of(sweep)[0], signal.SIGKILL)  # as the kernel does when memory is short
  sweep.kill()
  assert 'Traceback' not in sweep.communicate()[1]
  records = [read_status(tmp_path / 'runs' / name) for name in first]
  assert 'died (-9)' in next(r['error'] for r in records if r['status'] == 'failed')
  again = start(tmp_path, REMEDIES, '--processes=2')
  out, err = again.communicate(timeout=300)
  assert again.returncode == 0 and out.splitlines() == [f'{name}: done' for name in (*first, last)]
  assert re.search(r'\[3/3\] \S+: done', err) and 'next: python -m sink_jax report' in err
  summary = (tmp_path / 'runs/summary.md').read_text()
  for part in ('# Not running', '3 done', f'| {last} | done | 80 of 80 |'):
    assert part in summary
  for name, trial in load_trials(tmp_path / 'table.py').items():
    run_trial(trial, tmp_path / 'whole', show_progress=False)
    assert runs.rows(tmp_path / 'runs' / name) == runs.rows(tmp_path / 'whole' / name)


def assert_saved(code, err, workdir):
  assert code == 42 and 'resumes' in err and 'Traceback' not in err
  status = read_status(workdir)
  assert status['status'] == 'interrupted' and status['step'] == status['last_good_checkpoint']


def test_a_stopped_sweep_saves_and_says_so(tmp_path):
  sweep = start(tmp_path, SLOW, '--processes=2')
  runs.wait_for(lambda: runs.last_step(tmp_path / 'runs' / 'a') > 20, sweep)
  sweep.send_signal(signal.SIGTERM)
  _, err = sweep.communicate(timeout=300)
  assert_saved(sweep.returncode, err, tmp_path / 'runs/a')


def here(folder, trials, *options):
  """A sweep of these trials within this process, as `run_here` runs it."""
  (folder / 'table.py').write_text(TABLE.format(trials=trials))
  config = f'--config={folder / "table.py"}'
  return run_here('sweep', config, f'--workdir={folder / "runs"}', *options)


def test_a_stopped_sweep_of_one_process_begins_no_other_trial(tmp_path, monkeypatch):
  stop_after(monkeypatch, 3)
  monkeypatch.setattr('sink_jax.train.multihost.init_distributed', lambda: None)  # JAX runs already
  code, _, err = here(tmp_path, SLOW)
  assert_saved(code, err, tmp_path / 'runs/a')
  assert not (tmp_path / 'runs/b').exists()


def test_status_shards_and_costs_without_running(tmp_path):
  def shown(*options):
    code, out, err = here(tmp_path, THREE, *options)
    assert code == 0, err
    return out

  out = shown('--status', '--shard=1/2')
  assert '2 not run' in out and '| bad |' in out and '| b |' not in out
  listed = shown('--list', '--seeds=0,1', '--only=a,b-seed-1')
  assert listed.split() == ['a-seed-0', 'a-seed-1', 'b-seed-1']
  out = shown('--dry_run', '--only=a,b')
  assert re.search(r'^a +6,480 +4,432 +1,024 ', out, re.M) and 'timed steps of a' in out
  assert not (tmp_path / 'runs').exists()
