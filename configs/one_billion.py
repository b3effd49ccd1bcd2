"""The 1B models: softmax, and sigmoid without normalisation (Section 7.4, Figure 8 right)."""

from ml_collections import ConfigDict

from configs import attention_operation, budget

_LARGE = {'model.size': '1b', 'steps': 40_000}
TRIALS = {
    '1b-softmax': _LARGE,
    '1b-sigmoid': _LARGE | attention_operation.TRIALS['sigmoid'],
}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
