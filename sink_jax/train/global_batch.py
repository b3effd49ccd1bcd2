"""From the rows that each process makes to batches that lie on all devices."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from sink_jax.train.sharding import batch_sharding

_Arrays = TypeVar('_Arrays')  # a tree of arrays, such as a Batch


class GlobalBatches:
  """Puts batches of one size onto a mesh.

  rows: which rows of a global batch this process has to make, for its devices hold them.
    The rows of all processes are the batch of a single one, whatever the order of the
    devices in the mesh; processes whose devices share rows make the same.
  """

  def __init__(self, mesh: Mesh, batch_size: int):
    self._sharding, self._batch_size = batch_sharding(mesh), batch_size
    all_rows = np.arange(batch_size)
    indices = self._sharding.addressable_devices_indices_map((batch_size,)).values()
    # Unique: the devices of a tensor group all have the same rows.
    self.rows = np.unique(np.concatenate([all_rows[i] for i in indices if i is not None]))

  def make_global_batch(self, batch: _Arrays) -> _Arrays:
    """This process's rows of a batch -> the global batch, spread over the mesh."""
    return jax.tree.map(self._to_global, batch)

  def _to_global(self, x: np.ndarray) -> jax.Array:
    def part(index: Any) -> np.ndarray:
      # JAX asks for rows by their numbers in the global batch; x has those of `rows` alone.
      start, stop, _ = index[0].indices(self._batch_size)
      # `rows` is sorted and holds each such range whole, so its rows lie one after the other in x.
      first = np.searchsorted(self.rows, start)
      return x[first:first + stop - start]

    # Each process hands over what its own devices hold: no rows travel between processes.
    return jax.make_array_from_callback(
        (self._batch_size, *x.shape[1:]), self._sharding, part)
