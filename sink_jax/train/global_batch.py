"""From the rows that each process makes to batches that lie on all devices."""

from __future__ import annotations

import jax
import numpy as np

from sink_jax.train.sharding import batch_sharding


class GlobalBatches:
  """Puts batches of one size onto a mesh.

  rows: which rows of a global batch this process has to make, for its devices hold them.
    The rows of all processes are the batch of a single one, whatever the order of the
    devices in the mesh; processes whose devices share rows make the same.
  """

  def __init__(self, mesh, batch_size: int):
    self._sharding, self._batch_size = batch_sharding(mesh), batch_size
    held = self._sharding.addressable_devices_indices_map((batch_size,)).values()
    self.rows = np.unique(np.concatenate([np.arange(batch_size)[part] for part, in held]))

  def put(self, batch):
    """This process's rows of a batch -> the global batch, spread over the mesh."""
    return jax.tree.map(self._global, batch)

  def _global(self, x):
    def part(index):
      start, stop, _ = index[0].indices(self._batch_size)
      first = np.searchsorted(self.rows, start)
      return x[first:first + stop - start]

    return jax.make_array_from_callback(
        (self._batch_size, *x.shape[1:]), self._sharding, part)
