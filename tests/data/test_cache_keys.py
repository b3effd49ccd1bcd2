"""Keys and contents of caches, as earlier versions built them: a change would build all again."""

import os
from pathlib import Path

import pytest

from sink_jax.component import registry
from sink_jax.data.sources import DocumentSource, TextFolder
from sink_jax.data.prepare import open_cache, open_pair
from sink_jax.data.synthetic import SyntheticTask
from sink_jax.data.token_edits import TokenEdit
from sink_jax.data.tokenizer import Bytes, Tokenizer, TrainedBpe


@pytest.fixture
def folders(tmp_path, monkeypatch):
  """Two folders of text whose paths, sizes and times of change are the same on every machine."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(TrainedBpe, 'fingerprint', lambda self: '0')  # else a version
  for folder in ('text', 'held'):
    os.mkdir(folder)
    for i in range(20):
      path = Path(folder, f'{i}.txt')
      text = f'{i} {folder}: the quick brown fox jumps over the lazy dog, again. '
      path.write_text(text * 4)
      os.utime(path, ns=(10**18, 10**18))
  return TextFolder(path='text'), TextFolder(path='held')


def test_caches_have_the_keys_and_the_content_of_earlier_versions(folders):
  text, held = folders
  root, bpe = 'caches', TrainedBpe(vocab_size=280)
  caches = [open_cache(text, Bytes(), 16, False, valid_fraction=0.2, cache_dir=root),
            open_cache(text, bpe, 16, True, valid_fraction=0.2, cache_dir=root),
            *open_pair(text, held, bpe, 16, False, True, 0.05, root)]
  assert [(cache.folder.name, cache.manifest['content']) for cache in caches] == [
      ('textfolder-16-876ca728a806703b', '2e53adc8b510dff1e2b5db4ae8daf2aa'),
      ('textfolder-16-7e5a102fd5117123', 'faff61c96c2e74e29d8cb3deb87046f2'),
      ('textfolder-16-07b1b4102385cd0b', 'fb1edaabf37b24c4a866ff059005315b'),
      ('textfolder-16-9b10e6b36624339e', '8629c10cf0dbae1271a774d907c74244')]
  assert sorted(path.name for path in Path(root, 'tokenizers').glob('*.json')) == [
      'bpe280-41e1a6761e8da1fa.json', 'bpe280-f33877e45843a614.json']
  assert set(caches[0].manifest) == {
      'format', 'source', 'source_fingerprint', 'tokenizer', 'tokenizer_fingerprint', 'context',
      'bos', 'eos', 'valid_fraction', 'vocab_size', 'dtype', 'special_ids', 'content', 'files',
      'domains'}


def test_config_strings_are_those_of_earlier_versions():
  kinds = DocumentSource, SyntheticTask, Tokenizer, TokenEdit
  assert [repr(cls()) for kind in kinds for cls in registry(kind).values()] == [
      "ChatJsonl(path='', template='zephyr', loss='all', long='parts')",
      'InstalledPackages(max_files=0)', "Jsonl(path='', field='text', domain_field='')",
      "PackedDataset(path='')", "Stdlib(domains='code,docs', max_files=0)",
      "StdlibChat(template='zephyr', loss='all', long='parts', max_files=0)",
      "TextFolder(path='', pattern='**/*.txt')",
      "Tfds(name='', data_dir='', split='train', field='text')",
      'BigramBackcopy(vocab_size=64, length=64, triggers=3, sharpness=1.5, boost=4.0, '
      'backcopy=True, seed=0, valid_sequences=256)',
      'TriggerAveraging(length=16, content=16, valid_sequences=256)',
      'Bytes()', "HuggingFace(path='', eos='', bos='')",
      'TrainedBpe(vocab_size=4096, characters=100000000)',
      'FixedToken(position=1, token=1)',
      'RandomTokens(first=1, last=1, fresh=False, seed=1024, below=0)']
