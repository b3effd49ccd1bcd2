"""The base of everything a run can learn from."""

from __future__ import annotations

import dataclasses

from sink_jax.component import Component


@dataclasses.dataclass(frozen=True)
class Source(Component):
  """A document corpus or a synthetic task: `from_string(Source, 'Stdlib()')` takes either."""
