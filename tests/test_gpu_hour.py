"""launch/gpu_hour.sh at tiny shapes: a trainer that outlives its calls, and what they leave."""

import contextlib
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from sink_jax.sweep import archive, detached, machine, summary

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform == 'win32', reason='needs bash and fcntl')
SHORT = ['--set=steps=6', '--set=data.tokenizer=Bytes()']


def loaded():
  spec = importlib.util.spec_from_file_location('gpu_hour', ROOT / 'launch/gpu_hour.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


gpu_hour = loaded()


def start(folder, *arguments):
  return subprocess.Popen(
      ['bash', str(ROOT / 'launch/gpu_hour.sh'), *arguments], cwd=folder, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      env=os.environ | {'PYTHON': sys.executable, 'JAX_PLATFORMS': 'cpu'})


def finish(process):
  out, err = process.communicate(timeout=300)
  return process.returncode, out, err


def options(folder, *arguments):
  made = gpu_hour._parsed([*arguments, f'--out={folder / "out"}', f'--work={folder / "work"}'])
  for path in (made.out, made.work):
    path.mkdir(exist_ok=True)
  return made


@contextlib.contextmanager
def killed_at_the_end(work):
  try:
    yield
  finally:
    if gpu_hour._alive(work):
      os.kill(detached.holder_pid(work / 'trainer.lock'), signal.SIGKILL)


class Trainer:
  """A small program in the place of the sweep, and trials that are files of a folder."""

  def __init__(self, monkeypatch, folder, program):
    self.options, self.headlines = options(folder, 'emergence', '--limit=20'), []
    monkeypatch.setattr(gpu_hour, 'BEGAN', time.monotonic())
    monkeypatch.setattr(gpu_hour, '_sweep', lambda *_: [sys.executable, '-c', program])
    monkeypatch.setattr(gpu_hour.Collector, 'collect',
                        lambda collector, headline: self.headlines.append(headline))

  def __call__(self):
    return gpu_hour.emergence(self.options, dict(os.environ), gpu_hour._trials(self.options))


def test_a_trainer_that_dies_is_told_and_started_again_by_the_next_call(
    monkeypatch, tmp_path, capsys):
  call = Trainer(monkeypatch, tmp_path, 'import os, signal; print("out of memory", flush=True); '
                 'os.kill(os.getpid(), signal.SIGKILL)')
  assert call() == 42 and call() == 42
  error = capsys.readouterr().err
  assert error.count('The trainer has been started') == 2 and 'out of memory' in error
  assert 'exit code -9' in error and call.headlines[-1] == 'The trainer has ended.'


def test_an_error_of_the_trainer_is_an_error(monkeypatch, tmp_path, capsys):
  assert Trainer(monkeypatch, tmp_path, 'raise SystemExit("error: no GPU")')() == 1
  assert 'error: no GPU' in capsys.readouterr().err


def test_a_call_ends_by_its_limit_and_another_finds_the_trainer(monkeypatch, tmp_path, capsys):
  call = Trainer(monkeypatch, tmp_path, 'import time; time.sleep(60)')
  with killed_at_the_end(call.options.work):
    call.options.limit = 13  # of which 11 are for the last report
    assert call() == 42 and 'The trainer goes on' in capsys.readouterr().err
    number = detached.holder_pid(call.options.work / 'trainer.lock')
    call.options.limit = 13 + time.monotonic() - gpu_hour.BEGAN
    assert call() == 42
    assert 'The trainer is at work' in capsys.readouterr().err
    assert detached.holder_pid(call.options.work / 'trainer.lock') == number
    call.options.command, call.options.limit = 'stop', 60
    assert call() == 0 and not gpu_hour._alive(call.options.work)
    assert '5 trials are not done: emergence goes on' in capsys.readouterr().err


@pytest.mark.parametrize('written, words', [
    ('', 'does not name'), ('nobody', 'does not name'), (str(os.getppid()), 'does not hold')])
def test_stop_ends_no_process_but_the_one_that_holds_the_lock(
    monkeypatch, tmp_path, capsys, written, words):
  call = Trainer(monkeypatch, tmp_path, 'raise SystemExit("not to be started")')
  call.options.command = 'stop'
  lock = call.options.work / 'trainer.lock'
  lock.write_text(written)
  monkeypatch.setattr(detached, 'is_alive', lambda _: True)
  monkeypatch.setattr(os, 'kill', lambda *_: pytest.fail('a process was ended'))
  assert call() == 1
  assert words in capsys.readouterr().err


def test_stop_without_a_trainer_is_done(monkeypatch, tmp_path, capsys):
  call = Trainer(monkeypatch, tmp_path, 'raise SystemExit("not to be started")')
  call.options.command = 'stop'
  assert call() == 0
  error = capsys.readouterr().err
  assert 'there is nothing left to stop' in error and 'same command' not in error


def test_files_that_cannot_be_written_or_read_end_no_call(monkeypatch, tmp_path, capsys):
  made = options(tmp_path, 'emergence')
  (made.out / 'runs.tar.gz').mkdir()
  collector = gpu_hour.Collector(made, gpu_hour._trials(made))
  collector.collect('Nothing yet.')
  assert capsys.readouterr().err.startswith('Not all files of --out were written: ')
  assert not collector.due()
  (made.work / 'runs').mkdir()
  monkeypatch.setattr(summary, 'read_states', unreadable)
  collector.collect('Nothing yet.')
  assert 'The runs could not be read: [Errno 5]' in capsys.readouterr().err


def unreadable(*_):
  raise OSError(5, 'Input/output error')


def test_folders_of_this_machine_are_not_recorded():
  assert gpu_hour._command(['check', '--work', '/a b', '--smoke', '--out=/c', '--wheels', 'd',
                            '--set', 'steps=6']) == (
      'bash launch/gpu_hour.sh check --smoke --set steps=6')


def test_without_a_gpu_nothing_is_started(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert refused(['check'], monkeypatch) == 2
  error = capsys.readouterr().err
  assert 'jax sees the CPU alone' in error and '--smoke' in error and error.count('\n') == 1


def test_a_device_that_jax_cannot_start_is_one_line():
  with pytest.raises(ValueError, match='jax finds no device .*--smoke') as error:
    machine.find_accelerator(os.environ | {'JAX_PLATFORMS': 'absent'})
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('option', ['--out', '--work'])
@pytest.mark.parametrize('place', ['afile', 'afile/below', '/proc/x', 'taken'])
def test_folders_that_cannot_be_written_are_one_line(option, place, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path('afile').write_text('')
  for name in ('report.json', 'trainer.log'):
    Path('taken', name).mkdir(parents=True)
  assert refused(['emergence', '--smoke', f'{option}={place}'], monkeypatch) == 2
  error = capsys.readouterr().err
  assert f'error: {option}={place}: ' in error and error.count('\n') == 1


def test_the_archive_holds_records_alone_and_whole_lines(tmp_path):
  run = tmp_path / 'runs' / 'emergence-default'
  (run / 'checkpoints').mkdir(parents=True)
  (run / 'checkpoints' / 'config.json').write_text('{}')
  (run / 'config.json').write_text('{}')
  (run / 'metrics.jsonl').write_text('{"step": 1}\n{"step')
  with tarfile.open(fileobj=io.BytesIO(archive.pack_records(tmp_path / 'runs'))) as tar:
    found = {entry.name: tar.extractfile(entry).read() for entry in tar}
  assert found == {'emergence-default/config.json': b'{}',
                   'emergence-default/metrics.jsonl': b'{"step": 1}\n'}


def test_what_is_set_stands_in_the_place_of_what_a_smoke_run_sets(tmp_path):
  made = options(tmp_path, 'emergence', '--smoke', '--set=steps=6').set
  assert made[-1] == 'steps=6' and 'steps=60' not in made and 'model.size=tiny' in made


def test_a_call_without_a_run_leaves_whole_files(tmp_path):
  made = options(tmp_path, 'emergence')
  gpu_hour.Collector(made, gpu_hour._trials(made)).collect('Nothing yet.')
  report = json.loads((made.out / 'report.json').read_text())
  assert list(report['trials']) == [f'emergence-{name}' for name in (
      'default', 'fixed-1', 'sigmoid', 'k-bias', 'window-32')]
  page = (made.out / 'report.md').read_text()
  assert page.startswith('# Nothing yet.') and 'No comparison of the runs: ' in page
  assert sorted(path.name for path in made.out.iterdir()) == [
      'log.txt', 'report.json', 'report.md', 'runs.tar.gz']


@pytest.mark.parametrize('arguments, words', [
    (['emergence', '--limit=10'], '--limit=10'), (['emergence', '--limit=long'], 'long'),
    (['train'], 'train'), (['emergence', '--parts=loss'], '--parts is for check'),
    (['emergence', '--wheels=none'], '--wheels=none'),
    (['emergence', '--set=modle.size=tiny'], 'modle.size'),
    (['check', '--set=modle.size=tiny'], 'modle.size'),
    (['check', '--parts=loss,nope'], "unknown 'nope'"), (['check', '--parts=none'], "'none'")])
def test_bad_options_are_refused_before_anything_starts(arguments, words, tmp_path, capsys,
                                                        monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert refused(arguments, monkeypatch) == 2 and words in capsys.readouterr().err


def refused(arguments, monkeypatch):
  """The exit code of a call that must start nothing."""
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.setenv('SINK_JAX_COMMAND', '')
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.setattr(gpu_hour, '_started', lambda *_: pytest.fail('started'))
  monkeypatch.setattr(gpu_hour, 'check', lambda *_: pytest.fail('started'))
  try:
    return gpu_hour.main(['--out=out', '--work=work', *arguments])
  except SystemExit as error:
    return error.code


def test_missing_packages_are_named_with_what_brings_them(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.setattr(gpu_hour, 'PACKAGES', ('jax', 'grayn', 'tokenisers'))
  monkeypatch.setenv('SINK_JAX_COMMAND', '')
  code = gpu_hour.main(['emergence', f'--out={tmp_path}', f'--work={tmp_path}'])
  assert code == 2 and 'lacks grayn, tokenisers: --wheels=DIR' in capsys.readouterr().err
  monkeypatch.setattr(gpu_hour, 'OF_BENCHMARK', ('tokenisers',))  # a check does without the other
  code = gpu_hour.main(['check', f'--out={tmp_path}', f'--work={tmp_path}'])
  assert code == 2 and 'lacks grayn, tokenisers: --wheels=DIR' in capsys.readouterr().err


def test_wheels_are_installed_once_without_a_network(tmp_path):
  made = tmp_path / 'wheels' / 'carried-1-py3-none-any.whl'
  made.parent.mkdir()
  with zipfile.ZipFile(made, 'w') as wheel:
    wheel.writestr('carried.py', '')
    wheel.writestr('carried-1.dist-info/METADATA',
                   'Metadata-Version: 2.1\nName: carried\nVersion: 1\n')
    wheel.writestr('carried-1.dist-info/WHEEL', 'Wheel-Version: 1.0\nTag: py3-none-any\n')
    wheel.writestr('carried-1.dist-info/RECORD', '')
  for _ in range(2):
    site = gpu_hour._installed(made.parent, tmp_path / 'site')
  assert (site / 'carried.py').is_file()
  (site / 'carried.py').unlink()
  assert not (gpu_hour._installed(made.parent, tmp_path / 'site') / 'carried.py').exists()


def test_what_has_to_be_carried_is_listed_pinned_and_small():
  build = (ROOT / 'BUILD.md').read_text()
  listed = re.search(r'-w wheels ((?:.|\n)*?)\n\n', build).group(1).replace('\\', '').split()
  names = {'attr': 'attrs', 'markdown_it': 'markdown-it-py'}
  assert sorted(listed) == sorted(names.get(name, name) for name in gpu_hour.PACKAGES)
  assert f'needs {len(listed)} wheels' in build
  pinned = (ROOT / 'requirements.txt').read_text()
  assert all(re.search(rf'^{name}==', pinned, re.MULTILINE) for name in listed)
  tracked = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True)
  paths = [ROOT / os.fsdecode(name) for name in tracked.stdout.split(b'\0') if name]
  carried = sum(path.stat().st_size for path in paths if path.is_file()) + 14e6
  assert carried < 64 * 2**20


def test_help_says_what_it_does(tmp_path):
  code, out, _ = finish(start(tmp_path, '--help'))
  assert code == 0 and '--limit=SECONDS' in out and 'runs.tar.gz' in out


@pytest.mark.full
def test_a_check_tokenizes_and_calls_that_are_killed_lose_nothing(tmp_path):
  common = ['--smoke', '--out=out', '--work=work', *SHORT]
  code, out, err = finish(start(tmp_path, 'check', *common, '--parts=correctness'))
  assert code == 0, err
  assert 'report.json' in [path.name for path in (tmp_path / 'out').iterdir()]
  deadline = time.monotonic() + 120
  while 'window-32: InstalledPackages' not in (tmp_path / 'work/text.log').read_text():
    assert time.monotonic() < deadline
    time.sleep(0.2)
  first = start(tmp_path, 'emergence', *common, '--limit=200')
  deadline = time.monotonic() + 120
  while not (tmp_path / 'work/runs/emergence-default/metrics.jsonl').exists():
    assert time.monotonic() < deadline and first.poll() is None, finish(first)
    time.sleep(0.2)
  first.kill()
  with killed_at_the_end(tmp_path / 'work'):
    code, out, err = finish(start(tmp_path, 'emergence', *common, '--limit=280'))
  assert code == 0, err
  assert out.count('done, step 6 of 6') == 5 and 'Saved' not in err
  assert 'TFLOP/s in large matrices' not in (tmp_path / 'work/trainer.log').read_text()
  report = json.loads((tmp_path / 'out/report.json').read_text())
  assert {trial['status'] for trial in report['trials'].values()} == {'done'}
  (run,) = (run for name, run in report['runs'].items() if name == 'emergence-default')
  assert run['origin']['command'].startswith('bash launch/gpu_hour.sh emergence --smoke --set=')
  assert str(tmp_path) not in json.dumps(report)
  data = json.loads((tmp_path / 'work/runs/emergence-default/data.json').read_text())
  assert run['text']['epochs'] == pytest.approx(6 * 4 * 64 / data['tokens_per_epoch'])
  assert sorted(path.suffix for path in (tmp_path / 'out').iterdir()) == [
      '.gz', '.json', '.md', '.png', '.txt']
