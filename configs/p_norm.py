"""p-normalised softmax and sigmoid (Equations 43 and 44, Figure 29).

The text gives p for softmax alone; the p of sigmoid are in the figure only, so sigmoid has the same
here.
"""

from ml_collections import ConfigDict

from configs import budget

_P = {'quarter': 0.25, 'third': 1 / 3, 'half': 0.5, '2': 2.0, '3': 3.0, '4': 4.0}
_SIMILARITIES = {'softmax': {}, 'sigmoid': {'attention.similarity': 'Sigmoid()'}}
TRIALS = {f'{name}-p-{word}': similarity | {'attention.normalizer': f'PNorm(p={p})'}
          for name, similarity in _SIMILARITIES.items() for word, p in _P.items()}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
