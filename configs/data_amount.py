"""Unique training tokens at equal steps (Section 5, Figure 5 right, Figure 28).

The default run sees all of its data, 5B tokens in the paper; `data-5b` sees so many of any data.
"""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'data-{name}': {'data.max_tokens': tokens} for name, tokens in (
    ('5b', 5_000_000_000), ('2.5b', 2_500_000_000), ('500m', 500_000_000),
    ('200m', 200_000_000), ('100m', 100_000_000), ('50m', 50_000_000))}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
