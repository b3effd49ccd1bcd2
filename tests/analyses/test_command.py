"""The table of analyses, their options, and the command on tiny models."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import domains, hellaswag, norms, registry, runner
from sink_jax.analyses.loaded_models import LoadedModel, make_inputs
from sink_jax.analyses.options import Options
from sink_jax.cli import analyses, main
from sink_jax.data.tokenizer import Bytes
from sink_jax.models.sizes import parameter_count
from sink_jax.models.transformer import init_params
from sink_jax.train.checkpoint import Checkpoints
from sink_jax.train.config import from_dict
from sink_jax.train.workdir import Workdir
from tests.analyses.small import analyse_models, check_png, small_run
from tests.commands import run_here
from tests.documents import TEXTS
from tests.pretrained import tiny
from tests.train import runs

ROOT = Path(__file__).parents[2]


def test_the_table_lists_every_analysis():
  page = TEXTS['docs/open_models.md']
  table = re.search(r'^\| `python -m sink_jax analyses` \|.*\n((?:\|.*\n)+)', page, re.M).group(1)
  firsts = [row.split('|')[1] for row in table.splitlines()]
  assert set(re.findall(r'`(\w+)`', ' '.join(firsts))) == set(registry.ANALYSES)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A LLaMA of three blocks that reads bytes and begins with a BOS."""
  folder = tmp_path_factory.mktemp('models') / 'tiny-llama'
  tiny.write(folder, tiny.LLAMA | {'vocab_size': 260})
  Bytes().open().beginning_with(0).save(folder)
  return folder


def workdir(folder, **changes):
  """A run at step 2, as training leaves it."""
  config = runs.config(model__d_model=8, model__ffn_hidden=8, **changes)
  config['model']['vocab_size'] = config['model']['vocab_size'] or 64
  with Workdir(folder, config, {'content': 'random'}):
    pass
  Bytes().open().save(folder / 'tokenizer')
  np.save(folder / 'probe_tokens.npy', np.random.default_rng(0).integers(0, 64, (6, 12)))
  checkpoints = Checkpoints(folder)
  checkpoints.save(2, {'params': init_params(from_dict(config).model_config(), 0)})
  checkpoints.close()
  return str(folder)


def test_every_analysis_is_a_module():
  for name, analysis in registry.ANALYSES.items():
    module = analysis.module
    assert module.measure.__doc__ and module.draw.__doc__ and module.__doc__, name
    assert analysis.figure and analysis.line and name in registry.as_text()
    assert analysis.options().epsilons  # its own defaults are options
    assert module.rows.__doc__
  assert '--inputs=repeat' in registry.as_text()
  with pytest.raises(ValueError, match='Did you mean lengths'):
    registry.find('length')


def test_options_of_an_analysis():
  analysis = registry.find('domains')
  assert analysis.options().epsilons == (0.2, 0.3, 0.4)
  given = analysis.options(epsilons=(0.1,), length=None)
  assert given == Options(epsilons=(0.1,), source='Stdlib()')


