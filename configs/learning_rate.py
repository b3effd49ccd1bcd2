"""Learning rate and steps (Table 9, Figure 4 right)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {
    'lr-8e-4-10k': {'optimizer.learning_rate': 8e-4, 'steps': 10_000},
    'lr-8e-4': {'optimizer.learning_rate': 8e-4},
    'lr-2e-4': {'optimizer.learning_rate': 2e-4},
    'lr-2e-4-40k': {'optimizer.learning_rate': 2e-4, 'steps': 40_000},
    'lr-1e-4': {'optimizer.learning_rate': 1e-4},
    'lr-1e-4-80k': {'optimizer.learning_rate': 1e-4, 'steps': 80_000},
    # Only in the official implementation (sail-sg/Attention-Sink), whose steps are 20k and 80k.
    'lr-1e-3': {'optimizer.learning_rate': 1e-3},
    'lr-1e-5-80k': {'optimizer.learning_rate': 1e-5, 'steps': 80_000},
}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
