"""Rows of packed folders: their bytes, their order, what is read of them, damage, prompts."""

import shutil
import struct
import zlib
from unittest import mock

import numpy as np
import pytest
from etils import epath
from numpy.testing import assert_array_equal

from sink_jax.data import build
from sink_jax.data.dataset import DataConfig, open_data, open_packed
from sink_jax.data.packed import SPLITS, Packed
from tests.data.conftest import write_corpus
from tests.data.rows import all_rows, in_order

_SIZE = 2 * 17 + 4  # bytes of a row


def _expected(documents, source, domain, split, bos, eos):
  """Concatenate-and-cut, independent of the package: rows, and the tokens before the cut."""
  stream = []
  for document in documents:
    held_out = source.held_out(document.name, 0.2)
    if document.domain == domain and held_out == (split == 'valid'):
      ids = [2 + byte for byte in document.text.encode()]
      stream += [0] * bos + ids + [0] * eos
  rows = len(stream) // 17
  return np.array(stream[: rows * 17]).reshape(rows, 17), len(stream)


@pytest.mark.parametrize(
  'bos, eos, characters',
  [(False, True, 1 << 26), (True, True, 1), (False, False, 1 << 26), (True, False, 1 << 26)],
)
def test_rows_are_the_joined_documents_of_each_shard(
  config, corpus, bos, eos, characters, monkeypatch
):
  monkeypatch.setattr(build, 'SHARD_CHARACTERS', characters)
  packed, _ = open_packed(config(bos=bos, eos=eos))
  documents = list(corpus.documents())
  groups = [[document] for document in documents] if characters == 1 else [documents]
  assert len(packed.manifest['shards']) == len(groups)
  for split in SPLITS:
    rows = all_rows(packed, split)
    for d, domain in enumerate(packed.domains):
      parts = [_expected(group, corpus, domain, split, bos, eos) for group in groups]
      start, stop = packed.bounds[split][d : d + 2]
      assert_array_equal(rows[start:stop], np.concatenate([part for part, _ in parts]))
      counts = packed.counts()[domain][split]
      assert counts['rows'] == stop - start

      # The count includes tokens that a shard drops because they do not fill a row.
      assert counts['tokens'] == sum(tokens for _, tokens in parts)
  held_out = sum(corpus.held_out(document.name, 0.2) for document in documents[:60])
  counts = [packed.counts()['prose'][split]['documents'] for split in SPLITS]
  assert counts == [60 - held_out, held_out]


def test_a_file_is_its_rows_one_after_another_each_with_its_crc(packed):
  rows, files = [], sorted(packed.folder.glob('*.bin'))
  assert len(files) == 8
  for path in files:
    data = path.read_bytes()
    for at in range(0, len(data), _SIZE):
      *tokens, check = struct.unpack_from('<17HI', data, at)
      assert check == zlib.crc32(data[at : at + _SIZE - 4])
      rows.append(tokens)
  stored = np.concatenate([all_rows(packed, split) for split in SPLITS])
  assert_array_equal(in_order(np.array(rows)), in_order(stored))
  assert_array_equal(rows[0], stored[0])


def _in_a_store(folder):
  """The folder as the code sees one in an object store."""
  return Packed(epath.Path(folder))


def test_rows_in_any_order_and_from_a_store_by_one_request_each(packed):
  whole = all_rows(packed)
  numbers = np.random.default_rng(0).integers(0, len(whole), 200)
  assert_array_equal(packed.rows('train', numbers)[0], whole[numbers])
  store = _in_a_store(packed.folder)
  requests = store._store.cat_ranges
  with mock.patch.object(store._store, 'cat_ranges', wraps=requests) as asked:
    assert_array_equal(store.rows('train', numbers)[0], whole[numbers])
  [call] = asked.mock_calls
  _, begins, ends = call.args
  assert_array_equal(np.subtract(ends, begins), [_SIZE] * 200)


def _flipped(at):
  return lambda data: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@pytest.mark.parametrize('open_folder', [Packed, _in_a_store])
@pytest.mark.parametrize(
  'damage, rows',
  [
    (_flipped(7 * _SIZE + 20), [7]),  # a token
    (lambda data: data[: -_SIZE - 1], [-2, -1]),  # torn
    (lambda data: bytes(_SIZE) + data[_SIZE:], [0]),  # a hole
    (lambda data: data[_SIZE : 2 * _SIZE - 1] + data[: 1 - _SIZE], slice(None)),  # shifted
    (None, slice(None)),  # missing
  ],
)
def test_every_damaged_row_is_named_with_its_file(packed, tmp_path, open_folder, damage, rows):
  path = shutil.copytree(packed.folder, tmp_path / 'copy') / '00002.bin'
  data = path.read_bytes()
  path.unlink()
  if damage:
    path.write_bytes(damage(data))
  copy, errors = open_folder(path.parent), []
  for split in SPLITS:
    for number, row in enumerate(all_rows(packed, split)):
      try:
        tokens, _ = copy.rows(split, np.array([number]))
        assert_array_equal(tokens[0], row)
      except ValueError as error:
        errors.append(str(error).partition(' is missing or damaged. Delete')[0])
  damaged = np.arange(len(data) // _SIZE)[rows]
  assert sorted(errors) == sorted(f'{path}: row {row}' for row in damaged)


@pytest.mark.parametrize('count, letters', [(1, 40_000), (60, 3000)])
def test_a_few_documents_are_enough(tmp_path, count, letters):
  """Users often have few documents, all in one split or shorter than the probe."""
  source = write_corpus(tmp_path, letters=(letters, letters + 1), text=count)
  data = open_data(DataConfig(source=source, context=64))
  assert data.batch(0, 8, 0).tokens.shape == (8, 64)
  assert len(np.unique(data.probe_tokens(4, 64), axis=0)) == 4
  assert len(data.remarks()) == (count == 1)
  assert all('too few documents' in remark for remark in data.remarks())

  # No row is in both splits, or in none.
  rows = np.concatenate([all_rows(data._packed[split], split) for split in SPLITS])
  counts = data._packed['train'].counts()['text']
  assert len(rows) == sum(counts[split]['rows'] for split in SPLITS)
  assert len(np.unique(rows, axis=0)) == len(rows)
  assert data.validation(4)['valid']
