"""Sequences per batch, at equal steps (Table 10 left)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'batch-{size}': {'batch_size': size} for size in (128, 256, 1024)}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
