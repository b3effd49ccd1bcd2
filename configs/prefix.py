"""Prefix language models: all queries see the first p tokens (Section 6, Figure 5)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'prefix-{length}': {'attention.mask': f'Prefix(length={length})'}
          for length in (2, 3, 4, 5, 10)}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
