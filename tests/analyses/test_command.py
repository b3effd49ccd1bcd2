"""The table of analyses, their options, and the command on tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import table
from sink_jax.analyses.options import Options
from sink_jax.analyses.subjects import Subject, make_inputs
from sink_jax.data.tokenizer import ByteEncoder
from sink_jax.models.transformer import init_params
from sink_jax.pretrained.tokenizer_files import write_tokenizer
from sink_jax.report.analysis import analyse_models
from sink_jax.train.checkpoint import Checkpoints
from sink_jax.train.experiment import from_dict
from sink_jax.train.workdir import claimed, write_probe_tokens
from tests.analyses.small import check_png, small_run
from tests.pretrained import tiny
from tests.train import runs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A LLaMA of three blocks that reads bytes and begins with a BOS."""
  folder = tmp_path_factory.mktemp('models') / 'tiny-llama'
  tiny.write(folder, tiny.LLAMA | {'vocab_size': 260})
  write_tokenizer(ByteEncoder(), folder, context=64, bos=True)
  return folder


def workdir(folder, **changes):
  """A run at step 2, as training leaves it."""
  config = runs.config(model__d_model=8, model__ffn_hidden=8, **changes)
  config['model']['vocab_size'] = config['model']['vocab_size'] or 64
  with claimed(folder, config, {'content': 'random'}):
    pass
  write_probe_tokens(folder, np.random.default_rng(0).integers(0, 64, (6, 12)))
  checkpoints = Checkpoints(folder)
  checkpoints.save(2, {'params': init_params(from_dict(config).model_config(), 0)})
  checkpoints.close()
  return str(folder)


def test_every_analysis_is_a_module():
  for name, analysis in table.ANALYSES.items():
    module = analysis.module()
    assert module.measure.__doc__ and module.draw.__doc__ and module.__doc__, name
    assert analysis.figure and analysis.line and name in table.as_text()
    assert analysis.options().epsilons  # its own defaults are options
  assert '--inputs=repeat' in table.as_text()
  with pytest.raises(ValueError, match='Did you mean lengths'):
    table.find('length')


def test_options_of_an_analysis():
  analysis = table.find('domains')
  assert analysis.options().epsilons == (0.2, 0.3, 0.4)
  given = analysis.options(epsilons=(0.1,), length=None)
  assert given == Options(epsilons=(0.1,), source='Stdlib()')


@pytest.mark.parametrize('wrong, words', [
    (dict(inputs='text'), '--inputs=text: choose natural, random, repeat'),
    (dict(bos='never'), '--bos=never: choose none, tokenizer, force'),
    (dict(dtype='float16'), '--dtype=float16: choose float32, bfloat16'),
    (dict(sequences=0), '--sequences=0 must be at least 1'), (dict(length=1), '--length=1 must'),
    (dict(batch_size=0), '--batch_size=0'), (dict(seed=-1), '--seed=-1'),
    (dict(limit=0), '--limit=0'),
    (dict(lengths=(1, 4)), '--lengths: write numbers from 2'),
    (dict(layers=()), '--layers: write numbers from 1'),
    (dict(heads=(-1,)), '--heads: write numbers from 1'), (dict(positions=(1,)), '--positions'),
    (dict(epsilons=()), '--epsilons='), (dict(epsilons=(0.3, 1.5)), '--epsilons=0.3,1.5')])
def test_options_that_cannot_be(wrong, words):
  with pytest.raises(ValueError, match=words):
    Options(**wrong)


def test_sequences_at_a_time():
  assert Options().at_a_time(64) == 256 and Options().at_a_time(10**6) == 1
  assert Options(batch_size=4, length=64).at_a_time(128) == 2


