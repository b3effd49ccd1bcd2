"""The grid by which the budget desk chooses its learning rate.

  python -m sink_jax sweep --config=configs/grid.py --workdir=runs/grid --processes=2

The default trial, seed 0, at five learning rates, and at the paper's product of rate, decay and
steps, 0.8. The choice is the trial with the least validation loss; configs/budget.py holds it.
"""

from ml_collections import ConfigDict

from configs import budget as budgets
from sink_jax.train.config import as_config_dict, changed

PRODUCT = 0.8
_RATES = {f'rate-{rate}': float(rate) for rate in ('1e-3', '2e-3', '4e-3', '8e-3', '1.6e-2')}
TRIALS = dict.fromkeys(_RATES, {})


def get_config(name: str = '', budget: str = 'desk', protocol: str = 'paper') -> ConfigDict:
  run = budgets.experiment(TRIALS, name, budget, protocol, task='grid')
  rate = _RATES[name]  # of the budget, whatever the paper's is
  decay = PRODUCT / rate / run.steps
  return as_config_dict(
    changed(run, {'optimizer.learning_rate': rate, 'optimizer.weight_decay': decay})
  )
