"""One token fixed at the first, second or third position of every chunk (Table 10 right)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'fixed-{position}': {'data.interventions': f'FixedToken(position={position})'}
          for position in (1, 2, 3)}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
