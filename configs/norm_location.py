"""Post-norm blocks (Section 7.2, Figure 7 left)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {'post-norm': {'model.norm_location': 'post'}}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
