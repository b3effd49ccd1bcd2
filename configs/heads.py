"""Number of heads, and heads whose outputs are added (Table 12 left)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'heads-{heads}': {'model.heads': heads} for heads in (4, 2, 1)} | {
    'heads-added': {'model.combine_heads': 'add'}}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
