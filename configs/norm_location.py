"""Post-norm blocks (Section 7.2, Figure 7 left)."""

from configs import budget

TRIALS = {'post-norm': {'model.norm_location': 'post'}}


def get_config(argument=''):
  return budget.config(TRIALS, argument)
