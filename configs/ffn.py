"""Feed-forward networks (Table 11); SwiGLU is the default."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {f'ffn-{name}': {'model.ffn': name}
          for name in ('relu', 'gelu', 'swish', 'reglu', 'geglu')}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
