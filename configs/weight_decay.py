"""Weight decay (Table 2); 10 is in the official implementation alone."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'weight-decay-{ratio:g}': {'optimizer.weight_decay': float(ratio)}
          for ratio in (0, 0.001, 0.01, 0.5, 1, 2, 5, 10)}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
