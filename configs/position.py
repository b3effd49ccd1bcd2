"""Position encodings (Table 3); rotary is the default.

`relative` adds the bucket number of the distance, which grows with it, as the official
implementation (sail-sg/Attention-Sink) does. `relative-decreasing` subtracts it: the bias that
Proposition 2 assumes.
"""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {
    'nope': {'attention.position': 'Nope()'},
    'absolute': {'attention.position': 'Sinusoidal()'},
    'learned': {'attention.position': 'Learned(max_length=2048)'},
    'relative': {'attention.position': 'Relative()'},
    'relative-decreasing': {'attention.position': 'Relative(decreasing=True)'},
    'alibi': {'attention.position': 'Alibi()'},
}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
