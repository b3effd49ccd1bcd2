"""Packed data: content, shards, damage, kills, several processes, prompts, errors."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import grain
import numpy as np
import pytest
from etils import epath

from sink_jax.data import build as builder
from sink_jax.data.chat import ChatJsonl
from sink_jax.data.dataset import DataConfig, as_packed, open_data, open_packed
from sink_jax.data.packed import SPLITS, Packed
from sink_jax.data.sources import PackedDataset, TextFolder
from sink_jax.data.tokenizer import Bytes, TrainedBpe
from sink_jax.io.paths import import_file
from sink_jax.train.config import Experiment, changed
from sink_jax.train.start import completed
from tests.train.runs import ROOT

_SHARD = 3000  # characters; gives the corpus about eight shards


def _config(source, **options):
  return DataConfig(**{'source': source, 'context': 16, 'valid_fraction': 0.2, **options})


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
  monkeypatch.setattr(builder, 'SHARD_CHARACTERS', _SHARD)


def _open(source, **options):
  return open_packed(_config(source, **options))[0]


def _all(packed, split):
  return packed.rows(split, np.arange(packed.size(split)))[0]


def _content(packed):
  """{file name: bytes} of every file except the lock."""
  return {p.name: p.read_bytes() for p in packed.folder.iterdir() if p.name != 'lock'}


def _expected(documents, source, domain, split, context, bos, eos):
  """Concatenate-and-cut, independent of the package: rows, and the number of tokens before the cut."""
  stream = []
  for document in documents:
    if document.domain == domain and source.held_out(document.name, 0.2) == (split == 'valid'):
      stream += [0] * bos + [2 + b for b in document.text.encode()] + [0] * eos
  rows = len(stream) // (context + 1)
  return np.array(stream[:rows * (context + 1)]).reshape(rows, context + 1), len(stream)


@pytest.mark.parametrize('shard', [_SHARD, 1 << 26])
@pytest.mark.parametrize('bos,eos', [(False, True), (True, True), (False, False)])
def test_rows_are_the_joined_documents_of_each_shard(corpus, bos, eos, shard, monkeypatch):
  monkeypatch.setattr(builder, 'SHARD_CHARACTERS', shard)
  packed = _open(corpus, bos=bos, eos=eos)
  groups, size = [[]], 0
  for document in corpus.documents():
    if size >= shard:
      groups, size = [*groups, []], 0
    groups[-1].append(document)
    size += len(document.text)
  assert len(groups) == len(packed.manifest['shards']) == (1 if shard > 1e6 else 8)
  for split in SPLITS:
    rows = _all(packed, split)
    for d, domain in enumerate(packed.domains):
      parts = [_expected(group, corpus, domain, split, 16, bos, eos) for group in groups]
      start, stop = packed.bounds[split][d:d + 2]
      np.testing.assert_array_equal(rows[start:stop], np.concatenate([part for part, _ in parts]))
      entry = packed.manifest['domains'][domain][split]
      assert entry['rows'] == stop - start
      # The count includes tokens that a shard drops because they do not fill a row.
      assert entry['tokens'] == sum(tokens for _, tokens in parts)
  documents = [packed.manifest['domains']['prose'][s]['documents'] for s in SPLITS]
  assert sum(documents) == 60 and min(documents) > 0


def test_rows_in_any_order_and_by_another_reader_and_a_damaged_one_that_names_its_shard(corpus):
  packed = _open(corpus)
  whole = _all(packed, 'train')
  numbers = np.random.default_rng(0).integers(0, len(whole), 200)
  np.testing.assert_array_equal(packed.rows('train', numbers)[0], whole[numbers])
  records = grain.sources.ArrayRecordDataSource(sorted(map(str, packed.folder.glob('*.array_record'))))
  assert len(records) == sum(map(packed.size, SPLITS)) + len(packed.manifest['shards'])
  np.testing.assert_array_equal(np.frombuffer(records[0][:-4], '<u2'), whole[0])  # without the CRC32
  path = packed.folder / '00002.array_record'
  good, rows = path.read_bytes(), {split: _all(packed, split) for split in SPLITS}
  errors = []
  for at in range(0, len(good), 997):
    path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1:])
    try:
      assert all((_all(packed, split) == rows[split]).all() for split in SPLITS)
    except ValueError as error:
      errors.append(str(error))
  assert len(errors) > 6 and all('00002.array_record is missing or damaged' in error for error in errors)
  path.unlink()
  with pytest.raises(ValueError, match=r'00002\.array_record is missing or damaged'):
    _all(Packed(packed.folder), 'train')  # `packed` has mapped the file, which stays until it ends
  # The remedy for a damaged shard: it is built again, and the others are kept.
  (packed.folder / 'manifest.json').unlink()
  kept = (packed.folder / '00001.array_record').stat().st_mtime_ns
  np.testing.assert_array_equal(_all(_open(corpus), 'train'), rows['train'])
  assert path.read_bytes() == good
  assert (packed.folder / '00001.array_record').stat().st_mtime_ns == kept


def test_a_store_gives_the_rows_of_a_disk(corpus):
  packed = _open(corpus)
  stored = Packed(epath.Path(packed.folder))  # the code sees a folder of an object store
  np.testing.assert_array_equal(_all(stored, 'train'), _all(packed, 'train'))


_PROGRAM = """
import sys, time
from sink_jax.data import build as builder
from sink_jax.data.dataset import DataConfig, open_packed
from sink_jax.data.sources import TextFolder
from sink_jax.data.tokenizer import TrainedBpe
if __name__ == '__main__':
  path, workers, builder.SHARD_CHARACTERS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
  if not workers:
    write = builder._write
    builder._write = lambda *args: (time.sleep(0.05), print('shard', flush=True), write(*args))[2]
  config = DataConfig(source=TextFolder(path=path), context=16, valid_fraction=0.2,
                      tokenizer=TrainedBpe(vocab_size=300))
  open_packed(config, '', workers)
  print('done', flush=True)
