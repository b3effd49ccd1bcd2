"""K biases with a fixed value m v' or m v'' (Table 5, Figure 7 right)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'value-{value}-{norm}': {
    'attention.kv_bias': f"KBias(value='{value}', value_norm={float(norm)})"}
          for value in ('first', 'uniform') for norm in (1, 5, 20)}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
