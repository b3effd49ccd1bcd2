"""The analyses command on tiny models, and what it records about how rows were made."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import sink_jax as sj
from sink_jax.analyses import runner
from sink_jax.analyses.models import InputOptions, Model, load, make_inputs
from sink_jax.data.tokenizer import Bytes
from sink_jax.models.sizes import parameter_count
from tests.analyses.small import small_run
from tests.commands import run_here
from tests.documents import TEXTS
from tests.pretrained import tiny
from tests.train import runs


def test_the_table_of_the_documents_lists_every_analysis():
  table = (
    TEXTS['docs/open_models.md'].split('| `python -m sink_jax analyses` |')[1].split('\n\n')[0]
  )
  firsts = [row.split('|')[1] for row in table.splitlines()[1:]]

  listed_there = set(re.findall(r'`(\w+)`', ' '.join(firsts)))
  assert listed_there == set(runner.all_analyses()), 'the table of docs/open_models.md'

  code, listed, _ = run_here('analyses', '--list')
  for name, analysis in runner.ANALYSES.items():
    assert name in listed
    assert analysis.figure in listed
    assert analysis.line in listed


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A LLaMA of three blocks that reads bytes and begins with a BOS."""
  folder = tmp_path_factory.mktemp('models') / 'tiny-llama'
  tiny.write(folder, tiny.LLAMA | {'vocab_size': 260})
  Bytes().open().beginning_with(0).save(folder)
  return folder


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """The folder of a run at step 2 of a synthetic task, as training leaves it."""
  config = runs.config(model__d_model=8, model__ffn_hidden=8, model__vocab_size=64)
  return runs.untrained(tmp_path_factory.mktemp('runs') / 'run', config)


def test_one_analysis_of_a_checkpoint_and_a_run(checkpoint, workdir, tmp_path):
  code, told, said = run_here(
    'analyses',
    'lengths',
    f'--checkpoint={checkpoint}',
    f'--workdir={workdir}',
    '--lengths=4,9',
    '--epsilons=0.3',
    '--sequences=3',
    f'--out={tmp_path}',
  )
  assert code == 0, said
  assert told.splitlines()[-2:] == [
    str(tmp_path / name) for name in ('lengths.json', 'lengths.png')
  ]
  assert (tmp_path / 'lengths.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'

  written = json.loads((tmp_path / 'lengths.json').read_text())
  assert written['analysis'] == 'lengths'
  assert written['figure'] == 'Figure 3'
  assert written['failed'] == []
  assert {'command', 'date', 'hardware', 'jax', 'python', 'code'} < set(written)

  first, second = written['models']
  assert (first['model'], second['model']) == ('tiny-llama', 'run')

  [inputs] = first['inputs']
  assert inputs['bos'] == {'protocol': 'tokenizer', 'applied': 'bos id 0 at position 1'}
  assert (inputs['length'], inputs['tokenizer']) == (9, 'tiny-llama/tokenizer.json')
  assert 'Bigram' in second['inputs'][0]['source']  # the run's data: it has never seen text
  options = {
    'lengths': [4, 9],
    'sequences': 3,
    'dtype': 'float32',
  }
  assert first['options'].items() > options.items()
  assert first['checkpoint'] == {
    'folder': 'tiny-llama',
    'step': None,
    'dtype': 'float32',
    'parameters': parameter_count(sj.load_pretrained(checkpoint).config),
  }
  assert second['checkpoint'].items() > {'folder': 'run', 'step': 2}.items()

  # The numbers equal those of the probe on the same inputs.
  run = load(str(checkpoint))
  tokens = make_inputs(run, InputOptions(sequences=3, length=9)).tokens
  rate = 100 * sj.probe(run, tokens).sink_rate()

  assert written['rows'][1]['length'] == 9
  assert written['rows'][1]['sink_1'] == pytest.approx(rate, abs=1e-3)


def test_a_run_of_a_synthetic_task_has_its_own_tokens(workdir):
  run = sj.load_run(workdir)
  made = make_inputs(run, InputOptions(sequences=4, length=10))

  assert_array_equal(made.tokens, run.probe_tokens[:4, :10])

  with pytest.raises(ValueError, match='--length=13'):
    make_inputs(run, InputOptions(sequences=4, length=13))


def test_one_model_that_fails_spares_the_others(checkpoint, tmp_path, monkeypatch):
  report = Model.report
  calls = []

  def fails_at_the_second(self, tokens):
    calls.append(self.run.name)
    if len(calls) == 2:
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of\nmemory')
    return report(self, tokens)

  monkeypatch.setattr(Model, 'report', fails_at_the_second)
  copies = [str(shutil.copytree(checkpoint, tmp_path / part)) for part in ('a/one', 'two', 'b/one')]
  words = [f'--out={tmp_path}', '--inputs=random', '--length=8', '--sequences=2']
  code, told, said = run_here(
    'analyses', 'norms', f'--checkpoint={",".join(copies)},missing', *words
  )
  written = json.loads((tmp_path / 'norms.json').read_text())

  assert code == 1
  assert [one['model'] for one in written['failed']] == ['two', 'missing']
  assert written['failed'][0]['error'] == 'RESOURCE_EXHAUSTED: out of memory'
  # Two folders of the same name are distinguished by the end of their paths.
  assert [one['model'] for one in written['models']] == ['one', 'b/one']
  assert 'hidden states' in told
  # A run in which every model fails does not replace earlier results.
  assert run_here('analyses', 'norms', '--checkpoint=missing,gone', *words)[0] == 1
  assert json.loads((tmp_path / 'norms.json').read_text()) == written

  # If the only model fails, the command ends with its error.
  code, _, said = run_here(
    'analyses', 'norms', '--checkpoint=missing', f'--out={tmp_path / "alone"}'
  )
  assert code == 1
  assert 'neither a folder' in said
  assert not (tmp_path / 'alone').exists()


@pytest.mark.parametrize(
  'words, named',
  [
    (['nothing'], 'nothing'),
    (['lengths', '--out=out'], '--checkpoint'),
    (['norms', '--heads=1'], '--heads'),
    (['lengths', '--lengths=a'], '--lengths'),
    (['maps', '--checkpoint=x'], '--out'),
  ],
)
def test_commands_that_cannot_be(words, named, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code, _, said = run_here('analyses', *words)

  assert code == 1
  assert named in said
  assert said.count('\n') == said.startswith('[')


def test_which_model_a_result_is_of():
  run = dataclasses.replace(small_run(dtype='bfloat16'), step=7)
  result = sj.analyse('norms', run, np.ones((2, 5), int), batch_size=3)
  [made] = result.models

  assert made['checkpoint'] == {
    'folder': None,
    'step': 7,
    'dtype': 'bfloat16',
    'parameters': parameter_count(run.config),
  }
  assert made['matmul_precision'] == 'highest'  # float32, although the model computes in bfloat16
  assert made['inputs'][0]['kind'] == 'given'
  assert made['options']['length'] == 5

  found = runner.checkpoint(
    dataclasses.replace(run, folder=f'/cache/models--a--b/snapshots/{"0a" * 20}')
  )
  assert found['folder'] == 'models--a--b'
  assert found['revision'] == '0a' * 20
