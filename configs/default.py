"""The default run of Section 4: Figure 4 (middle), and the baseline of every table."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {'default': {}}


def get_config(argument: str = 'default') -> ConfigDict:
  return budget.config(TRIALS, argument)
