"""Softmax whose rows sum to alpha (Table 14 left)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'scale-{alpha:g}': {'attention.normalizer': f'RowSum(scale={alpha})'}
          for alpha in (2.0, 0.2, 0.1, 0.05)}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
