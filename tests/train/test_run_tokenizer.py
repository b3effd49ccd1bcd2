"""A run over text keeps its tokenizer: moved elsewhere it can do all that it could at home."""

import json
import shutil

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.data.documents import TextFolder
from sink_jax.data.tokenizer import ByteEncoder, TrainedBpe
from sink_jax.export import export_run
from sink_jax.load import load_tokenizer
from sink_jax.report.evaluation import evaluate_run
from sink_jax.train.loop import train
from sink_jax.train.run_tokenizer import read_tokenizer, write_tokenizer
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
  expected = load_tokenizer(sj.load_run(home / 'run')).encode(TEXT).tolist()
  assert expected != ByteEncoder().encode(TEXT).tolist()
  moved = tmp_path / 'elsewhere'
  shutil.copytree(home / 'run', moved)
  config = json.loads((moved / 'config.json').read_text())
  config['data'] |= {'cache_dir': '', 'source': "TextFolder(path='not/here')"}
  (moved / 'config.json').write_text(json.dumps(config))
  run = sj.load_run(moved)
  assert load_tokenizer(run).encode(TEXT).tolist() == expected
  evaluate_run(moved, tmp_path / 'evaluation', sequences=2)
  lines = export_run(moved, tmp_path / 'exported')
  assert not any('No tokenizer' in line for line in lines), lines
  exported = load_tokenizer(sj.load_pretrained(tmp_path / 'exported'))
  assert exported.encode(TEXT).tolist() == expected
  assert not (tmp_path / 'empty').exists()


@pytest.mark.parametrize('name', ['tokenizer.json', 'manifest.json'])
def test_a_damaged_tokenizer_is_an_error_and_is_written_again(home, tmp_path, name):
  expected = load_tokenizer(sj.load_run(home / 'run')).encode(TEXT).tolist()
  file = home / 'run' / 'tokenizer' / name
  whole = file.read_bytes()
  for damaged in (whole[:-2], whole.replace(b'0', b'1', 1), b''):
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match='tokenizer is damaged.*training again'):
      load_tokenizer(sj.load_run(home / 'run'))
  go(home)
  assert file.read_bytes() == whole
  assert load_tokenizer(sj.load_run(home / 'run')).encode(TEXT).tolist() == expected


def test_runs_older_than_this_have_that_of_their_cache(home, tmp_path, monkeypatch):
  old = tmp_path / 'old'
  shutil.copytree(home / 'run', old, ignore=shutil.ignore_patterns('tokenizer'))
  assert load_tokenizer(sj.load_run(old)).vocab_size == 280
  config = json.loads((old / 'config.json').read_text())
  config['data']['cache_dir'] = str(tmp_path / 'empty')
  (old / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match='chunk cache of this run.*SINK_JAX_CACHE'):
    load_tokenizer(sj.load_run(old))


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
  monkeypatch.setattr(run_tokenizer, 'folder', lambda path: store)
  source = TextFolder(path=str(tmp_path / 'text'))
  (tmp_path / 'text').mkdir()
  (tmp_path / 'text' / 'a.txt').write_text(TEXT)
  encoder = TrainedBpe(vocab_size=270).resolve(source, 0.5, tmp_path / 'cache')
  write_tokenizer('gs://bucket/run', encoder)
  np.testing.assert_array_equal(read_tokenizer('gs://bucket/run').encode(TEXT),
                                encoder.encode(TEXT))
