"""Tokens drawn from the whole vocabulary at the first positions of every chunk (Section 5).

The last three are the paper's "more random tokens", whose number it does not give. They are
drawn from the tokenizer's vocabulary; protocol `released` draws below the padded one, 50432.
"""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {name: {'data.interventions': f'RandomTokens(first={first}, last={last})'}
          for name, first, last in (('random-1', 1, 1), ('random-1-2', 1, 2), ('random-2', 2, 2),
                                    ('random-1-4', 1, 4), ('random-1-16', 1, 16),
                                    ('random-1-64', 1, 64))}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
