"""Datasets of TFDS, prepared without TensorFlow."""

import pathlib
import sys

import numpy as np
import pytest

from sink_jax.cli import command, data_build_tfds
from sink_jax.cli.options import BuildTfds
from sink_jax.component import from_string
from sink_jax.data.chat import StdlibChat
from sink_jax.data.sources import DocumentSource, TextFolder, Tfds
from sink_jax.data.prepare import open_cache
from sink_jax.data.tokenizer import Bytes


def prepare(name, folder, source=None):
  return data_build_tfds.prepare(BuildTfds(
      name=name, data_dir=folder, source=repr(source) if source else ''))


def test_own_documents_become_a_dataset_and_its_tokens(corpus, tmp_path, capsys):
  folder = str(tmp_path / 'tfds')
  words = ['--name=mine', '--data_dir', folder, '--source', repr(corpus)]
  data_build_tfds.main(command.options_of('data.build_tfds', words))
  source = from_string(DocumentSource, capsys.readouterr().out.splitlines()[-1])
  assert source == Tfds(name='mine', data_dir=folder)
  assert [d.text for d in source.documents()] == [d.text for d in corpus.documents()]
  assert list(source.documents_from(90)) == list(source.documents())[90:]
  assert prepare('mine', folder, corpus) == source  # it is there
  train = open_cache(source, Bytes(), 16, False).tables['train']
  stream = train.take(np.arange(len(train))).ravel()
  assert Bytes().resolve(None, 0, None).decode(stream).startswith('prose 0 ')
  with pytest.raises(ValueError, match=r'was made of TextFolder.*another --name'):
    prepare('mine', folder, TextFolder(path=corpus.path, pattern='**/1*.txt'))
  # The same source with another text is another dataset.
  file = next(pathlib.Path(corpus.path).rglob('*.txt'))
  file.write_text(file.read_text() + 'more')
  with pytest.raises(ValueError, match='was made of TextFolder.*, fingerprint .*remove that folder'):
    prepare('mine', folder, corpus)
  assert 'tensorflow' not in sys.modules


def test_errors(tmp_path):
  with pytest.raises(SystemExit, match="^error: .*no dataset 'no_such_set'"):
    command.run('data.build_tfds', ['--name=no_such_set', '--data_dir', str(tmp_path)])
  with pytest.raises(ValueError, match=r"'c4/en' cannot be prepared here: .*Jsonl"):
    prepare('c4/en', str(tmp_path))
  with pytest.raises(ValueError, match='small letters'):
    prepare('My-Set', str(tmp_path), TextFolder(path=str(tmp_path)))
  with pytest.raises(ValueError, match='StdlibChat.* has conversations'):
    prepare('mine', str(tmp_path), StdlibChat())
  with pytest.raises(ValueError, match='no files like'):
    prepare('mine', str(tmp_path), TextFolder(path=str(tmp_path)))
