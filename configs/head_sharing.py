"""K and KV biases that all heads of a layer share (Table 12 right)."""

from ml_collections import ConfigDict

from configs import budget

TRIALS = {
    'kv-bias-shared': {'attention.kv_bias': 'KVBias(shared=True)'},
    'k-bias-shared': {'attention.kv_bias': 'KBias(shared=True)'},
}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
