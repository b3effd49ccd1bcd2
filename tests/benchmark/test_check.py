"""The check of one GPU at tiny shapes, and what it makes of results."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from sink_jax.benchmark import check, options, processes
from sink_jax.benchmark.check_report import PartResult
from sink_jax.benchmark.records import AttentionRow, Document, TrainStepRow
from sink_jax.benchmark.targets import targets
from sink_jax.benchmark.timing import Timing
from sink_jax.cli import command

ROOT = pathlib.Path(__file__).parents[2]
PARTS = ['correctness', 'train_60m', 'attention', 'loss', 'importance', 'sweep']
# What a machine with JAX, flax and optax alone lacks.
ABSENT = ('grain', 'ml_collections', 'tensorflow_datasets', 'array_record', 'orbax', 'tensorboardX',
          'tokenizers', 'matplotlib', 'tqdm', 'torch')
SITE = f'''
import sys

class Absent:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in {ABSENT}:
      raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)

sys.meta_path.insert(0, Absent())
'''


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
  """One in which Python finds none of ABSENT, nor a GPU."""
  site = tmp_path_factory.mktemp('site')
  (site / 'sitecustomize.py').write_text(SITE)
  variables = os.environ | {'PYTHONPATH': f'{site}{os.pathsep}{ROOT}', 'JAX_PLATFORMS': 'cpu'}
  refused = subprocess.run([sys.executable, '-c', 'import grain'], env=variables,
                           capture_output=True, text=True)
  assert refused.returncode and 'No module named' in refused.stderr
  return variables


def run_check(environment, *arguments, cwd=ROOT):
  return subprocess.run([sys.executable, '-P', '-m', 'sink_jax.benchmark', 'check', *arguments],
                        cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize('parts', [
    pytest.param(PARTS, marks=pytest.mark.full, id='all'),
    pytest.param(['correctness', 'attention'], id='two')])
def test_smoke_runs_to_the_end_without_what_only_training_needs(parts, environment, tmp_path):
  done = run_check(environment, 'a folder', '--smoke', f'--parts={",".join(parts)}', cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  report = json.loads((tmp_path / 'a folder' / 'report.json').read_text())
  assert report['complete'] and report['smoke'] and list(report['parts']) == parts
  assert {part['status'] for part in report['parts'].values()} == {'done'}
  for part in report['parts'].values():
    assert part['result']['rows'] and part['result']['machine']['jaxlib']
    assert part['command'].startswith('python -m sink_jax.benchmark ')
  assert report['machine']['hardware'].startswith('cpu') and len(report['targets']) == 7
  assert not any(target['met'] for target in report['targets'])
  page = (tmp_path / 'a folder' / 'report.md').read_text()
  targets_and_checks, _, tables = page.partition('\n## correctness')
  assert targets_and_checks.strip() in done.stdout and f'## {parts[-1]}' in tables
  assert 'Smoke run' in page and 'softmax fwd+bwd, times that of cuDNN' in page
  assert sorted(p.name for p in (tmp_path / 'a folder').iterdir()) == [
      'report.json', 'report.md']
  assert str(tmp_path) not in json.dumps(report) and str(ROOT) not in json.dumps(report)
  last = f'== part {len(parts)}/{len(parts)}: {parts[-1]}'
  assert last in done.stderr and 's left of 480 s' in done.stderr
  assert '## Targets' in done.stdout


def test_a_failed_correctness_check_gives_an_exit_code(environment, tmp_path):
  done = run_check(environment, '.', '--smoke', '--parts=correctness', '--tolerance=-1',
                   cwd=tmp_path)
  assert done.returncode == 1
  assert '**FAILED**: pallas, softmax' in done.stdout
  report = json.loads((tmp_path / 'report.json').read_text())
  assert report['parts']['correctness']['status'] == 'done'


@pytest.mark.parametrize('names, word', [(['loss', 'speed'], "'speed'"), ([], "'none'")])
def test_unknown_parts_are_refused(tmp_path, capsys, names, word):
  assert check.check(chosen_options(names, tmp_path / 'out')) == 2
  error = capsys.readouterr().err
  assert f'unknown {word}' in error and 'Choices: all, correctness' in error
  assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path, capsys):
  (tmp_path / 'out').write_text('')
  assert check.check(chosen_options(['all'], tmp_path / 'out')) == 2
  assert capsys.readouterr().err.count('\n') == 1


def chosen_options(names, out, limit=30):
  return options.Check(parts=tuple(names) or ('none',), out=str(out), limit=limit)


class Scripted:
  """Parts whose processes are small programs instead of benchmarks."""

  def __init__(self, monkeypatch, tmp_path, **programs):
    self.out = tmp_path
    monkeypatch.setattr(check, 'parts', lambda *_: [
        check.Part(name, 10.0**-n, [program], count)  # nearly all of the time that is left
        for n, (name, (program, count)) in enumerate(programs.items())])
    monkeypatch.setattr(processes, 'start', self.start)

  def start(self, arguments, folder, log, **environment):
    file = next(a for a in arguments if a.startswith('--json=')).removeprefix('--json=')
    return subprocess.Popen([sys.executable, '-c', arguments[0], file], cwd=folder,
                            env=os.environ | environment, start_new_session=True)

  def __call__(self, limit=30):
    code = check.check(chosen_options(['all'], self.out, limit))
    return code, json.loads((self.out / 'report.json').read_text())


WRITE = '''
import json, os, sys, time
machine = {"hardware": "none", "jax": "0", "date": "today", "command": "c"}
def write(*verdicts):
  rows = [{"verdict": v, "implementation": "pallas", "variant": "softmax", "head_dim": 64,
           "length": 9, "out": 0.1} for v in verdicts]
  result = {"command": "correctness", "machine": machine, "options": {}, "rows": rows,
            "columns": [], "notes": ["n", "1 of 1"], "not_run": 1, "complete": True}
  with open(sys.argv[1] + ".partial", "w") as file:  # as the parts do: a reader sees all or nothing
    file.write(json.dumps(result))
  os.replace(file.name, sys.argv[1])
'''


def test_a_check_that_is_killed_has_written_what_it_had(monkeypatch, tmp_path):
  run = Scripted(monkeypatch, tmp_path, correctness=(WRITE + 'write("ok"); time.sleep(60)', 1))
  monkeypatch.setattr(processes, '_SAY_EVERY', 0.2)
  write, written = check._write, []

  def killed(report, out):
    write(report, out)
    written.append(sorted(path.name for path in out.iterdir()))
    if report.parts['correctness'].result:
      raise KeyboardInterrupt

  monkeypatch.setattr(check, '_write', killed)
  with pytest.raises(KeyboardInterrupt):
    run()
  assert set(map(tuple, written)) == {('report.json', 'report.md')}
  part = json.loads((tmp_path / 'report.json').read_text())['parts']['correctness']
  assert part['status'] == 'running' and len(part['result']['rows']) == 1
  assert 'Not complete' in (tmp_path / 'report.md').read_text()


def test_a_page_that_cannot_be_written_leaves_the_older_one_and_ends_nothing(
    monkeypatch, tmp_path, capsys):
  run = Scripted(monkeypatch, tmp_path, correctness=(WRITE + 'write("ok")', 1))
  (tmp_path / 'report.md').write_text('older')

  def full(path, text):
    path.with_name('.report.md.partial').write_text(text[:9])
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(check, 'write_atomically', full)
  code, report = run()
  assert code == 2 and report['parts']['correctness']['status'] == 'done'
  assert (tmp_path / 'report.md').read_text() == 'older'
  assert 'The reports were not written: [Errno 28]' in capsys.readouterr().err


def test_parts_that_fail_or_hang_leave_what_they_found(monkeypatch, tmp_path):
  run = Scripted(monkeypatch, tmp_path, correctness=(WRITE + 'write("ok")', 2),
                 attention=('raise SystemExit(7)', 1),
                 loss=(WRITE + 'write("ok"); time.sleep(60)', 1))
  began = time.monotonic()
  code, report = run(limit=14)
  assert time.monotonic() - began < 14
  found = report['parts']
  assert code == 2 and report['complete']
  assert len(found['correctness']['result']['rows']) == 2
  assert found['correctness']['result']['notes'] == [
      'n', '2 of 2 checks passed. 2 combinations were not run: the time was up.']
  assert found['attention']['status'] == 'failed: exit code 7' and not found['attention']['result']
  assert found['loss']['status'] == 'stopped: the time was up' and found['loss']['result']['rows']
  page = (tmp_path / 'report.md').read_text()
  assert '2 of 2 checks passed' in page and 'exit code 7' in page


@pytest.mark.parametrize('program', [
    WRITE + 'write("ok", "FAILED"); sys.exit(1)', WRITE + 'write()', 'raise SystemExit(3)'])
def test_no_correctness_no_success(monkeypatch, tmp_path, program):
  code, report = Scripted(monkeypatch, tmp_path, correctness=(program, 1))()
  assert code == 1
  assert ('FAILED' in program) == ('**FAILED**' in (tmp_path / 'report.md').read_text())


def test_a_process_that_outlasts_its_end_is_not_done():
  part, written = check.Part('loss', 1, ['loss']), document('loss')
  assert check._status([0], [written], part) == 'done'
  assert check._status([None], [written], part).startswith('stopped: the time was up, but')


def row(variant, name, ms=None, shape='8,8,2048,96'):
  both = None if ms is None else Timing(ms, ms, 0, 3, 1)
  return AttentionRow(shape=shape, variant=variant, implementation=name, kind='', both=both,
                      failed=None if both else 'x')


def step_row(batch, name, mfu=None):
  return TrainStepRow(size='60m', batch=batch, length=8, remat='none', unroll=1,
                      implementation=name, mfu=mfu, failed=None if mfu else 'out of memory')


def document(command, *rows):
  return Document(command, {}, {}, [], rows, [])


def test_targets():
  attention = document(
      'attention',
      row('softmax', 'pallas', 0.9), row('softmax', 'cudnn', 0.5), row('sigmoid', 'pallas', 0.8),
      row('relative', 'pallas', 1.2), row('elu', 'pallas', 1.0), row('softmax', 'release', 5.0),
      row('sigmoid', 'release', 3.2), row('softmax', 'torch-eager', 9.0),
      row('alibi', 'pallas'))
  step = document('train_step', step_row(8, 'a', 0.4), step_row(16, 'b', 0.55), step_row(32, 'c'))
  found = {target.text: target for target in targets({'attention': attention, 'train_60m': step})}
  measured = {text: (target.measured and round(target.measured, 3), target.met)
              for text, target in found.items()}
  assert measured == {
      'softmax fwd+bwd, times that of cuDNN': (1.8, True),
      'sigmoid fwd+bwd, times that of our softmax': (0.889, True),
      'slowest other variant (relative), times our softmax': (1.333, False),
      'least gain of a variant (relative) over bfloat16 T x T code: eager PyTorch': (7.5, True),
      'least gain of a variant (sigmoid) over bfloat16 T x T code: the same code compiled by XLA':
          (4.0, False),
      '60m training step, share of the measured matmul rate': (0.55, True),
      '1b training step, share of the measured matmul rate': (None, None),
  }


def limits(monkeypatch, tmp_path, seconds, names, spent=()):
  """{part: seconds it may take} where the parts take `spent` seconds, and no time otherwise."""
  clock, found, spent = [0.0], {}, dict(spent)

  def run(part, folder, out, limit, seed, save):
    found[part.name] = limit
    clock[0] += spent.get(part.name, 0)
    return PartResult('', 1, 'done', 0, [], None)

  monkeypatch.setattr(check, '_run', run)
  monkeypatch.setattr(check.time, 'monotonic', lambda: clock[0])
  check.check(chosen_options(names, tmp_path, seconds))
  return found


def test_the_time_is_divided_between_the_chosen_parts(monkeypatch, tmp_path):
  assert limits(monkeypatch, tmp_path, 108, ['train_60m']) == {'train_60m': 100}
  few = limits(monkeypatch, tmp_path, 488, ['train_60m', 'correctness'],
               {'correctness': 80, 'train_60m': 400})
  assert few == pytest.approx({'correctness': 480 * 0.22 / 0.4, 'train_60m': 400})
  everything = limits(monkeypatch, tmp_path, 480, ['all'])
  assert list(everything)[:3] == ['correctness', 'train_60m', 'saved_60m']
  assert everything['correctness'] == pytest.approx(472 * 0.22) and everything['sweep'] == 472


def test_every_part_is_a_command_that_the_command_line_takes():
  wanted = check.parts(False, 0.01)
  assert [part.name for part in wanted] == [
      'correctness', 'train_60m', 'saved_60m', 'attention', 'train_1b', 'loss', 'importance',
      'sweep']
  assert sum(part.weight for part in wanted) == pytest.approx(1)
  for part in wanted:
    words = [*part.arguments, '--seed=0', '--limit=9', '--json=x']
    assert command.options_of('benchmark', words).limit == 9
