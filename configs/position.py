"""Position encodings (Table 3); rotary is the default.

`relative` adds the bucket number of the distance, as released: it grows with the distance.
`relative-decreasing` subtracts it, which is what Proposition 2 speaks of.
"""

from configs import budget

TRIALS = {
    'nope': {'attention.position': 'Nope()'},
    'absolute': {'attention.position': 'Sinusoidal()'},
    'learned': {'attention.position': 'Learned(max_length=2048)'},
    'relative': {'attention.position': 'Relative()'},
    'relative-decreasing': {'attention.position': 'Relative(decreasing=True)'},
    'alibi': {'attention.position': 'Alibi()'},
}


def get_config(argument=''):
  return budget.config(TRIALS, argument)