@pytest.mark.parametrize('wrong, words', [
    (dict(inputs='text'), "--inputs: there is no 'text'. Choices: natural, random, repeat"),
    (dict(bos='never'), "--bos: there is no 'never'.*none, tokenizer, force"),
    (dict(dtype='float16'), "--dtype: there is no 'float16'.*float32, bfloat16"),
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


def test_sweeps_are_sorted_and_say_everything_once():
  chosen = Options(epsilons=(0.4, 0.2, 0.4), lengths=(9, 4, 9))
  assert chosen.epsilons == (0.2, 0.4) and chosen.lengths == (4, 9)


def test_several_thresholds_are_refused_before_a_model_is_loaded(tmp_path):
  with pytest.raises(ValueError, match='--epsilons: scale takes one'):
    analyse_models('scale', ['no such model'], [], tmp_path, epsilons=(0.2, 0.3))
  assert registry.find('domains').options(epsilons=(0.2, 0.3)).epsilons == (0.2, 0.3)


def test_sequences_at_a_time():
  assert Options().at_a_time(64) == 256 and Options().at_a_time(10**6) == 1
  assert Options(batch_size=4, length=64).at_a_time(128) == 2


def test_one_analysis_of_a_checkpoint_and_a_run(checkpoint, tmp_path):
  run = workdir(tmp_path / 'run', data__source="TextFolder(path='texts')",
                data__tokenizer='Bytes()', model__vocab_size=258)
  said = []
  text, paths, failed = analyse_models(
      'lengths', [str(checkpoint)], [run], tmp_path / 'out', lengths=(4, 9), epsilons=(0.3,),
      sequences=3, say=said.append)
  assert [p.name for p in paths] == ['lengths.json', 'lengths.png'] and failed == []
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
  config = sj.load_pretrained(checkpoint).config
  assert first['checkpoint'] == {'folder': 'tiny-llama', 'step': None, 'dtype': 'float32',
                                 'parameters': parameter_count(config)}
  assert second['checkpoint'].items() > {'folder': 'run', 'step': 2, 'dtype': 'float32'}.items()
  assert first['options'] == second['options'] | {'fsdp': 1}  # which no run of ours is loaded by
  assert first['options']['lengths'] == [4, 9] and first['options']['dtype'] == 'float32'
  assert 'say' not in first['options'] and written['failed'] == []
  # The numbers are those of the probe on the same inputs.
  subject = LoadedModel.of_checkpoint(checkpoint)
  tokens = make_inputs(subject, Options(sequences=3, length=9)).tokens
  assert first['sink'][0][1][0] == pytest.approx(
      100 * sj.probe(subject.run, tokens).sink_rate(), abs=1e-3)


def test_a_run_of_a_synthetic_task_is_probed_on_its_own_tokens(tmp_path):
  subject = LoadedModel.of_workdir(workdir(tmp_path))
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
  subject = LoadedModel.of_checkpoint(tmp_path)
  with pytest.raises(ValueError) as error:
    make_inputs(subject, Options())
  told = str(error.value)
  assert 'no tokenizer for text' in told and told.count('--inputs=random') == 1
  assert told.endswith('need none.') and '..' not in told and '. ' not in told
  with pytest.raises(ValueError) as error:  # which is about text alone
    domains.make_inputs(subject, Options())
  told = str(error.value)
  assert 'no tokenizer for text' in told and '--inputs' not in told and not told.endswith('..')
  assert make_inputs(subject, Options(inputs='random')).tokens.max() < 16


def test_more_tokens_than_positions():
  run = small_run(attention=sj.AttentionSpec(position=sj.Learned(max_length=8)))
  with pytest.raises(ValueError, match='small, --length or --lengths: 9 tokens exceed the 8'):
    make_inputs(LoadedModel(run), Options(length=9, inputs='random'))


@pytest.mark.parametrize('arguments, words', [
    (('nothing', ['x'], [], 'out'), 'No analysis'), (('lengths', [], [], 'out'), '--checkpoint='),
    (('lengths', ['x'], [], None), '--out is needed'),
    (('lengths', ['no such model'], [], 'out'), 'neither a folder nor a known model'),
    (('lengths', [], ['nowhere'], 'out'), 'not the workdir of a run')], ids=str)
def test_commands_that_cannot_be(tmp_path, monkeypatch, arguments, words):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=words):
    analyse_models(*arguments)


@pytest.mark.full
def test_the_command_itself(checkpoint, tmp_path):
  def command(*options):
    done = subprocess.run(
        [sys.executable, '-m', 'sink_jax', 'analyses', *options], cwd=ROOT, text=True,
        capture_output=True, env=os.environ | {'PYTHONPATH': str(ROOT)})
    return done.returncode, done.stdout, done.stderr

  code, told, _ = command('maps', f'--checkpoint={checkpoint}', f'--out={tmp_path}', '--layers=2',
                          '--heads=1,2', '--inputs=random', '--length=8', '--sequences=2')
  assert code == 0
  assert told.splitlines()[-2:] == [str(tmp_path / name) for name in ('maps.json', 'maps.png')]
  written = json.loads((tmp_path / 'maps.json').read_text())
  assert [(own['layer'], own['head']) for own in written['results'][0]['heads']] == [(1, 0), (1, 1)]
  assert '-m sink_jax analyses maps' in written['command']
  code, _, told = run_here('analyses', 'maps', f'--checkpoint={checkpoint}', f'--out={tmp_path}',
                           '--layers=one')
  assert code == 1 and '--layers' in told and "'one'" in told


def test_one_model_that_fails_spares_the_others(checkpoint, tmp_path, monkeypatch):
  folder, measure, seen = str(tmp_path / 'missing'), norms.measure, []

  def fails_at_the_second(run, inputs, options):
    written = tmp_path / 'norms.json'
    seen.append(len(json.loads(written.read_text())['results']) if written.exists() else None)
    if len(seen) == 2:
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of\nmemory')
    return measure(run, inputs, options)

  monkeypatch.setattr(norms, 'measure', fails_at_the_second)
  copies = [str(shutil.copytree(checkpoint, tmp_path / part)) for part in ('a/one', 'two', 'b/one')]
  text, paths, failed = analyse_models('norms', [*copies, 'missing'], [folder],
                                       tmp_path, inputs='random', length=8, sequences=2)
  assert [own['model'] for own in failed] == ['two', 'missing', 'missing']
  assert failed[0]['error'] == 'RESOURCE_EXHAUSTED: out of memory'
  assert 'neither a folder' in failed[1]['error'] and 'not the workdir' in failed[2]['error']
  assert seen == [None, 1, 1]  # after every model there is what was found so far
  written = json.loads(paths[0].read_text())
  assert written['failed'] == failed
  # Two folders of one name are told apart by as much of their paths.
  assert [result['model'] for result in written['results']] == ['a/one', 'b/one']
  # Failures alone leave it as it is.
  _, again, failed = analyse_models('norms', ['one missing', 'another'], [], tmp_path)
  assert len(failed) == 2 and not again and json.loads(paths[0].read_text()) == written
  check_png(paths[1])
  assert text.count('hidden states') == 2


def test_only_models_that_fail(tmp_path):
  _, paths, failed = analyse_models('norms', ['one missing', 'another'], [], tmp_path)
  assert len(failed) == 2 and [path.name for path in paths] == ['norms.json']
  alone = tmp_path / 'alone'
  with pytest.raises(ValueError, match='neither a folder'):
    analyse_models('norms', ['one missing'], [], alone)
  assert not alone.exists()


def test_the_command_names_what_failed(checkpoint, tmp_path, monkeypatch, capsys):
  found = {'model': 'big', 'error': 'no memory'}
  monkeypatch.setattr(analyses, 'analyse_models', lambda *a, **k: ('table', ['a.json'], [found]))
  with pytest.raises(SystemExit) as error:
    main.run('analyses', ['norms'])
  assert error.value.code == 'error: big: no memory'  # and exit status 1
  assert capsys.readouterr().out == 'table\na.json\n'


@pytest.mark.parametrize('said', ['RESOURCE_EXHAUSTED: out of memory', 'INTERNAL: Out of memory'])
def test_a_single_model_beyond_the_memory_is_one_line(checkpoint, tmp_path, monkeypatch, said):
  def fails(run, inputs, options):
    raise jax.errors.JaxRuntimeError(said.replace(': ', ':\n'))

  monkeypatch.setattr(norms, 'measure', fails)
  with pytest.raises(SystemExit) as error:
    main.run('analyses', ['norms', f'--checkpoint={checkpoint}', f'--out={tmp_path}',
                             '--inputs=random', '--length=8', '--sequences=2'])
  assert error.value.code.startswith(f'error: {said}. Where ')
  assert '--batch_size=1' in error.value.code and '\n' not in error.value.code


def test_out_that_cannot_be_written(checkpoint, tmp_path):
  (tmp_path / 'file').write_text('')
  for out in (tmp_path / 'file', tmp_path / 'file' / 'below', '/proc'):
    with pytest.raises(ValueError, match=f'--out={out} cannot be written .*another folder'):
      analyse_models('norms', [str(checkpoint)], [], out)


def test_which_model_a_result_is_of():
  run = dataclasses.replace(small_run(), step=7)
  assert runner.checkpoint(run) == {'folder': None, 'step': 7, 'dtype': 'float32',
                                    'parameters': parameter_count(run.config)}
  snapshot = f'/cache/models--a--b/snapshots/{"0a" * 20}'
  found = runner.checkpoint(dataclasses.replace(run, folder=snapshot))
  assert (found['folder'], found['revision']) == ('models--a--b', '0a' * 20)


def test_results_of_a_caller_say_how_they_were_made():
  found = sj.analyse('norms', small_run(dtype='bfloat16'), np.ones((2, 5), int), batch_size=3)
  assert found['checkpoint']['dtype'] == 'bfloat16'
  assert found['options'] == {'dtype': 'float32', 'batch_size': 3}  # and no other was read
  assert found['matmul_precision'] == 'highest'
  assert (found['inputs']['sequences'], found['inputs']['length']) == (2, 5)
  assert found['inputs']['kind'] == 'given' and found['inputs']['bos']['protocol'] == 'as given'


def test_the_dtype_of_a_run_of_ours(tmp_path):
  folder = workdir(tmp_path)
  assert LoadedModel.of_workdir(folder, 'bfloat16').run.config.dtype == 'bfloat16'
  _, paths, _ = analyse_models('norms', [], [folder], tmp_path / 'out', sequences=2, length=8,
                               dtype='bfloat16')
  [result] = json.loads(paths[0].read_text())['results']
  assert result['checkpoint']['dtype'] == result['options']['dtype'] == 'bfloat16'
  assert result['matmul_precision'] == 'default'


@pytest.mark.parametrize('name', ['last_query', 'angles', 'maps', 'norms'])
@pytest.mark.parametrize('tokens, words', [
    ([[1, 13]], 'from 1 to 13, and the vocabulary has 13'), ([[-1, 2]], 'from -1 to 2'),
    (np.zeros((0, 5), int), 'empty'), ([1, 2], r'shape \(S, T\)')])
def test_tokens_that_a_model_does_not_have(name, tokens, words):
  with pytest.raises(ValueError, match=words):
    sj.analyse(name, small_run(), np.asarray(tokens))


def test_a_loaded_run_of_a_synthetic_task_has_its_own_tokens_too(tmp_path):
  run = sj.load_run(workdir(tmp_path))
  found = sj.analyse('norms', run, sequences=4, length=10)
  assert 'BigramBackcopy' in found['inputs']['source']
  assert found['hidden'] == sj.analyse('norms', run, run.probe_tokens[:4, :10])['hidden']


def test_tokens_of_a_caller_go_with_the_tokenizer_of_the_model(checkpoint, monkeypatch):
  seen = []
  monkeypatch.setattr(norms, 'measure', lambda run, inputs, options: seen.append(inputs) or {})
  sj.analyse('norms', sj.load_pretrained(checkpoint), np.ones((2, 5), int))
  assert seen[0].tokenizer.vocab_size == 258


def test_hellaswag_beside_sinks_on_tokens_of_a_caller(checkpoint, monkeypatch):
  answers = lambda run, tokenizer, **options: {'acc': float(tokenizer.vocab_size)}
  monkeypatch.setattr(hellaswag, 'hellaswag_accuracy', answers)
  found = sj.analyse('hellaswag', sj.load_pretrained(checkpoint), np.ones((2, 5), int))
  assert found['acc'] == 258 and found['inputs']['sequences'] == 2
