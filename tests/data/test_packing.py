"""Packing is concatenate-and-cut, and a stream can be cut back to a commit."""

import numpy as np
import pytest

from sink_jax.data.packing import TokenStream, delimited, seal, write_npy


@pytest.mark.parametrize('length', [1, 5, 64])
def test_a_sealed_stream_equals_concatenate_and_cut(tmp_path, length):
  random = np.random.default_rng(length)
  documents = [random.integers(0, 99, random.integers(0, 40)) for _ in range(50)]
  path = tmp_path / 'a.npy'
  stream = TokenStream(path, length, np.uint16)
  for document in documents[:20]:
    stream.add(document)
  stream.commit()
  committed = stream.tokens
  for document in documents[::-1]:  # lost: the process is killed after this
    stream.add(np.tile(document, 9000))
  stream = TokenStream(path, length, np.uint16, committed)
  for document in documents[20:]:
    stream.add(document)
  stream.commit()
  joined = np.concatenate(documents)
  rows = len(joined) // length
  assert stream.tokens == len(joined)
  for _ in range(2):  # a process killed in between does it again
    seal(path, rows, length, np.uint16)
  loaded = np.load(path, mmap_mode='r')
  assert loaded.dtype == np.uint16
  np.testing.assert_array_equal(loaded, joined[:rows * length].reshape(rows, length))
  write_npy(tmp_path / 'b.npy', loaded)
  assert (tmp_path / 'b.npy').read_bytes() == path.read_bytes()


def test_a_stream_that_lost_tokens_or_has_two_writers_is_refused(tmp_path):
  stream = TokenStream(tmp_path / 'a.npy', 4, np.uint16)
  stream.add(np.arange(9))
  stream.commit()
  with pytest.raises(ValueError, match='fewer than'):
    TokenStream(tmp_path / 'a.npy', 4, np.uint16, 10)
  TokenStream(tmp_path / 'a.npy', 4, np.uint16, 5)
  stream.add(np.arange(3))
  with pytest.raises(ValueError, match='changed while it was written'):
    stream.commit()


def test_delimiters():
  assert delimited(np.array([5, 6]), None, 0).tolist() == [5, 6, 0]
  assert delimited(np.array([5, 6]), 9, 0).tolist() == [9, 5, 6, 0]
  assert delimited(np.array([5, 6]), 9, None).tolist() == [9, 5, 6]
  assert delimited(np.array([5, 6]), None, None).tolist() == [5, 6]
