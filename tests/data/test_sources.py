"""Document sources: the documents that they yield, and their errors for bad input."""

import gzip
import json
import sys

import numpy as np
import pytest

from sink_jax.data import stdlib
from sink_jax.data.sources import HubDataset, Jsonl, TextFolder, Tfds
from sink_jax.data.stdlib import InstalledPackages, Stdlib
from sink_jax.data.tokenizer import Bytes


def test_held_out_is_a_stable_share():
  held = lambda fraction: {i for i in range(5000) if Stdlib().held_out(f'document {i}', fraction)}
  assert abs(len(held(0.2)) / 5000 - 0.2) < 0.02 and held(0.1) < held(0.2)
  assert [i for i in range(60) if Stdlib().held_out(str(i), 0.1)] == [18, 29, 47, 55]


def test_stdlib_has_code_and_docstrings_of_packages():
  documents = list(Stdlib(max_files=40).documents())
  assert documents == list(Stdlib(max_files=40).documents())
  assert list(Stdlib(max_files=40).documents(7)) == documents[7:]
  assert sum(d.domain == 'code' for d in documents) == 40
  names = {d.name for d in documents}
  assert {'argparse', 'asyncio'} <= names and not any('/' in name or '.py' in name for name in names)
  argparse = {d.domain: d.text for d in reversed(documents) if d.name == 'argparse'}
  assert argparse['docs'].startswith('Command-line parsing library')
  assert argparse['docs'].strip() in argparse['code']
  assert {d.domain for d in Stdlib(domains='docs', max_files=40).documents()} == {'docs'}
  assert Stdlib(max_files=3).fingerprint() != Stdlib(max_files=4).fingerprint()


def test_installed_packages_are_code_by_package(tmp_path, monkeypatch):
  monkeypatch.setattr(stdlib.sysconfig, 'get_paths', lambda: {'purelib': str(tmp_path)})
  assert not list(InstalledPackages().documents())
  files = {'one/a.py': b'"""One."""\n', 'one/tests/b.py': b'x = 1\n', 'two/latin.py': b'caf\xe9\n',
           'two/template.py': b'{{ x }} {\n', 'two/module.so': b'\x7fELF', 'three.py': b'x = 1\n'}
  for name, content in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
  found = list(InstalledPackages().documents())
  assert [d[:3] for d in found] == [('"""One."""\n', 'code', 'one'), ('x = 1\n', 'code', 'three'),
                                    ('{{ x }} {\n', 'code', 'two')]
  assert list(InstalledPackages().documents(2)) == found[2:]
  assert [d.text for d in InstalledPackages(domains='docs').documents()] == ['One.\n']


def test_text_folder(tmp_path):
  (tmp_path / 'law').mkdir()
  (tmp_path / 'law' / 'b.txt').write_text('naïve', encoding='utf-8')
  (tmp_path / 'a.txt').write_text('top')
  (tmp_path / 'c.md').write_text('other')
  source = TextFolder(path=str(tmp_path))
  assert list(source.documents()) == [('top', 'text', 'a.txt', ()), ('naïve', 'law', 'law/b.txt', ())]
  assert list(source.documents(1)) == list(source.documents())[1:]
  assert [d.text for d in TextFolder(path=str(tmp_path), pattern='*.md').documents()] == ['other']
  before = source.fingerprint()
  assert source.fingerprint() == before
  (tmp_path / 'a.txt').write_text('three')
  assert source.fingerprint() != before


def test_a_byte_order_mark_is_not_part_of_a_document(tmp_path):
  texts = {'mark.txt': 'a\ufeffb', 'plain.txt': 'c'}
  for name, text in texts.items():
    encoding = 'utf-8-sig' if name == 'mark.txt' else 'utf-8'
    (tmp_path / name).write_text(text, encoding=encoding)
    (tmp_path / f'{name}.gz').write_bytes(gzip.compress(text.encode(encoding)))
  for pattern in ('*.txt', '*.txt.gz'):
    source = TextFolder(path=str(tmp_path), pattern=pattern)
    assert [d.text for d in source.documents()] == ['a\ufeffb', 'c']
  (tmp_path / 'a.jsonl').write_text('{"text": "a\ufeffb"}\n', encoding='utf-8-sig')
  assert [d.text for d in Jsonl(path=str(tmp_path)).documents()] == ['a\ufeffb']


@pytest.mark.parametrize('name', ['a.txt', 'a.txt.gz', 'a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst'])
@pytest.mark.parametrize('content, remedy', [
    ('{"text": "a"}\n'.encode('utf-16'), 'iconv -f UTF-16 '),
    ('{"text": "a"}\n'.encode('utf-16-le'), 'iconv -f UTF-16LE '),
    (b'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n', 'git lfs pull')])
def test_what_is_not_the_text_of_a_corpus_is_named(tmp_path, name, content, remedy):
  pack = {'.gz': gzip.compress, '.zst': _zstd}.get((tmp_path / name).suffix)
  # A pointer stands in place of the compressed file.
  (tmp_path / name).write_bytes(pack(content) if pack and remedy.startswith('iconv') else content)
  source = (TextFolder(path=str(tmp_path), pattern=name) if '.txt' in name
            else Jsonl(path=str(tmp_path)))
  with pytest.raises(ValueError, match=remedy) as caught:
    list(source.documents())
  assert str(tmp_path / name) in str(caught.value) and 'damaged' not in str(caught.value)


