"""The paper's trials at the budget `desk`, in the order of the claims that are worth most.

python -m sink_jax.sweep --config=configs/desk.py --claims=emergence,key-biases --seeds=0,1,2 \\
  --workdir=runs/desk --processes=2

trains what these claims need, and without --claims all trials of the paper, first those of the
first claims below. On a GPU --batched trains all seeds of a trial at once.
"""

from ml_collections import ConfigDict

from configs import budget, paper
from sink_jax.paper.report import CLAIMS

# What carries the paper: the sink emerges, moves to what can take it, and goes with normalisation.
# The other claims follow in the order of the paper.
FIRST = ('emergence', 'key-biases', 'value-biases', 'no-normalisation', 'normalised', 'removal',
         'biases-massive', 'no-normalisation-massive', 'sigmoid-robust', 'learning-rate-delay')
_claims = sorted(CLAIMS, key=lambda claim: claim.key not in FIRST)
_claims.sort(key=lambda claim: FIRST.index(claim.key) if claim.key in FIRST else len(FIRST))
_names = dict.fromkeys(trial for claim in _claims for trial in claim.trials)
TRIALS = {name: paper.TRIALS[name] for name in (*_names, *paper.TRIALS) if name in paper.TRIALS}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument, budget='desk')
