"""The paper's trials at the budget `desk`, first those that carry the paper.

python -m sink_jax sweep --config=configs/desk.py --claims=emergence,key-biases --seeds=1,2,3 \\
  --workdir=runs/desk --processes=2

trains the trials that these claims need; without --claims it trains all of the paper, those of the
first claims below before the others. The search that found the budget (configs/baseline.py) chose
by seed 0, so that other seeds are to be reported.
"""

from ml_collections import ConfigDict

from configs import budget, paper
from sink_jax.paper.all_claims import CLAIMS, trials_of

# The sink emerges, moves to what can take it, and goes with normalisation.
FIRST = ('emergence', 'key-biases', 'value-biases', 'no-normalisation', 'normalised', 'removal',
         'biases-massive', 'no-normalisation-massive', 'sigmoid-robust', 'learning-rate-delay')
_ORDER = dict.fromkeys((*trials_of((*FIRST, *(claim.key for claim in CLAIMS))), *paper.TRIALS))
# Claims about the synthetic task name trials that are not the paper's.
TRIALS = {name: paper.TRIALS[name] for name in _ORDER if name in paper.TRIALS}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument, default='desk')
