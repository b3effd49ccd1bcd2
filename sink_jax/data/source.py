"""The base of everything a run can learn from."""

from __future__ import annotations

import dataclasses

from sink_jax.component import Slot


@dataclasses.dataclass(frozen=True)
class Source(Slot):
  """A document corpus or a synthetic task: `build(Source, 'Stdlib()')` takes either."""
