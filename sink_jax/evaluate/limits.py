"""The largest importance that a mask leaves the first token, and what to say where it is small.

The divisor of an importance counts all queries. Where a window hides the first token from most of
them, its importance stays below the threshold whatever the model does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sink_jax.models.config import ModelConfig


def first_token_limits(config: ModelConfig, length: int) -> list[float]:
  """The importance of the first of `length` tokens in each block with attention, at most.

  It is the share of queries that see the token.
  """
  queries = np.arange(length)
  period = len(config.pattern)
  masks = [config.attention_of(config.pattern[layer % period]).mask
           for layer in config.attention_layers]
  share = {mask: float(np.mean(np.broadcast_to(mask.keep(queries, 0), length)))
           for mask in set(masks)}
  return [share[mask] for mask in masks]


def limit_note(limits: Sequence[float], length: int, epsilon: float) -> str:
  """A line about the blocks that cannot have a sink on the first token; '' where all can."""
  below = [limit for limit in limits if limit <= epsilon]
  if not below:
    return ''
  where = ('every block' if len(below) == len(limits) else f'{len(below)} of {len(limits)} blocks')
  return (f'Sink_1 is 0 by construction in {where}: at most {100 * max(below):.0f} % of {length} '
          f'queries see the first token there, and a sink needs more than {epsilon:g}; take shorter '
          'sequences')
