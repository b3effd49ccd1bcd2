"""Window attention (Section 6, Figure 6)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'window-{size}': {'attention.mask': f'Window(size={size})'}
          for size in (32, 64, 128, 256, 512, 1024)}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
