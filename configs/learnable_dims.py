"""K biases of which d_a dimensions are learned and the others zero (Table 13)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'learnable-dims-{d_a}': {'attention.kv_bias': f'KBias(learnable_dims={d_a})'}
          for d_a in (1, 2, 4, 8, 16, 32, 64)}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
