"""Sigmoid without normalisation: weight decay and learning rate (Table 14 right)."""

from ml_collections import ConfigDict

from configs import attention_operation, budget

_SIGMOID = attention_operation.TRIALS['sigmoid']
TRIALS = {f'sigmoid-wd-{ratio:g}': _SIGMOID | {'optimizer.weight_decay': float(ratio)}
          for ratio in (0, 0.5, 1)}
TRIALS |= {f'sigmoid-lr-{name}': _SIGMOID | {'optimizer.learning_rate': float(name)}
           for name in ('1e-3', '1e-4')}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
