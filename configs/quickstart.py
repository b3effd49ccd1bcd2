"""The phenomenon in minutes on two CPU cores.

Byte-level language models on the Python standard library, a fixed token in front of
every sequence (Table 10 right): softmax and its two cures of Tables 4 and 6, and the
control, sigmoid with normalisation.
"""

from ml_collections import ConfigDict

from configs import base

_TEXT = {
    'model.size': 'tiny',
    'model.dtype': 'float32',
    'steps': 1200,
    'batch_size': 32,
    'data.context': 64,
    'data.interventions': 'FixedToken(position=1)',
    'optimizer.learning_rate': 2e-2,
    'optimizer.weight_decay': 0.5,
    'probe.every': 50,
    'validation.every': 200,
    'validation.batches': 20,
    'checkpoint_every': 600,
}
_SIGMOID = {'attention.similarity': 'Sigmoid()', 'attention.normalizer': 'Unnormalized()'}

TRIALS = {
    'text-softmax': _TEXT,
    'text-sigmoid': _TEXT | _SIGMOID,
    'text-sigmoid-normalized': _TEXT | {
        'attention.similarity': 'Sigmoid()', 'attention.normalizer': 'RowSum(eps=1e-8)'},
    'text-k-bias': _TEXT | {'attention.kv_bias': 'KBias()'},
}


def get_config(name: str = '') -> ConfigDict:
  return base.trial(TRIALS, name, 'quickstart')
