"""How long traffic takes on the links between the chips of a slice.

A group of devices uses the links of every dimension of the torus in which its members differ:
both directions where they close to a ring, else one. Groups that lie between each other
share them. Every hop of a ring adds its latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from sink_jax.plan.chips import HOP_SECONDS, Slice
from sink_jax.plan.hlo_cost import Collective


class Path(NamedTuple):
  """The links of a group of devices.

  bandwidth: bytes per second into a device. hops: links that data crosses one after another.
  """

  bandwidth: float
  hops: float


def axes_of(collective: Collective, mesh: Mesh) -> str:
  """The axes of the mesh along which the members of a group differ, such as 'data+fsdp'."""
  # Partition i of a program is the i-th device of its mesh, in the order of rows.
  indices = np.array(np.unravel_index(collective.group, mesh.devices.shape))
  return '+'.join(name for name, row in zip(mesh.axis_names, indices) if len(set(row)) > 1)


def path(group: Sequence[int], mesh: Mesh, where: Slice) -> Path:
  """The links that a group of partitions has; see the top of this file."""
  devices = mesh.devices.ravel()
  # Coordinates have three numbers on every TPU; the third of a two-dimensional torus is always 0.
  # The two cores of a v7x chip have the same.
  chips = {tuple(devices[i].coords)[:where.chip.dimensions] for i in group}
  # Traffic inside of a chip takes no link of the torus, and its time is left out.
  if len(chips) == 1:  # the cores of a chip
    return Path(math.inf, 0)
  bandwidths, hops = [], 0
  for dimension, extent in enumerate(where.shape):
    coordinates = sorted({chip[dimension] for chip in chips})
    if len(coordinates) == 1:
      continue
    stride = min(b - a for a, b in zip(coordinates, coordinates[1:]))
    ring = where.closed(dimension) and stride * len(coordinates) == extent
    # Members that lie `stride` apart leave room for as many groups, which share the links.
    bandwidths.append(where.chip.link * (2 if ring else 1) / stride)
    # The farthest member of a ring is half of it away, as data goes round both ways; on a line it
    # is the other end.
    hops += stride * (len(coordinates) // 2 if ring else len(coordinates) - 1)
  # A group that is not a box in the torus cannot use the links of all dimensions at a time.
  box = math.prod(len({c[d] for c in chips}) for d in range(len(where.shape))) == len(chips)
  return Path(sum(bandwidths) if box else min(bandwidths), hops)


def seconds(collective: Collective, mesh: Mesh, where: Slice) -> float:
  """Seconds that a collective takes in a step, all the times that it runs."""
  if len(collective.group) < 2:
    return 0.0
  links = path(collective.group, mesh, where)
  # The cores of a chip have its links in common.
  moved = collective.moved * where.chip.cores
  # An all-reduce goes round twice: partial sums, and then the sums.
  rounds = 2 if collective.kind == 'all-reduce' else 1
  return collective.count * (moved / links.bandwidth + rounds * links.hops * HOP_SECONDS)
