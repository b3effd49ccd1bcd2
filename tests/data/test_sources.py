"""Document sources: the documents that they yield."""

import gzip
import json
import sys

import numpy as np
import pytest
from backports import zstd

from sink_jax.data import stdlib
from sink_jax.data.sources import HubDataset, Jsonl, TextFolder, Tfds
from sink_jax.data.stdlib import InstalledPackages, PythonManual, Stdlib, StdlibFunctions
from sink_jax.data.tokenizer import Bytes


def _texts(source):
  return [document.text for document in source.documents()]


def test_held_out_is_a_stable_share():
  held = lambda fraction: {i for i in range(5000) if Stdlib().held_out(str(i), fraction)}
  assert abs(len(held(0.2)) / 5000 - 0.2) < 0.02
  assert held(0.1) < held(0.2)
  assert {i for i in held(0.1) if i < 60} == {18, 29, 47, 55}


def test_stdlib_has_code_and_docstrings_of_packages():
  size = 80  # asyncio is among the first 80 files of Python 3.11 to 3.13
  documents = list(Stdlib(max_files=size).documents())
  assert list(Stdlib(max_files=size).documents(7)) == documents[7:]
  code, docs = (
    {document.name: document.text for document in reversed(documents) if document.domain == domain}
    for domain in ('code', 'docs')
  )
  assert len(documents) == len(list(Stdlib(domains='docs', max_files=size).documents())) + size
  assert 'asyncio' in code
  assert not any('/' in name or '.py' in name for name in code)
  assert docs['argparse'].startswith('Command-line parsing library')
  assert docs['argparse'].strip() in code['argparse']
  assert Stdlib(max_files=3).fingerprint() != Stdlib(max_files=4).fingerprint()


def test_installed_packages_are_code_by_package(tmp_path, monkeypatch):
  paths = {'purelib': str(tmp_path)}
  monkeypatch.setattr(stdlib.sysconfig, 'get_paths', lambda: paths)
  assert not list(InstalledPackages().documents())
  files = {
    'one/a.py': b'"""One."""\n',
    'one/tests/b.py': b'x = 1\n',
    'two/latin.py': b'caf\xe9\n',
    'two/template.py': b'{{ x }} {\n',
    'two/module.so': b'\x7fELF',
    'three.py': b'x = 1\n',
  }
  for name, content in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
  documents = list(InstalledPackages().documents())
  assert [document[:3] for document in documents] == [
    ('"""One."""\n', 'code', 'one'),
    ('x = 1\n', 'code', 'three'),
    ('{{ x }} {\n', 'code', 'two'),
  ]
  assert list(InstalledPackages().documents(2)) == documents[2:]
  assert _texts(InstalledPackages(domains='docs')) == ['One.\n']


def test_code_without_prose(tmp_path, monkeypatch):
  monkeypatch.setattr(stdlib.sysconfig, 'get_paths', lambda: {'stdlib': str(tmp_path)})
  told = 'def told():\n  """It is the longest function of this module."""\n'
  files = {
    'a.py': f'"""Prose."""\n\ndef f():\n  pass\n\n{told}\ndef g(x):\n  return x  # it\n',
    'b.py': told,
    'c.py': '{{ x }} {\n',
    'd.py': 'def h(): pass\n',
  }
  for name, content in files.items():
    (tmp_path / name).write_text(content)
  assert _texts(StdlibFunctions()) == ['def g(x):\n  return x', 'def h(): pass']
  assert [document.name for document in StdlibFunctions().documents(1)] == ['d']


def test_the_manual_is_on_every_machine():
  chapters = list(PythonManual().documents())
  assert len(chapters) > 60
  assert list(PythonManual().documents(3)) == chapters[3:]
  assert sum(len(chapter.text) > 300 for chapter in chapters) > 50


