"""Where sinks emerge in the 60M model, where not, and where they go; each trial takes minutes on
one GPU.

Batches of 32k tokens, 32 times fewer than the paper's, and contexts a quarter as long, for 4,000
steps on the sources of the installed packages: no download. That is little text, seen more than
once, and too little data hides the sink (Figure 5 right), so the report says how often. The most
important trials come first, for a machine that is available for half an hour.
"""

from ml_collections import ConfigDict

from configs import base, budget, paper
from sink_jax.data.stdlib import InstalledPackages
from sink_jax.data.tokenizer import TrainedBpe

_SHORT = budget.PROTOCOLS['paper'] | {
  'data.source': InstalledPackages(),
  'data.tokenizer': TrainedBpe(8192),
  'data.context': 512,
  'batch_size': 64,
  'steps': 4000,
  'optimizer.learning_rate': 1e-3,
  'checkpoint_every': 500,
  'checkpoints_kept': 1,
  'probe.every': 50,
  'validation.every': 500,
  'validation.batches': 20,
}
_TRIALS = {
  'default': {},
  'fixed-1': paper.TRIALS['fixed-1'],
  'sigmoid': paper.SIGMOID,
  'k-bias': paper.TRIALS['k-bias'],
  'window-32': paper.TRIALS['window-32'],
}
TRIALS = {f'emergence-{name}': _SHORT | changes for name, changes in _TRIALS.items()}


def get_config(argument: str = '') -> ConfigDict:
  return base.trial(TRIALS, argument, 'emergence')
