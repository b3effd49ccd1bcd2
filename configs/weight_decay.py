"""Weight decay (Table 2); 10 is in the release alone."""

from configs import budget

TRIALS = {f'weight-decay-{ratio:g}': {'optimizer.weight_decay': float(ratio)}
          for ratio in (0, 0.001, 0.01, 0.5, 1, 2, 5, 10)}


def get_config(argument=''):
  return budget.config(TRIALS, argument)
