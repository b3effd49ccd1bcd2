"""The default run of Section 4: Figure 4 (middle), and the baseline of every table."""

from configs import budget

TRIALS = {'default': {}}


def get_config(argument='default'):
  return budget.config(TRIALS, argument)
