"""Packing is concatenate-and-cut."""

import numpy as np
import pytest

from sink_jax.data.packing import ChunkWriter, Packer, delimited


@pytest.mark.parametrize('length', [1, 5, 64])
def test_packer_equals_concatenate_and_cut(length):
  random = np.random.default_rng(length)
  documents = [random.integers(0, 99, random.integers(0, 40)) for _ in range(50)]
  packer = Packer(length)
  chunks = np.concatenate([packer.add(d) for d in documents])
  stream = np.concatenate(documents)
  whole = len(stream) // length * length
  np.testing.assert_array_equal(chunks, stream[:whole].reshape(-1, length))
  assert packer.tokens == len(stream)


def test_delimiters():
  assert delimited(np.array([5, 6]), None, 0).tolist() == [5, 6, 0]
  assert delimited(np.array([5, 6]), 9, 0).tolist() == [9, 5, 6, 0]
  assert delimited(np.array([5, 6]), 9, None).tolist() == [9, 5, 6]
  assert delimited(np.array([5, 6]), None, None).tolist() == [5, 6]


@pytest.mark.parametrize('blocks', [[], [3, 0, 4], [1] * 30])
def test_writer_makes_an_ordinary_npy_file(tmp_path, blocks):
  writer = ChunkWriter(tmp_path / 'a.npy', 6, np.uint16)
  written = [np.full((n, 6), i) for i, n in enumerate(blocks)]
  for block in written:
    writer.write(block)
  writer.close()
  loaded = np.load(tmp_path / 'a.npy', mmap_mode='r')
  assert loaded.dtype == np.uint16 and writer.rows == sum(blocks)
  np.testing.assert_array_equal(loaded, np.concatenate(written + [np.zeros((0, 6))]))
