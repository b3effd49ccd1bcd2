"""Every kind of variant on Bigram-Backcopy: one layer, one head, one thing to do.

After a trigger the token before it comes again; everything else is a Markov chain. The head
has work at triggers only, so a sink tells how it rests. Names are those of the paper's
trials where there is one; run it with --seeds=0,1,2.
"""

from ml_collections import ConfigDict

from configs import base, paper, quickstart

_BACKCOPY = quickstart.TRIALS['backcopy-softmax'] | {
    'batch_size': 32,
    'probe.every': 20,
    'checkpoint_every': 0,
}


def _attention(**components: str) -> dict[str, str]:
  return {f'attention.{name}': value for name, value in components.items()}


_SIGMOID = dict(similarity='Sigmoid()')
_VARIANTS = {
    'default': {},
    **paper.EXPERIMENTS['attention_operation'],
    **paper.EXPERIMENTS['normalization_scale'],
    'softmax-p-half': _attention(normalizer='PNorm(p=0.5)'),
    'softmax-p-quarter': _attention(normalizer='PNorm(p=0.25)'),
    'softmax-p-2': _attention(normalizer='PNorm(p=2.0)'),
    'sigmoid-p-half': _attention(**_SIGMOID, normalizer='PNorm(p=0.5)'),
    'sigmoid-p-2': _attention(**_SIGMOID, normalizer='PNorm(p=2.0)'),
    **paper.EXPERIMENTS['biases'],
    'sink-logit': _attention(kv_bias='SinkLogit()'),
    'learnable-dims-1': _attention(kv_bias='KBias(learnable_dims=1)'),
    'learnable-dims-4': _attention(kv_bias='KBias(learnable_dims=4)'),
    **paper.EXPERIMENTS['fixed_value'],
    'qk-norm': _attention(qk_norm='QKNorm()'),
    'window-8': _attention(mask='Window(size=8)'),
    'window-32': _attention(mask='Window(size=32)'),
    'prefix-2': paper.TRIALS['prefix-2'],
    'prefix-5': paper.TRIALS['prefix-5'],
    **{name: changes for name, changes in paper.EXPERIMENTS['position'].items() if name != 'learned'},
    'rotary': _attention(position='Rope()'),
    'lr-3e-4': {'optimizer.learning_rate': 3e-4},
    'lr-3e-3': {'optimizer.learning_rate': 3e-3},
    'cosine': {'optimizer.schedule': 'cosine'},
    'beta2-0.95': {'optimizer.rule': 'AdamW(b1=0.9, b2=0.95, eps=1e-08)'},
    'weight-decay-0': {'optimizer.weight_decay': 0.0},
    'weight-decay-0.1': {'optimizer.weight_decay': 0.1},
    'weight-decay-1': {'optimizer.weight_decay': 1.0},
    'sgd': {'optimizer.rule': 'Sgd(momentum=0.0)', 'optimizer.learning_rate': 0.3},
    'tinyllama-init': {'model.init': 'tinyllama'},
    'post-norm': {'model.norm_location': 'post'},
    'no-norm': {'model.norm': 'none'},
    'no-ffn': {'model.ffn': 'none'},
    'ffn-swiglu': {'model.ffn': 'swiglu'},
    'heads-4': {'model.heads': 4},
    'heads-4-added': {'model.heads': 4, 'model.combine_heads': 'add'},
    'layers-2': {'model.layers': 2},
}
TRIALS = {f'synthetic-{name}': _BACKCOPY | changes for name, changes in _VARIANTS.items()}


def get_config(argument: str = '') -> ConfigDict:
  return base.trial(TRIALS, argument, 'synthetic')
