"""A learned sink token, and key and value biases per head (Table 4, Figure 7 middle)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {
    'sink-token': {'model.sink_tokens': 1},
    'kv-bias': {'attention.kv_bias': 'KVBias()'},
    'k-bias': {'attention.kv_bias': 'KBias()'},
    'v-bias': {'attention.kv_bias': 'VBias()'},
}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
