"""Keys that a config leaves empty, because the model's size and the devices decide them.

They are chosen once, when a run begins, and written to its config.json. A resumed run goes on
with what is written there, on any devices: they change rounding and speed, and nothing else.

`model.remat` is 'none' wherever a step without a loop over the blocks fits a device, else the
policy that recomputes least of those that fit. Nothing is compiled to find that out:
`needed_bytes` estimates it from a table that was made with

    python -m sink_jax.plan --topology=v5e:1x1 --size=60m --vocab=8192 --batch_size=8 \\
      --remat=none --config.loss_logits=67108864 --config.model.layers=2

for TPUs, with 2 and 4 layers, and again with --remat=save_matmuls. For GPUs the same training
step was compiled as tests/compile/test_train_step.py does, for one H200: 60m with 8, 16 and 32
sequences, 1b with 4 and 8. tests/train/test_defaults.py has what the compilers said.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from sink_jax.models.config import CHOICES, ModelConfig
from sink_jax.models.sizes import kept_bytes, parameter_count
from sink_jax.train.loss import default_logits

CHOSEN_KEYS = ('model.unroll', 'model.remat', 'loss_logits', 'gradient_reduction')
# Blocks that are compiled one after another at most: the time of compiling grows with them.
_MOST_BLOCKS = 24
_SHARE = 0.9  # of the memory that an estimate may fill
_SMALLEST = 15 * 2**30  # bytes of a device that does not say how many it has
_log = logging.getLogger('sink_jax')


class MemoryFactors(NamedTuple):
  """Bytes in the memory, over the bytes of `kept_bytes`.

  laid_out: what the backward pass finds of a block with remat 'none' and no loop over the blocks,
  over what 'save_matmuls' keeps. looped: what any other policy keeps of a block, over its own.
  again: what one block needs that is computed again, over what 'save_matmuls' keeps.
  """

  laid_out: float
  looped: float
  again: float


_TABLE = {'cuda': MemoryFactors(1.4, 1.02, 1.8), 'tpu': MemoryFactors(1.25, 1.15, 3.2)}


@dataclasses.dataclass(frozen=True)
class DeviceLoad:
  """What one device has to hold of a training step.

  platform: 'cpu', 'cuda', 'tpu', as `kernels.dispatch.platform` has it.
  memory: bytes that programs may use, None where they are unknown.
  tokens: of a micro-batch. devices: among which the state is split. tensor: those of them that
  share the tokens. logits: most at a time in the loss, None for those of the platform.
  """

  platform: str
  memory: float | None
  tokens: float
  devices: int = 1
  tensor: int = 1
  microbatches: int = 1
  logits: int | None = None


def device_memory() -> float | None:
  """Bytes that programs may use on a device of this process; None where it does not say."""
  return (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')


def with_chosen_keys(config: Mapping[str, Any], model: ModelConfig, share: DeviceLoad) -> dict[str, Any]:
  """The config with its empty KEYS filled.

  Where both `model.unroll` and `model.remat` are set, one line says that the loop over the
  blocks is kept.

  Args:
    model: what the config describes.
  """
  asked = config['model']
  model = with_defaults(model, share, asked['remat'], asked['unroll'])
  if (asked['unroll'] or 1) > 1 and model.remat != 'none':
    _log.warning(f'model.unroll = {asked["unroll"]} has no effect with model.remat = '
                 f'{model.remat}: the loop over the blocks is kept')
  return dict(config, model=dict(asked, remat=model.remat, unroll=model.unroll),
              loss_logits=config['loss_logits'] or default_logits(share.platform),
              gradient_reduction=config['gradient_reduction'] or 'step')


def filled_from(config: Mapping[str, Any], other: Any, keys: tuple[str, ...] | None = None,
           section: str = '') -> dict[str, Any]:
  """The config with its empty keys, or those of them in `keys`, as another config has them."""
  other = other if isinstance(other, dict) else {}  # a config.json that somebody changed
  values = {}
  for key, value in config.items():
    if isinstance(value, Mapping):
      value = filled_from(value, other.get(key), keys, f'{section}{key}.')
    elif value is None and (keys is None or section + key in keys):
      value = other.get(key)
    values[key] = value
  return values


def with_defaults(model: ModelConfig, share: DeviceLoad, remat: str | None,
                  unroll: int | None) -> ModelConfig:
  """The model with these values of `remat` and `unroll`, or those for its size and a device."""
  few = share.platform in _TABLE and model.layers <= _MOST_BLOCKS
  laid_out = dataclasses.replace(model, remat='none', unroll=unroll or (
      model.layers if few else 1))
  if remat is None:
    remat = _remat(laid_out, share)
  if remat == 'none':
    return laid_out
  return dataclasses.replace(model, remat=remat, unroll=unroll or 1)


def _remat(laid_out, share):
  """What recomputes least of what fits; on a CPU nothing is recomputed."""
  if share.platform not in _TABLE:
    return 'none'
  policies = [dataclasses.replace(laid_out, remat=remat) for remat in CHOICES['remat']]
  if laid_out.unroll == 1 < laid_out.layers:  # a loop copies what it keeps: that takes longer
    policies = policies[1:]
  fits = lambda model: needed_bytes(model, share) < _SHARE * (share.memory or _SMALLEST)
  return next(filter(fits, policies), policies[-1]).remat


def needed_bytes(model: ModelConfig, share: DeviceLoad) -> float:
  """An estimate of what a training step with AdamW takes of the memory of a device.

  Parameters, two moments, gradients, and their sum over micro-batches; what waits for the backward
  pass; logits with their gradients, in whose place a loop then computes a block again.
  """
  table = _TABLE[share.platform]
  state = 4 * parameter_count(model) / share.devices * (4 + (share.microbatches > 1))
  block = lambda remat: share.tokens * kept_bytes(model, remat, share.tensor)
  # Logits are float32, their gradients bfloat16.
  logits = 6 * min(share.tokens * model.vocab_size, share.logits or default_logits(share.platform))
  if model.remat == 'none':
    return state + table.laid_out * model.layers * block('save_matmuls') + logits
  return state + table.looped * model.layers * block(model.remat) + max(
      logits, table.again * block('save_matmuls'))
