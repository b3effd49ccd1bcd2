"""Feed-forward networks (Table 11); SwiGLU is the default."""

from configs import budget

TRIALS = {f'ffn-{name}': {'model.ffn': name}
          for name in ('relu', 'gelu', 'swish', 'reglu', 'geglu')}


def get_config(argument=''):
  return budget.config(TRIALS, argument)
