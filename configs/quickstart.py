"""The phenomenon in minutes on two CPU cores.

Byte-level language models on the Python standard library, a fixed token in front of
every sequence (Table 10 right): softmax and its two cures of Tables 4 and 6, and the
control, sigmoid with normalisation.
"""

from ml_collections import ConfigDict

from configs import base
from configs.base import attention
from sink_jax.attention.extra_key_value import KBias
from sink_jax.attention.normalizer import RowSum, Unnormalized
from sink_jax.attention.similarity import Sigmoid
from sink_jax.data.token_edits import FixedToken

_TEXT = {
  'model.size': 'tiny',
  'model.dtype': 'float32',
  'steps': 1200,
  'batch_size': 32,
  'data.context': 64,
  'data.interventions': (FixedToken(1),),
  'optimizer.learning_rate': 2e-2,
  'optimizer.weight_decay': 0.5,
  'probe.every': 50,
  'validation.every': 200,
  'validation.batches': 20,
  'checkpoint_every': 600,
}

TRIALS = {
  'text-softmax': _TEXT,
  'text-sigmoid': _TEXT | attention(similarity=Sigmoid(), normalizer=Unnormalized()),
  'text-sigmoid-normalized': _TEXT | attention(similarity=Sigmoid(), normalizer=RowSum(eps=1e-8)),
  'text-k-bias': _TEXT | attention(kv_bias=KBias()),
}


def get_config(name: str = '') -> ConfigDict:
  return base.trial(TRIALS, name, 'quickstart')
