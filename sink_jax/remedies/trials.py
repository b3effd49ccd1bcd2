"""The trials of configs/remedies.py by name, so that a page can say which were never begun.

A page is also made where that file is not at hand, and nothing here imports it: the names stand
here, in its order, and a test compares them with its table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

SOFTMAX = 'softmax'
VARIANTS = (
    'sink-logit', 'zero-sink', 'k-bias', 'kv-bias', 'v-bias', 'sink-token', 'sigmoid',
    'sigmoid-normalized', 'relu', 'squared-relu', 'softpick', 'qk-norm', 'log-length',
    'log-length-fixed', 'head-gate', 'element-gate', 'value-gate', 'slice-gate',
    'head-gate-qk-norm', 'head-norm', 'value-scale', 'ssnorm', 'dyt', 'post-norm', 'sandwich',
    'protected', 'sigma-reparam', 'muon', 'ssnorm-muon', 'orthoadam', 'zero-sink-orthoadam',
    'sigmoid-bias', 'clipped', 'pseudo-mask', 'sink-logit-window')
# The model of this task has no norm that these could replace.
_WITHOUT = {'trigger': ('ssnorm', 'dyt', 'post-norm', 'sandwich', 'protected', 'ssnorm-muon')}


def variants_of(task: str) -> tuple[str, ...]:
  """The variants beside softmax that a task has, in the order of the config file."""
  return tuple(name for name in VARIANTS if name not in _WITHOUT.get(task, ()))


def command(task: str, variants: Sequence[str], seeds: Collection[int]) -> str:
  """The command that trains these variants of a task with these seeds."""
  # With softmax's seeds, since differences are paired by seed.
  names = ','.join(f'{task}-{variant}' for variant in variants)
  return ('python -m sink_jax sweep --config=configs/remedies.py '
          f'--seeds={",".join(map(str, sorted(seeds)))} --workdir=runs/remedies --processes=2 '
          f'--only={names}')
