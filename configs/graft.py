"""SmolLM2-135M-Instruct with another attention, trained further: does its sink move?

  python -m sink_jax sweep --config=configs/graft.py --seeds=0,1,2 --workdir=runs/graft \\
    --processes=2
  python -m sink_jax report --runs=runs/graft --out=report

A trial takes 400 steps of 512 tokens, an hour of one CPU core, on Python's standard library, which
resembles the model's training text. All parameters are trained; in the trials `only-*`, only those
that the model lacks. `continued` is the control: the unchanged model, trained further in the same
way. In the trials `random-*` every sequence begins with a random token. The seed decides the order
of the data and the initial values of new parameters.
"""

from ml_collections import ConfigDict

from configs import base
from configs.base import attention
from sink_jax.attention.extra_key_value import KBias, KVBias, SinkLogit, ZeroSink
from sink_jax.attention.head import HeadGate
from sink_jax.attention.normalizer import RowSum
from sink_jax.attention.position import Rope
from sink_jax.attention.similarity import Sigmoid
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.token_edits import RandomTokens

_TUNED = {
  'init.source': 'SmolLM2-135M-Instruct',
  'data.source': Stdlib(),
  'data.context': 128,
  'attention.position': Rope(100000.0),  # as in SmolLM2
  'data.valid_fraction': 0.05,
  'model.dtype': 'float32',
  'steps': 400,
  'batch_size': 4,
  'optimizer.learning_rate': 1e-4,
  'optimizer.schedule': 'constant',  # all steps have one rate
  'optimizer.warmup_steps': 20,
  'optimizer.weight_decay': 0.0,
  'probe.every': 20,
  'probe.sequences': 32,
  'validation.every': 50,
  'validation.batches': 20,
  'checkpoint_every': 100,
  'checkpoints_kept': 1,
}
_GRAFTS = {
  'gate': attention(head=HeadGate(scale=2.0)),  # gates that start at one
  'k-bias': attention(kv_bias=KBias()),
  'kv-bias': attention(kv_bias=KVBias()),
  'sink-logit': attention(kv_bias=SinkLogit()),
  'zero-sink': attention(kv_bias=ZeroSink()),  # off by one
  'sigmoid-normalized': attention(similarity=Sigmoid(), normalizer=RowSum(eps=1e-8)),
}
_NEW_ONLY = {'init.train': 'new', 'optimizer.learning_rate': 1e-2}
TRIALS = {'continued': _TUNED} | {
  f'graft-{name}': _TUNED | {'init.graft': 'identity'} | changes
  for name, changes in _GRAFTS.items()
}
TRIALS |= {
  f'only-{name}': TRIALS[f'graft-{name}'] | _NEW_ONLY
  for name in ('k-bias', 'kv-bias', 'sink-logit', 'gate')
}
_RANDOM = {'data.interventions': (RandomTokens(),)}
TRIALS |= {
  'random-continued': TRIALS['continued'] | _RANDOM,
  'random-kv-bias': TRIALS['graft-kv-bias'] | _RANDOM,
}


def get_config(name: str = '') -> ConfigDict:
  return base.trial(TRIALS, name, 'graft')
