"""The grid by which the budget desk chooses its learning rate.

  python -m sink_jax sweep --config=configs/grid.py --workdir=runs/grid --processes=2

The default trial, seed 0, at five learning rates, and at the paper's product of rate, decay and steps, 0.8.
The choice is the trial with the least validation loss; configs/budget.py holds it.
"""

from ml_collections import ConfigDict

from configs import budget

PRODUCT = 0.8
_RATES = ('1e-3', '2e-3', '4e-3', '8e-3', '1.6e-2')
TRIALS = {f'rate-{rate}': {} for rate in _RATES}


def get_config(argument: str = '') -> ConfigDict:
  config = budget.config(TRIALS, argument, default='desk', task='grid')
  rate = float(argument.partition(',')[0].removeprefix('rate-'))
  decay = PRODUCT / rate / config.to_dict()['steps']
  config.update_from_flattened_dict({
      'optimizer.learning_rate': rate, 'optimizer.weight_decay': decay})
  return config
