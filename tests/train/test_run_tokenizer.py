"""A run over text keeps its tokenizer: moved elsewhere it can do all that it could at home."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses.loaded_models import LoadedModel, make_inputs
from sink_jax.analyses.options import Options
from sink_jax.cli.evaluate import evaluate
from sink_jax.cli.model_options import Evaluate
from sink_jax.data.sources import TextFolder
from sink_jax.data.tokenizer import ByteEncoder, TrainedBpe
from sink_jax.pretrained.export import export_workdir
from sink_jax.train.loop import train
from sink_jax.train.run_tokenizer import read_tokenizer, write_tokenizer
from tests.commands import run_here
from tests.train import runs

TEXT = 'the quick brown fox jumps over the lazy dog, again and again and again. '


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  """A run on text with a trained tokenizer, beside its chunk cache."""
  folder = tmp_path_factory.mktemp('home')
  (folder / 'text').mkdir()
  for i in range(40):
    (folder / 'text' / f'{i}.txt').write_text(f'{i} {TEXT * 3}')
  go(folder)
  return folder


def go(folder):
  train(runs.config(data__source=f'TextFolder(path={str(folder / "text")!r})', steps=1,
                    data__tokenizer='TrainedBpe(vocab_size=280)', data__valid_fraction=0.2,
                    data__cache_dir=str(folder / 'cache'), data__interventions=FIRST),
        folder / 'run', show_progress=False)


FIRST = 'FixedToken(position=1)'


def test_a_run_that_was_moved_is_whole(home, tmp_path, monkeypatch):
  monkeypatch.setenv('SINK_JAX_CACHE', str(tmp_path / 'empty'))
  expected = sj.load_run(home / 'run').tokenizer.encode(TEXT).tolist()
  assert expected != ByteEncoder().encode(TEXT).tolist()
  moved = tmp_path / 'elsewhere'
  shutil.copytree(home / 'run', moved)
  config = json.loads((moved / 'config.json').read_text())
  config['data'] |= {'cache_dir': '', 'source': "TextFolder(path='not/here')"}
  (moved / 'config.json').write_text(json.dumps(config))
  run = sj.load_run(moved)
  assert run.tokenizer.encode(TEXT).tolist() == expected
  assert run.generate(sj.tokenize(run, TEXT, length=5), 3).shape == (1, 3)
  evaluate(Evaluate(workdir=str(moved), out=str(tmp_path / 'evaluation'),
                    sequences=2, given=frozenset(['sequences'])))
  lines = export_workdir(moved, tmp_path / 'exported')
  assert not any('No tokenizer' in line for line in lines), lines
  exported = sj.load_pretrained(tmp_path / 'exported').tokenizer
  assert exported.encode(TEXT).tolist() == expected
  assert not (tmp_path / 'empty').exists()


@pytest.mark.parametrize('name', ['tokenizer.json', 'manifest.json'])
def test_a_damaged_tokenizer_is_an_error_and_is_written_again(home, tmp_path, name):
  expected = sj.load_run(home / 'run').tokenizer.encode(TEXT).tolist()
  file = home / 'run' / 'tokenizer' / name
  whole = file.read_bytes()
  for damaged in (whole[:-2], whole.replace(b'0', b'1', 1), b''):
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match='tokenizer is damaged.*training again'):
      sj.load_run(home / 'run').tokenizer
  go(home)
  assert file.read_bytes() == whole
  assert sj.load_run(home / 'run').tokenizer.encode(TEXT).tolist() == expected


def test_runs_older_than_this_have_that_of_their_cache(home, tmp_path, monkeypatch):
  old = tmp_path / 'old'
  shutil.copytree(home / 'run', old, ignore=shutil.ignore_patterns('tokenizer'))
  assert sj.load_run(old).tokenizer.vocab_size == 280
  config = json.loads((old / 'config.json').read_text())
  config['data']['cache_dir'] = str(tmp_path / 'empty')
  (old / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match='packed data of this run.*SINK_JAX_CACHE'):
    sj.load_run(old).tokenizer


def test_the_fixed_first_token_travels_with_its_run(home, tmp_path):
  run, training = sj.load_run(home / 'run'), home / 'run' / 'probe_tokens.npy'
  assert run.first_token == 1 and (np.load(training)[:, 0] == 1).all()
  np.testing.assert_array_equal(run.probe_tokens, np.load(training))
  plain = dataclasses.replace(run, first_token=None)
  row, = sj.tokenize(run, TEXT)
  assert row[0] == 1 and row[1:].tolist() == sj.tokenize(plain, TEXT)[0].tolist()
  assert sj.tokenize(run, TEXT, bos='none')[0].tolist() == row[1:].tolist()
  # Generation puts it before what lacks it, once.
  begun = run.generate(row[None, :6], 4)
  np.testing.assert_array_equal(run.generate(row[None, 1:6], 4), begun)
  np.testing.assert_array_equal(plain.generate(row[None, :6], 4), begun)
  with pytest.raises(ValueError, match='some texts begin with the first token 1'):
    run.generate(np.stack([row[:6], row[1:7]]), 4)
  options = dict(source=str(home / 'text'), sequences=3, length=8)
  for subject in (LoadedModel.of_workdir(home / 'run'), exported(home / 'run', tmp_path)):
    natural = make_inputs(subject, Options(**options))
    bare = make_inputs(subject, Options(**options, bos='none'))
    assert (natural.tokens == 1).sum(1).tolist() == [1] * 3 and (natural.tokens[:, 0] == 1).all()
    np.testing.assert_array_equal(natural.tokens[:, 1:], bare.tokens[:, :-1])
    assert natural.description['bos']['applied'] == 'bos id 1 at position 1'
    for kind in ('random', 'repeat'):
      assert (make_inputs(subject, Options(inputs=kind, sequences=50)).tokens != 1).all()
  report = sj.probe(run, texts=[TEXT, TEXT[4:]], length=9)
  np.testing.assert_array_equal(
      report.importance, sj.probe(run, sj.tokenize(run, [TEXT, TEXT[4:]], length=9)).importance)
  assert report.protocol['bos'] == 'tokenizer' and report.protocol['length'] == 9


def exported(workdir, folder):
  export_workdir(workdir, folder / 'exported')
  return LoadedModel.of_checkpoint(folder / 'exported')


def test_bytes_need_no_file_and_tasks_no_tokenizer(tmp_path):
  write_tokenizer(tmp_path / 'bytes', ByteEncoder())
  assert isinstance(read_tokenizer(tmp_path / 'bytes'), ByteEncoder)
  write_tokenizer(tmp_path / 'task', None)
  assert read_tokenizer(tmp_path / 'task') is None and not (tmp_path / 'task').exists()


def test_an_object_store_holds_it_too(tmp_path, monkeypatch):
  from etils import epath

  from sink_jax.train import run_tokenizer
  (tmp_path / 'bucket').mkdir()
  store = epath.Path(tmp_path / 'bucket')  # no pathlib.Path, as those of gs://
  monkeypatch.setattr(run_tokenizer, 'to_path', lambda path: store)
  source = TextFolder(path=str(tmp_path / 'text'))
  (tmp_path / 'text').mkdir()
  (tmp_path / 'text' / 'a.txt').write_text(TEXT)
  encoder = TrainedBpe(vocab_size=270).resolve(source, 0.5, tmp_path / 'cache')
  write_tokenizer('gs://bucket/run', encoder)
  np.testing.assert_array_equal(read_tokenizer('gs://bucket/run').encode(TEXT),
                                encoder.encode(TEXT))


def test_the_command_that_generates_can_leave_it_out(home):
  _, _, notes = run_here('generate', f'--workdir={home / "run"}', '--prompt=the dog', '--length=1',
                         '--bos=none')
  ids = sj.load_run(home / 'run').tokenizer.encode('the dog')
  assert f'{len(ids)} tokens of prompt, the first ids {ids[:4].tolist()}' in notes, notes
