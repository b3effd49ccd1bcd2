"""Variants of each component on Bigram-Backcopy, which one layer with one head learns.

After a trigger the token before it comes again; everything else is a Markov chain. The head is
needed only at triggers, so a sink shows how it idles. A trial has the name of the paper's trial if
there is one; run it with --seeds=0,1,2.
"""

from ml_collections import ConfigDict

from configs import base, paper
from configs.base import attention
from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.mask import Window
from sink_jax.attention.per_token import QKNorm
from sink_jax.attention.position import Learned, Rope
from sink_jax.data.synthetic import BigramBackcopy
from sink_jax.train.optimizer import AdamW, Sgd

BACKCOPY = {
  'model.size': 'tiny',
  'model.layers': 1,
  'model.heads': 1,
  'model.ffn': 'relu',
  'model.ffn_hidden': 256,
  'model.dtype': 'float32',
  'attention.position': Learned(64),
  'data.source': BigramBackcopy(),
  'data.context': 64,
  'steps': 800,
  'batch_size': 32,
  'optimizer.learning_rate': 1e-3,
  'optimizer.schedule': 'constant',
  'optimizer.warmup_steps': 0,
  'optimizer.rule': AdamW(b2=0.99),
  'optimizer.weight_decay': 1e-4,
  'probe.every': 20,
  'validation.every': 200,
  'validation.batches': 20,
  'checkpoint_every': 0,
}

_VARIANTS = {
  'default': {},
  **paper.EXPERIMENTS['attention_operation'],
  **paper.EXPERIMENTS['normalization_scale'],
  **paper.EXPERIMENTS['biases'],
  **{
    name: paper.TRIALS[name]
    for name in (
      'softmax-p-half',
      'softmax-p-quarter',
      'softmax-p-2',
      'sigmoid-p-half',
      'sigmoid-p-2',
      'learnable-dims-1',
      'learnable-dims-4',
      'window-32',
      'prefix-2',
      'prefix-5',
      'weight-decay-0',
      'weight-decay-1',
      'post-norm',
    )
  },
  'sink-logit': attention(kv_bias=SinkLogit()),
  **paper.EXPERIMENTS['fixed_value'],
  'qk-norm': attention(qk_norm=QKNorm()),
  'window-8': attention(mask=Window(8)),
  **{name: changes for name, changes in paper.EXPERIMENTS['position'].items() if name != 'learned'},
  'rotary': attention(position=Rope()),
  'lr-3e-4': {'optimizer.learning_rate': 3e-4},
  'lr-3e-3': {'optimizer.learning_rate': 3e-3},
  'cosine': {'optimizer.schedule': 'cosine'},
  'beta2-0.95': {'optimizer.rule': AdamW(b2=0.95)},
  'weight-decay-0.1': {'optimizer.weight_decay': 0.1},
  'sgd': {'optimizer.rule': Sgd(), 'optimizer.learning_rate': 0.3},
  'tinyllama-init': {'model.init': 'tinyllama'},
  'no-norm': {'model.norm': 'none'},
  'no-ffn': {'model.ffn': 'none'},
  'ffn-swiglu': {'model.ffn': 'swiglu'},
  'heads-4': {'model.heads': 4},
  'heads-4-added': {'model.heads': 4, 'model.combine_heads': 'add'},
  'layers-2': {'model.layers': 2},
}
TRIALS = {f'synthetic-{name}': BACKCOPY | changes for name, changes in _VARIANTS.items()}


def get_config(argument: str = '') -> ConfigDict:
  return base.trial(TRIALS, argument, 'synthetic')