_LINES = b''.join(json.dumps({'text': f'd{i} \N{SNOWMAN}' * 50, 'meta': {'set': f's{i % 2}'}}).encode()
                  + b'\n' for i in range(200))


def _zstd(data):
  from backports import zstd
  return zstd.compress(data)


_PACKED = {'.jsonl': lambda data: data, '.jsonl.gz': gzip.compress, '.jsonl.zst': _zstd}


@pytest.mark.parametrize('suffix', _PACKED)
def test_jsonl(tmp_path, suffix):
  file = tmp_path / 'web' / f'a{suffix}'
  file.parent.mkdir()
  # A blank line is not a document. A compressed file may have several frames.
  file.write_bytes(_PACKED[suffix](_LINES[:1000]) + _PACKED[suffix](_LINES[1000:] + b'\n'))
  documents = list(Jsonl(path=str(tmp_path)).documents())
  assert len(documents) == 200 and documents[7][:3] == ('d7 \N{SNOWMAN}' * 50, 'web', f'web/a{suffix}:8')
  one = list(Jsonl(path=str(file), domain_field='meta.set').documents(1))
  assert [d.domain for d in one[:3]] == ['s1', 's0', 's1'] and len(one) == 199


  # An unpaired surrogate becomes a question mark.
  file.write_bytes(_PACKED[suffix](b'{"text": "a\\ud83db \\ud83d\\ude00"}\n'))
  document, = Jsonl(path=str(tmp_path)).documents()
  assert Bytes().open().encode(document.text) == Bytes().open().encode('a?b \N{GRINNING FACE}')
  for damaged in (_PACKED[suffix](_LINES)[:-40], b'no archive' + _PACKED[suffix](_LINES)):
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf'a{suffix}'):
      list(Jsonl(path=str(tmp_path)).documents())


def test_errors_name_the_file_or_the_option(tmp_path):
  (tmp_path / 'latin.txt').write_bytes(b'na\xefve')
  (tmp_path / 'empty').mkdir()
  lines = {'cut': _LINES[:-20], 'bytes': b'{"text": "ok"}\n{"text": "\xff"}\n',
           'fields': b'{"body": "x", "id": 3}\n'}
  for name, content in lines.items():
    (tmp_path / f'{name}.jsonl').write_bytes(content)
  file = lambda name: str(tmp_path / name)
  for source, named in (
      (TextFolder(), 'TextFolder(path='), (TextFolder(path=file('no')), '--config.data.source'),
      (Jsonl(path='gs://bucket/a'), 'data_build'), (TextFolder(path=file('empty')), 'pattern'),
      (TextFolder(path=str(tmp_path)), 'latin.txt'), (Jsonl(path=file('empty')), '.jsonl.zst'),
      (Jsonl(path=file('cut.jsonl')), 'line 200'), (Jsonl(path=file('bytes.jsonl')), 'line 2'),
      (Jsonl(path=file('fields.jsonl')), 'body, id'), (HubDataset(path=file('no')), 'HubDataset')):
    with pytest.raises(ValueError) as error:
      list(source.documents())
    assert named in str(error.value)


def test_a_record_of_the_hub_without_a_text_is_named(monkeypatch):
  monkeypatch.setattr(HubDataset, '_records', lambda self: [{'text': 'a', 'id': 1}, {'text': None, 'id': 2}])
  documents = HubDataset(path='owner/name').documents()
  assert next(documents).text == 'a'
  with pytest.raises(ValueError, match='record 1; its fields are: text, id'):
    next(documents)


def _build_tfds(folder, file_format):
  import tensorflow_datasets as tfds

  class SinkTiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      features = {'text': tfds.features.Text(), 'label': tfds.features.Scalar(np.int64)}
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, download):
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for i in range(9):
        yield i, {'text': f'document {i} \N{SNOWMAN}', 'label': i}

  SinkTiny(data_dir=folder, file_format=file_format).download_and_prepare()


def test_tfds_array_record_without_tensorflow(tmp_path):
  _build_tfds(tmp_path, 'array_record')
  source = Tfds(name='sink_tiny', data_dir=str(tmp_path))
  documents = list(source.documents())
  assert sorted(d.text for d in documents) == [f'document {i} \N{SNOWMAN}' for i in range(9)]
  assert {d.domain for d in documents} == {'text'} and len({d.name for d in documents}) == 9
  assert list(source.documents(4)) == documents[4:]
  assert len(list(Tfds(name='sink_tiny', data_dir=str(tmp_path), split='train[:3]').documents())) == 3
  assert source.fingerprint() == source.fingerprint()
  for options, named in (({'field': 'label'}, 'text'), ({'split': 'dev'}, 'dev'),
                         ({'name': 'c4/en'}, 'cannot be prepared here.*Jsonl')):
    with pytest.raises(ValueError, match=named):
      list(Tfds(**{'name': 'sink_tiny', 'data_dir': str(tmp_path)} | options).documents())
  info = tmp_path / 'sink_tiny' / '1.0.0' / 'dataset_info.json'
  info.write_text(info.read_text().replace('array_record', 'tfrecord'))
  with pytest.raises(ValueError, match='TFRECORD.*data_dir'):
    list(source.documents())
  assert 'tensorflow' not in sys.modules
