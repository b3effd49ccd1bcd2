"""How long traffic takes on the links between the chips of a slice.

A group of devices uses the links of every dimension of the torus in which its members differ:
both directions where they close to a ring, else one. Groups that lie between each other
share them. Every hop of a ring adds its latency.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sink_jax.plan.chips import HOP_SECONDS, Slice
from sink_jax.plan.hlo_cost import Collective


class Path(NamedTuple):
  """bandwidth: bytes per second into a device. hops: of a ring, one after another."""

  bandwidth: float
  hops: float


def axes_of(collective: Collective, mesh) -> str:
  """The axes of the mesh along which the members of a group differ, such as 'data+fsdp'."""
  places = np.array(np.unravel_index(collective.group, mesh.devices.shape))
  return '+'.join(name for name, row in zip(mesh.axis_names, places) if len(set(row)) > 1)


def path(group, mesh, where: Slice) -> Path:
  """The links that a group of partitions has."""
  devices = mesh.devices.ravel()
  chips = {tuple(devices[i].coords)[:where.chip.dimensions] for i in group}
  if len(chips) == 1:  # the cores of a chip
    return Path(math.inf, 0)
  bandwidths, hops = [], 0
  for dimension, extent in enumerate(where.shape):
    places = sorted({chip[dimension] for chip in chips})
    if len(places) == 1:
      continue
    stride = min(b - a for a, b in zip(places, places[1:]))
    ring = where.closed(dimension) and stride * len(places) == extent
    bandwidths.append(where.chip.link * (2 if ring else 1) / stride)
    hops += stride * (len(places) // 2 if ring else len(places) - 1)
  # A group that is not a box in the torus cannot use the links of all dimensions at a time.
  box = math.prod(len({c[d] for c in chips}) for d in range(len(where.shape))) == len(chips)
  return Path(sum(bandwidths) if box else min(bandwidths), hops)


def seconds(collective: Collective, mesh, where: Slice) -> float:
  """Of all its turns in a step."""
  if len(collective.group) < 2:
    return 0.0
  links = path(collective.group, mesh, where)
  # The cores of a chip have its links in common.
  moved = collective.moved * where.chip.cores
  rounds = 2 if collective.kind == 'all-reduce' else 1
  return collective.count * (moved / links.bandwidth + rounds * links.hops * HOP_SECONDS)