def test_text_folder(tmp_path):
  (tmp_path / 'law').mkdir()
  (tmp_path / 'law' / 'b.txt').write_text('naïve', encoding='utf-8-sig')
  (tmp_path / 'a.txt').write_text('top')
  (tmp_path / 'c.txt.gz').write_bytes(gzip.compress(b'\xef\xbb\xbfother'))
  source = TextFolder(path=str(tmp_path))
  documents = list(source.documents())
  assert documents == [('top', 'text', 'a.txt', ()), ('naïve', 'law', 'law/b.txt', ())]
  assert list(source.documents(1)) == documents[1:]
  assert _texts(TextFolder(path=str(tmp_path), pattern='*.gz')) == ['other']
  before = source.fingerprint()
  assert source.fingerprint() == before
  (tmp_path / 'a.txt').write_text('three')
  assert source.fingerprint() != before


_PACKED = {'.jsonl': bytes, '.jsonl.gz': gzip.compress, '.jsonl.zst': zstd.compress}


@pytest.mark.parametrize('suffix', _PACKED)
def test_jsonl(tmp_path, suffix):
  file, pack = tmp_path / 'web' / f'a{suffix}', _PACKED[suffix]
  file.parent.mkdir()
  records = [{'text': f'd{i} \N{SNOWMAN}' * 50, 'meta': {'set': f's{i % 2}'}} for i in range(200)]
  lines = b''.join(json.dumps(record).encode() + b'\n' for record in records)

  # A byte order mark is not text, and a blank line is not a document. A compressed file may have
  # several frames.
  file.write_bytes(pack(b'\xef\xbb\xbf' + lines[:1000]) + pack(lines[1000:] + b'\n'))
  documents = list(Jsonl(path=str(tmp_path)).documents())
  assert [document.text for document in documents] == [record['text'] for record in records]
  assert documents[7][1:3] == ('web', f'web/a{suffix}:8')
  rest = Jsonl(path=str(file), domain_field='meta.set').documents(1)
  assert [document.domain for document in rest] == ['s1', 's0'] * 99 + ['s1']

  # An unpaired surrogate becomes a question mark.
  file.write_bytes(pack(b'{"text": "a\\ud83db \\ud83d\\ude00"}\n'))
  (text,) = _texts(Jsonl(path=str(tmp_path)))
  assert Bytes().open().encode(text) == Bytes().open().encode('a?b \N{GRINNING FACE}')
  for damaged in (pack(lines)[:-40], b'no archive' + pack(lines)):
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf'a{suffix}'):
      _texts(Jsonl(path=str(tmp_path)))


def test_a_record_of_the_hub_without_a_text_is_named(monkeypatch):
  records = [{'text': 'a', 'id': 1}, {'text': None, 'id': 2}]
  monkeypatch.setattr(HubDataset, '_records', lambda self: records)
  documents = HubDataset(path='owner/name').documents()
  assert next(documents).text == 'a'
  with pytest.raises(ValueError, match='record 1; its fields are: text, id'):
    next(documents)


def _build_tfds(folder):
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

  SinkTiny(data_dir=folder, file_format='array_record').download_and_prepare()


def test_tfds_array_record_without_tensorflow(tmp_path):
  _build_tfds(tmp_path)
  tiny = lambda **options: Tfds(**{'name': 'sink_tiny', 'data_dir': str(tmp_path)} | options)
  documents = list(tiny().documents())
  texts = sorted(document.text for document in documents)
  assert texts == [f'document {i} \N{SNOWMAN}' for i in range(9)]
  assert {document.domain for document in documents} == {'text'}
  assert len({document.name for document in documents}) == 9
  assert list(tiny().documents(4)) == documents[4:]
  assert len(_texts(tiny(split='train[:3]'))) == 3
  assert tiny().fingerprint() == tiny().fingerprint()
  info = tmp_path / 'sink_tiny' / '1.0.0' / 'dataset_info.json'
  for options, named in (
    ({'field': 'label'}, 'text'),
    ({'split': 'dev'}, 'dev'),
    ({'name': 'c4/en'}, 'cannot be prepared here.*Jsonl'),
    ({}, 'TFRECORD.*data_dir'),
  ):
    if not options:
      info.write_text(info.read_text().replace('array_record', 'tfrecord'))
    with pytest.raises(ValueError, match=named):
      _texts(tiny(**options))
  assert 'tensorflow' not in sys.modules