"""


def _start(corpus, cache, workers):
  return subprocess.Popen([sys.executable, '-c', _PROGRAM, corpus.path, str(workers), str(_SHARD)],
                          cwd=ROOT, env=os.environ | {'SINK_JAX_CACHE': str(cache)}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_killed_at_any_moment_and_resumed(corpus, tmp_path, request):
  whole = _open(corpus, tokenizer=TrainedBpe(vocab_size=300))
  draw = random.Random(0)
  for round_ in range(50 if request.config.getoption('--full') else 3):
    cache, workers = tmp_path / str(round_), 2 * (round_ % 5 == 4)
    kills = 0
    while True:
      process = _start(corpus, cache, workers)
      if workers:
        time.sleep(draw.uniform(1, 6))
      else:
        for _ in range(draw.randint(1, 4)):  # waits until it begins this many shards
          process.stdout.readline()
        time.sleep(draw.uniform(0, 0.08))
      process.send_signal(signal.SIGKILL)
      process.communicate()
      kills += 1
      if list(cache.glob('*/manifest.json')) or kills > 12:
        break
    assert workers or kills > 1
    if not list(cache.glob('*/manifest.json')):
      assert _start(corpus, cache, 0).wait() == 0
    folder, = [path for path in cache.iterdir() if (path / 'manifest.json').exists()]
    assert _content(Packed(folder)) == _content(whole)


def test_workers_and_processes_at_once_make_the_same_folder(corpus, tmp_path):
  processes = [_start(corpus, tmp_path / 'shared', workers) for workers in (0, 2, 0)]
  assert [process.wait(timeout=120) for process in processes] == [0] * 3
  folder, = (tmp_path / 'shared').glob('textfolder-*')
  assert _content(Packed(folder)) == _content(_open(corpus, tokenizer=TrainedBpe(vocab_size=300)))


def test_the_folder_is_reused_and_its_name_sees_every_setting(corpus, monkeypatch):
  first = _open(corpus)
  with monkeypatch.context() as patch:
    patch.setattr(TextFolder, 'documents', None)  # no document is read
    assert _open(corpus).folder == first.folder
  others = [_open(corpus, **options) for options in (
      {'context': 17}, {'bos': True}, {'eos': False}, {'valid_fraction': 0.3},
      {'tokenizer': TrainedBpe(vocab_size=280)})]
  with open(f'{corpus.path}/prose/00.txt', 'a') as file:
    file.write('more')
  folders = {p.folder for p in (first, *others, _open(corpus))}
  assert len(folders) == 7
  contents = {Packed(folder).manifest['content'] for folder in folders}
  assert len(contents) == 7


def test_workers_of_a_source_that_a_config_file_defines_and_probes_of_texts_with_one_header(tmp_path):
  (tmp_path / 'mine.py').write_text(textwrap.dedent('''\
      from sink_jax.data.sources import Document, DocumentSource
      class Numbers(DocumentSource):
        def documents(self, start=0):
          yield from (Document('header' * 9 * (i < 90) + f'{i:04}' * 20, '', str(i)) for i in range(start, 100))
        def fingerprint(self):
          return ''
      '''))
  config = _config(import_file(tmp_path / 'mine.py').Numbers())
  packed, _ = open_packed(config, str(tmp_path / 'out'), 1)
  starts = [bytes(d.text[:16], 'ascii') for d in config.source.documents() if config.source.held_out(d.name, 0.2)]
  probes = packed.prompts(len(set(starts)), 16)  # texts with the header have one start
  assert 1 < len(set(starts)) < len(starts) and {bytes(ids - 2) for ids in probes.astype(np.uint8)} == set(starts)


@pytest.mark.parametrize('count', [1, 3, 60])
def test_a_few_documents_are_enough(tmp_path, count):
  """Users often have few documents, all in one split or shorter than the probe."""
  draw = np.random.default_rng(count)
  for i in range(count):
    text = draw.integers(97, 123, 40_000 if count < 5 else 3000).astype(np.uint8).tobytes().decode()
    (tmp_path / f'{i}.txt').write_text(text)
  data = open_data(DataConfig(source=TextFolder(path=str(tmp_path)), context=64))
  assert data.batch(0, 8, 0).tokens.shape == (8, 64)
  valid = data.validation(4)['valid']
  assert len(np.unique(data.probe_tokens(4, 64), axis=0)) == 4
  # No row is in both splits.
  training = {row.tobytes() for row in _all(data._packed['train'], 'train')}
  assert not training & {row.tobytes() for row in _all(data._packed['valid'], 'valid')}
  if count < 3:
    assert 'too few documents' in data.remarks()[-1] and len(valid) > 0


def test_a_packed_dataset_brings_its_settings(corpus, tmp_path):
  out = str(tmp_path / 'out')
  config = _config(corpus, tokenizer=TrainedBpe(vocab_size=300), context=24, bos=True)
  open_packed(config, out)
  packed = DataConfig(source=PackedDataset(path=out))
  built = as_packed(packed)
  assert (built.context, built.bos, built.eos, built.tokenizer) == (24, True, True, config.tokenizer)
  assert as_packed(built) == built
  run, _ = completed(changed(Experiment(), {'data.source': packed.source, 'probe.length': 16}))
  assert (run.data.context, run.data.tokenizer, run.model_config().vocab_size) == (
      24, built.tokenizer, 300)
  for a, b in zip(open_data(packed).batch(3, 4, 0), open_data(config).batch(3, 4, 0), strict=True):
    np.testing.assert_array_equal(a, b)
  assert built.valid_fraction == 0.2
  for option, value in (('context', 25), ('eos', False), ('valid_fraction', 0.3),
                        ('tokenizer', TrainedBpe(vocab_size=301))):
    with pytest.raises(ValueError, match=f'was built with .*data.{option}='):
      as_packed(DataConfig(source=PackedDataset(path=out), **{option: value}))
  with pytest.raises(ValueError, match='choose another folder'):
    open_packed(_config(corpus, context=25), out)
  pair = dict(tokenizer=config.tokenizer, context=24, valid_source=corpus)
  open_packed(_config(corpus, **pair), f'{out}/pair')
  with pytest.raises(ValueError, match='not as the training text'):
    pair |= dict(context=12, valid_source=PackedDataset(path=f'{out}/pair/valid'))
    open_packed(_config(corpus, **pair))


def test_errors_name_what_to_change(tmp_path):
  files = {'empty/a.txt': '', 'text/a.txt': 'short', 'two/a/0.txt': 'x' * 20, 'two/b/0.txt': 'x' * 20,
           'one/valid/a.txt': 'x' * 99, 'chat.jsonl': '\n'.join(
      [json.dumps({'messages': [{'role': 'user', 'content': 'a' * 99}]})] * 9)}
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  for cls, name, words in (
      (TextFolder, 'empty', 'too few'), (TextFolder, 'text', 'data.context'),
      (TextFolder, 'two', 'no row for'), (TextFolder, 'one', "called 'valid'"), (PackedDataset, 'text', 'data_build'),
      (functools.partial(ChatJsonl, loss='answers'), 'chat.jsonl', 'no answer')):
    with pytest.raises(ValueError, match=words):
      open_data(_config(cls(path=str(tmp_path / name)), tokenizer=Bytes()))
