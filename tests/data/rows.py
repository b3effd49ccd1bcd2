"""Rows of packed text, as tests compare them."""

import numpy as np
from numpy.testing import assert_array_equal


def all_rows(packed, split='train'):
  """The tokens of all rows of a split."""
  tokens, _ = packed.rows(split, np.arange(packed.size(split)))
  return tokens


def joined(batch):
  """Inputs and targets as the rows of C + 1 tokens that they were cut from."""
  return np.concatenate([batch.tokens, batch.targets[:, -1:]], 1)


def in_order(rows):
  """The rows sorted, to compare them as sets in which a row may occur twice."""
  return rows[np.lexsort(rows.T)]


def assert_same_batches(batch, other, rows=slice(None)):
  """`batch` equals these rows of the other, in tokens, targets and weights."""
  for part, whole in zip(batch, other, strict=True):
    assert_array_equal(part, whole[rows])
