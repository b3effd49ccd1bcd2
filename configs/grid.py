"""The grid by which the budgets desk and night choose their learning rate and weight decay.

  python -m sink_jax sweep --config=configs/grid.py --budget=desk --workdir=runs/grid/desk --processes=2
  python -m sink_jax sweep --config=configs/grid.py --budget=night --workdir=runs/grid/night \\
    --processes=2 --only="*-product-0.8"

The default trial, seed 0, at five learning rates and three products of rate, decay and steps: a tenth
of the paper's, the paper's 0.8, and ten times as much. The choice is the trial with the least
validation loss; configs/budget.py holds it. A night is too long for a grid: its trials here take a tenth
of its steps, with its warm-up, and the other products are tried only at the best rate.
"""

from ml_collections import ConfigDict

from configs import budget

_RATES = {name: float(name) for name in ('1e-3', '2e-3', '4e-3', '8e-3', '1.6e-2')}
_PRODUCTS = (0.08, 0.8, 8.0)
_VALUES = {f'rate-{name}-product-{product:g}': (rate, product)
           for product in _PRODUCTS for name, rate in _RATES.items()}
TRIALS = {name: {} for name in _VALUES}


def get_config(argument: str = '') -> ConfigDict:
  config = budget.config(TRIALS, argument, default='desk', task='grid')
  rate, product = _VALUES[argument.partition(',')[0]]
  values = config.to_dict()
  steps = values['steps'] // (10 if values['label']['budget'] == 'night' else 1)
  config.update_from_flattened_dict({
      'steps': steps, 'optimizer.learning_rate': rate, 'optimizer.weight_decay': product / rate / steps})
  return config