def test_one_analysis_of_a_checkpoint_and_a_run(checkpoint, tmp_path):
  run = workdir(tmp_path / 'run', data__source="TextFolder(path='texts')",
                data__tokenizer='Bytes()', model__vocab_size=258)
  said = []
  text, paths = analyse_models(
      'lengths', [str(checkpoint)], [run], tmp_path / 'out', lengths=(4, 9), epsilons=(0.3,),
      sequences=3, say=said.append, bos=None)
  assert [p.name for p in paths] == ['lengths.json', 'lengths.png']
  check_png(paths[1])
  written = json.loads(paths[0].read_text())
  assert written['analysis'] == 'lengths' and written['figure'] == 'Figure 3'
  assert {'command', 'date', 'hardware', 'versions'} < set(written)
  assert set(written['versions']) == {'sink_jax', 'jax', 'numpy', 'python'}
  first, second = written['results']
  assert (first['model'], second['model']) == ('tiny-llama', 'run')
  assert first['inputs']['bos'] == {'protocol': 'tokenizer', 'applied': 'bos id 0 at position 1'}
  assert first['inputs']['first_token_ids'][0] == 0 and first['inputs']['length'] == 9
  assert first['inputs']['tokenizer'] == 'tiny-llama/tokenizer.json'
  assert second['inputs']['bos']['applied'] == 'none'
  assert second['inputs']['source'] == "Stdlib(domains='docs', max_files=0)"
  assert 'Figure 3' in text and 'tiny-llama' in text and 'T=9' in text
  assert any('no --source' in line for line in said) and any('[2/2]' in line for line in said)
  # The numbers are those of the probe on the same inputs.
  subject = Subject.of_checkpoint(checkpoint)
  tokens = make_inputs(subject, Options(sequences=3, length=9)).tokens
  assert first['sink'][0][1][0] == pytest.approx(
      100 * sj.probe(subject.run, tokens).sink_rate(), abs=1e-3)


def test_a_run_of_a_synthetic_task_is_probed_on_its_own_tokens(tmp_path):
  subject = Subject.of_workdir(workdir(tmp_path))
  made = make_inputs(subject, Options(sequences=4, length=10))
  np.testing.assert_array_equal(made.tokens, subject.run.probe_tokens[:4, :10])
  assert 'BigramBackcopy' in made.description['source']
  with pytest.raises(ValueError, match='--length=13.*stores 6 sequences of 12'):
    make_inputs(subject, Options(sequences=4, length=13))
  with pytest.raises(ValueError, match='makes its own tokens.*--inputs=random'):
    make_inputs(subject, Options(source="Stdlib()"))
  drawn = make_inputs(subject, Options(sequences=4, length=13, inputs='repeat'))
  assert (drawn.tokens == drawn.tokens[:, :1]).all() and drawn.description['vocab_size'] == 64


def test_a_checkpoint_without_a_tokenizer(tmp_path):
  tiny.write(tmp_path)
  subject = Subject.of_checkpoint(tmp_path)
  with pytest.raises(ValueError, match='no tokenizer for text.*--inputs=random'):
    make_inputs(subject, Options())
  assert make_inputs(subject, Options(inputs='random')).tokens.max() < 16
  write_tokenizer(ByteEncoder(), tmp_path, context=64, bos=False)
  with pytest.raises(ValueError, match='only has 16 tokens'):
    make_inputs(Subject.of_checkpoint(tmp_path), Options())


def test_more_tokens_than_positions():
  run = small_run(attention=sj.AttentionSpec(position=sj.Learned(max_length=8)))
  with pytest.raises(ValueError, match='small, --length or --lengths: 9 tokens exceed the 8'):
    make_inputs(Subject(run), Options(length=9, inputs='random'))


@pytest.mark.parametrize('arguments, words', [
    (('nothing', ['x'], [], 'out'), 'No analysis'), (('lengths', [], [], 'out'), '--checkpoint='),
    (('lengths', ['x'], [], None), '--out is needed'),
    (('lengths', ['no such model'], [], 'out'), 'neither a folder nor a known model'),
    (('lengths', [], ['nowhere'], 'out'), 'not the workdir of a run')], ids=str)
def test_commands_that_cannot_be(tmp_path, monkeypatch, arguments, words):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=words):
    analyse_models(*arguments)


def test_the_command_itself(checkpoint, tmp_path):
  def command(*options):
    done = subprocess.run(
        [sys.executable, '-m', 'sink_jax.analyses', *options], cwd=ROOT, text=True,
        capture_output=True, env=os.environ | {'PYTHONPATH': str(ROOT)})
    return done.returncode, done.stdout, done.stderr

  code, told, _ = command('maps', f'--checkpoint={checkpoint}', f'--out={tmp_path}', '--layers=2',
                          '--heads=1,2', '--inputs=random', '--length=8', '--sequences=2')
  assert code == 0
  assert told.splitlines()[-2:] == [str(tmp_path / name) for name in ('maps.json', 'maps.png')]
  written = json.loads((tmp_path / 'maps.json').read_text())
  assert [(own['layer'], own['head']) for own in written['results'][0]['heads']] == [(1, 0), (1, 1)]
  assert '-m sink_jax.analyses maps' in written['command']
  code, _, told = command('maps', f'--checkpoint={checkpoint}', f'--out={tmp_path}', '--layers=one')
  assert code == 1 and told.strip().splitlines()[-1] == (
      'error: --layers=one: write numbers, such as 1,3.')
