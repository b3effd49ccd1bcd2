"""Every remedy against sinks that the field has proposed, some of them combined, on three tasks.

  python -m sink_jax sweep --config=configs/remedies.py --seeds=0,1,2,3,4 --workdir=runs/remedies \\
    --processes=2
  python -m sink_jax report --runs=runs/remedies --out=report

A trial is TASK-VARIANT. The tasks: `trigger`, an average that one token in sixteen has to report
(after 2603.11487), with only attention; `bigram`, Bigram-Backcopy with one block (after
2410.13835); `lm`, language modelling at a budget, desk by default; the others have one size. Both
tasks that are not text have four heads: with one, no number of seeds would show that a rate of
heads has not changed. Variants of a norm are left out if the model has none. Other update rules
keep b2 of the task's AdamW.
"""

import math
from typing import Any

from ml_collections import ConfigDict

from configs import base, paper, synthetic
from configs import budget as budgets
from configs.base import attention
from sink_jax.attention.extra_key_value import PseudoMask, SinkLogit, ZeroSink
from sink_jax.attention.head import ElementGate, Exclusive, HeadGate, HeadNorm
from sink_jax.attention.mask import Window
from sink_jax.attention.normalizer import AbsSum, Clipped, Count, Unnormalized
from sink_jax.attention.per_token import LogLength, QKNorm, ValueScale
from sink_jax.attention.position import Nope
from sink_jax.attention.similarity import Relu, Sigmoid, Softpick, SquaredRelu
from sink_jax.data.synthetic import TriggerAveraging
from sink_jax.train.config import as_config_dict, changed
from sink_jax.train.optimizer import AdamW, Muon, OrthoAdam

_TRIGGER = {
  'model.size': 'tiny',
  'model.layers': 1,
  'model.ffn': 'none',
  'model.norm': 'none',
  'model.dtype': 'float32',
  'attention.position': Nope(),
  'data.source': TriggerAveraging(),
  'data.context': 16,
  'probe.length': 16,
  'batch_size': 128,
  'steps': 1500,
  'optimizer.rule': AdamW(b2=0.999),
  'optimizer.learning_rate': 3e-3,
  'optimizer.schedule': 'constant',
  'optimizer.warmup_steps': 0,
  'optimizer.weight_decay': 0.0,
  'probe.every': 100,
  'validation.every': 500,
  'checkpoint_every': 0,
}
_BACKCOPY = synthetic.BACKCOPY | {'model.heads': 4, 'batch_size': 64, 'probe.every': 40}

_QK_NORM = attention(qk_norm=QKNorm())
_SINK_LOGIT = attention(kv_bias=SinkLogit())
_ZERO_SINK = attention(kv_bias=ZeroSink())
_HEAD_GATE = attention(head=HeadGate())
_SSNORM = {'model.norm': 'single'}


def _of_length(length: int) -> dict[str, dict[str, Any]]:
  """Variants whose numbers depend on the tokens T of a sequence.

  -log T is the bias of Apple's sigmoid, and -12/T the low end of the clipped softmax that its paper
  chose for OPT-125M. A window is a quarter of the sequence.
  """
  return {
    'sigmoid-bias': attention(similarity=Sigmoid(-math.log(length)), normalizer=Unnormalized()),
    'clipped': attention(normalizer=Clipped(low=-12 / length)),
    'pseudo-mask': attention(kv_bias=PseudoMask(length)),
    'sink-logit-window': _SINK_LOGIT | attention(mask=Window(length // 4)),
  }


def _of_rule(b2: float) -> dict[str, dict[str, Any]]:
  """Other update rules, with b2 of the AdamW of the task."""
  ortho_adam = {'optimizer.rule': OrthoAdam(b2=b2)}
  muon = {'optimizer.rule': Muon(b2=b2)}
  return {
    'muon': muon,
    'ssnorm-muon': _SSNORM | muon,
    'orthoadam': ortho_adam,
    'zero-sink-orthoadam': _ZERO_SINK | ortho_adam,
  }


VARIANTS: dict[str, dict[str, Any]] = {
  'softmax': {},
  # An extra key, or a token, that can take the attention.
  'sink-logit': _SINK_LOGIT,
  'zero-sink': _ZERO_SINK,
  'k-bias': paper.TRIALS['k-bias'],
  'kv-bias': paper.TRIALS['kv-bias'],
  'v-bias': paper.TRIALS['v-bias'],
  'sink-token': paper.TRIALS['sink-token'],
  # Rows that need not sum to one.
  'sigmoid': paper.SIGMOID,
  'sigmoid-normalized': paper.TRIALS['sigmoid-normalized'],
  'relu': attention(similarity=Relu(), normalizer=Count()),
  'squared-relu': attention(similarity=SquaredRelu(), normalizer=Count()),
  'softpick': attention(similarity=Softpick(), normalizer=AbsSum()),
  # Scores of another size.
  'qk-norm': _QK_NORM,
  'log-length': attention(temperature=LogLength()),
  'log-length-fixed': attention(temperature=LogLength(learned=False)),
  # Outputs of heads, and values.
  'head-gate': _HEAD_GATE,
  'element-gate': attention(head=ElementGate()),
  'value-gate': attention(head=HeadGate(source='value')),
  'slice-gate': attention(head=HeadGate(source='slice', opening=0.25)),
  'head-gate-qk-norm': _HEAD_GATE | _QK_NORM,
  'head-norm': attention(head=HeadNorm()),
  'xsa': attention(head=Exclusive()),
  'value-scale': attention(value=ValueScale()),
  # Norms and blocks.
  'ssnorm': _SSNORM,
  'dyt': {'model.norm': 'dyt'},
  'post-norm': {'model.norm_location': 'post'},
  'sandwich': {'model.norm_location': 'sandwich'},
  'protected': _QK_NORM | {'model.norm_location': 'protected', 'model.init': 'torch_default'},
  'sigma-reparam': {'model.linear': 'sigma_reparam'},
}
# Without a norm in the model these would compare a norm with none, and not with RMSNorm.
_OF_NORMS = ('ssnorm', 'dyt', 'post-norm', 'sandwich', 'protected', 'ssnorm-muon')
# {task: (its settings, T, b2)}; T of language modelling is the paper's, until a budget changes it.
_TASKS: dict[str, tuple[dict[str, Any], int, float]] = {
  'trigger': (_TRIGGER, 16, 0.999),
  'bigram': (_BACKCOPY, 64, 0.99),
  'lm': ({}, 2048, 0.95),
}
TRIALS = {
  f'{task}-{variant}': settings | changes
  for task, (settings, length, b2) in _TASKS.items()
  for variant, changes in (VARIANTS | _of_rule(b2) | _of_length(length)).items()
  if task != 'trigger' or variant not in _OF_NORMS
}


def get_config(name: str = '', budget: str = 'desk', protocol: str = 'paper') -> ConfigDict:
  task, _, variant = name.partition('-')
  if task != 'lm':
    return base.trial(TRIALS, name, task)  # which have one size
  run = budgets.experiment(TRIALS, name, budget, protocol, task=task)
  return as_config_dict(changed(run, _of_length(run.data.context).get(variant, {})))
