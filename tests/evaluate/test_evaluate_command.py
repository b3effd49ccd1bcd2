"""python -m sink_jax evaluate, on a run made by hand."""

import json
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

import sink_jax as sj
from sink_jax.analyses.models import Model
from sink_jax.cli.evaluate import Options, as_text, evaluate
from sink_jax.sweep.trials import load_trials
from sink_jax.train.config import changed
from sink_jax.train.provenance import provenance
from tests.commands import run_here
from tests.train.runs import untrained

ROOT = Path(__file__).parents[2]


def evaluate_run(workdir, out=None, **given):
  return evaluate(Options(workdir=str(workdir), out=out, **given), given)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """The folder of a run at step 2, as training leaves it."""
  trial = load_trials(ROOT / 'configs/synthetic.py')['synthetic-sigmoid']
  run = changed(
    trial.experiment,
    {'model.vocab_size': 64, 'model.d_model': 8, 'model.ffn_hidden': 8, 'probe.epsilon': 0.2},
  )
  return untrained(tmp_path_factory.mktemp('runs') / 'a run', run)


def test_the_numbers_are_the_probe_s(workdir):
  result, paths = evaluate_run(workdir)
  written = json.loads((workdir / 'evaluation/sink_report.json').read_text())
  run = sj.load_run(workdir)
  report = sj.probe(run, run.probe_tokens)

  assert written == result
  assert_allclose(written['summary']['sink'], report.summary(0.2)['sink'], rtol=1e-5)
  # Stored numbers have six digits.
  assert_allclose(written['importance_1'], report.head_importance(), rtol=1e-5)
  assert len(written['summary']['sink']) == 12
  assert written['epsilon'] == 0.2
  assert written['step'] == 2
  assert written['config']['steps'] == 800
  measured = report.protocol | {'bos': written['protocol']['bos']}
  assert measured.items() <= written['protocol'].items()
  assert written['protocol']['inputs']['length'] == 12
  assert written['config']['data']['bos'] is False
  assert all(path.exists() for path in paths)
  assert len(paths) == 5
  assert provenance().keys() < written.keys()
  assert 'proxy' in as_text(result)


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(sequences=7), '--sequences=7: the run stores 6 sequences of 12 tokens'),
    (dict(length=13), '--length=13: the run stores 6 '),
    (dict(sequences=0), '--sequences=0 must'),
    (dict(length=1), '--length=1 must be at least 2'),
    (dict(epsilon=1.5), '--epsilon=1.5 .*between 0 and 1'),
    (dict(bos='none'), '--bos'),
    (dict(out='config.json/x'), 'config.json/x cannot be written to'),
  ],
)
def test_what_is_refused_before_the_probe(workdir, monkeypatch, options, message):
  monkeypatch.setattr(Model, 'report', None)
  monkeypatch.chdir(workdir)
  with pytest.raises(ValueError, match=message):
    evaluate_run(workdir, **options)


def test_the_command_on_a_part_of_the_probe_tokens(workdir, tmp_path):
  code, out, _ = run_here(
    'evaluate',
    f'--workdir={workdir}',
    f'--out={tmp_path}',
    '--sequences=2',
    '--length=5',
    '--epsilon=0.1',
    '--dtype=bfloat16',
  )

  assert code == 0
  assert 'Sink_1' in out
  assert str(tmp_path / 'sink_report.json') in out
  result = json.loads((tmp_path / 'sink_report.json').read_text())
  assert len(result['summary']['sink']) == 5
  assert result['epsilon'] == 0.1
  assert result['protocol']['sequences'] == 2
  assert result['protocol']['dtype'] == 'bfloat16'
