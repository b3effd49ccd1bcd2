"""Every remedy against attention sinks that the field has proposed, each alone, on three tasks.

  python -m sink_jax.sweep --config=configs/remedies.py --seeds=0,1,2,3,4 --workdir=runs/remedies \\
    --processes=2 --only=NAMES
  python -m sink_jax.report --kind=leaderboard --runs=runs/remedies --out=results/leaderboard

A trial is TASK-VARIANT. The tasks: `trigger`, an average that one token in sixteen has to report
(after 2603.11487), with attention alone; `backcopy`, Bigram-Backcopy with one block (after
2410.13835); `desk`, text at the budget of that name. Both tasks that are not text have four heads:
with one, no number of seeds would show that a rate of heads has not changed. What a variant has no
meaning for is left out (a norm where the model has none).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import attention_operation, base, biases, budget, quickstart


def _attention(**components: str) -> dict[str, str]:
  return {f'attention.{name}': value for name, value in components.items()}


_TRIGGER = {
    'model.size': 'tiny', 'model.layers': 1, 'model.ffn': 'none', 'model.norm': 'none',
    'model.dtype': 'float32', 'attention.position': 'Nope()',
    'data.source': 'TriggerAveraging()', 'data.context': 16, 'probe.length': 16,
    'batch_size': 128, 'steps': 1500,
    'optimizer.rule': 'AdamW(b1=0.9, b2=0.999, eps=1e-08)', 'optimizer.learning_rate': 3e-3,
    'optimizer.schedule': 'constant', 'optimizer.warmup_steps': 0, 'optimizer.weight_decay': 0.0,
    'probe.every': 100, 'validation.every': 500, 'checkpoint_every': 0,
}
_BACKCOPY = quickstart.TRIALS['backcopy-softmax'] | {'model.heads': 4, 'checkpoint_every': 0}

_QK_NORM = _attention(qk_norm='QKNorm()')
_SINK_LOGIT = _attention(kv_bias='SinkLogit()')
VARIANTS: dict[str, dict[str, Any]] = {
    'softmax': {},
    'sink-logit': _SINK_LOGIT,
    'k-bias': biases.TRIALS['k-bias'],
    'kv-bias': biases.TRIALS['kv-bias'],
    'v-bias': biases.TRIALS['v-bias'],
    'sink-token': biases.TRIALS['sink-token'],
    'qk-norm': _QK_NORM,
    'sigmoid': attention_operation.TRIALS['sigmoid'],
    'sigmoid-normalized': attention_operation.TRIALS['sigmoid-normalized'],
}
# Without a norm in the model these would compare a norm with none, and not with RMSNorm.
_OF_NORMS: tuple[str, ...] = ()
TASKS = {'trigger': _TRIGGER, 'backcopy': _BACKCOPY}
TRIALS = {f'{task}-{variant}': settings | changes
          for task, settings in TASKS.items() for variant, changes in VARIANTS.items()
          if task != 'trigger' or variant not in _OF_NORMS}
TRIALS |= {f'desk-{variant}': changes for variant, changes in VARIANTS.items()}


def get_config(name: str = '') -> ConfigDict:
  if name.startswith('desk-'):
    return budget.config(TRIALS, name, default='desk')
  return base.trial(TRIALS, name)
