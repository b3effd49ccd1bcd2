"""Keys that a config leaves empty, because the model's size and the devices decide them.

They are chosen once, when a run begins, and written to its config.json. A resumed run has the
values that are written there, on any devices: they change rounding and speed, and nothing else.

`model.remat` is 'none' wherever a step without a loop over the blocks fits a device, else the
policy that recomputes least of those that fit. Nothing is compiled to find that out:
`needed_bytes` estimates it from a table that was made with `python -m sink_jax plan` for TPUs, with
2 and 4 layers. For GPUs the same training step was compiled as tests/compile/test_train_step.py
does, for one H200: 60m with 8, 16 and 32 sequences, 1b with 4 and 8. tests/train/test_defaults.py has the bytes that the compilers reported.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from sink_jax.models.config import CHOICES, ModelConfig
from sink_jax.models.sizes import kept_bytes, parameter_count
from sink_jax.train.kept import with_kept
from sink_jax.train.loss import default_logits

CHOSEN_KEYS = ('model.unroll', 'model.remat', 'loss_logits', 'gradient_reduction')
# Blocks that are compiled one after another at most: the time of compiling grows with them.
_MOST_BLOCKS = 24
_SHARE = 0.9  # of the memory that an estimate may fill
_SMALLEST = 15 * 2**30  # bytes of a device that does not say how many it has
_log = logging.getLogger('sink_jax')


class MemoryFactors(NamedTuple):
  """Measured bytes of a block, as multiples of what `kept_bytes` gives.

  unrolled: that wait for the backward pass with remat 'none' and no loop over the blocks, as a
    multiple of what 'save_matmuls' keeps. looped: that any other policy keeps, as a multiple of
    what it keeps by that count.
  recomputed: that one block needs while it is computed again, as `unrolled`.
  """

  unrolled: float
  looped: float
  recomputed: float


_TABLE = {'cuda': MemoryFactors(1.4, 1.02, 1.8), 'tpu': MemoryFactors(1.25, 1.15, 3.2)}


@dataclasses.dataclass(frozen=True)
class DeviceLoad:
  """The part of a training step that one device computes and holds.

  platform: 'cpu', 'cuda', 'tpu', as `kernels.dispatch.platform` has it.
  memory: bytes that programs may use, None where they are unknown.
  tokens: of a micro-batch, on this device. devices: among which the state is split. tensor: those
  of them that have the same tokens. logits: most at a time in the loss, None for the platform's.
  kept: by the optimizer, in arrays of the parameters' size, see `kept_arrays`; 2 with AdamW.
  """

  platform: str
  memory: float | None
  tokens: float
  devices: int = 1
  tensor: int = 1
  microbatches: int = 1
  logits: int | None = None
  kept: float = 2.0


def device_memory() -> float | None:
  """Bytes that programs may use on a device of this process; None where it does not say."""
  return (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')


def with_chosen_keys(config: Mapping[str, Any], model: ModelConfig,
                     load: DeviceLoad) -> dict[str, Any]:
  """The config with values for those of CHOSEN_KEYS that it leaves empty.

  Where both `model.unroll` and `model.remat` are set, a warning says that the loop over the blocks
  is kept.

  Args:
    model: what the config describes.
  """
  given = config['model']
  model = with_defaults(model, load, given['remat'], given['unroll'])
  if (given['unroll'] or 1) > 1 and model.remat != 'none':
    _log.warning(f'model.unroll = {given["unroll"]} has no effect with model.remat = '
                 f'{model.remat}: the loop over the blocks is kept')
  return dict(config, model=dict(given, remat=model.remat, unroll=model.unroll),
              loss_logits=config['loss_logits'] or default_logits(load.platform),
              gradient_reduction=config['gradient_reduction'] or 'step')


def filled_from(config: Mapping[str, Any], other: Any, keys: tuple[str, ...] | None = None,
                section: str = '') -> dict[str, Any]:
  """The config with its empty keys, or those of them in `keys`, as another config has them.

  With `init.kept` go the keys that it names.

  Args:
    other: of any type where somebody changed a config.json; no dict fills nothing.
    section: prefix of the config's keys, such as 'model.'.
  """
  other = other if isinstance(other, dict) else {}
  values = {}
  for key, value in config.items():
    if isinstance(value, Mapping):
      value = filled_from(value, other.get(key), keys, f'{section}{key}.')
    elif value is None and (keys is None or section + key in keys):
      value = other.get(key)
    values[key] = value
  return values if section else with_kept(values, other)


def with_defaults(model: ModelConfig, load: DeviceLoad, remat: str | None,
                  unroll: int | None) -> ModelConfig:
  """The model with these values of `remat` and `unroll`, or those for its size and a device."""
  few = load.platform in _TABLE and model.layers <= _MOST_BLOCKS
  unrolled = dataclasses.replace(model, remat='none', unroll=unroll or (
      model.layers if few else 1))
  if remat is None:
    remat = _remat(unrolled, load)
  if remat == 'none':
    return unrolled
  return dataclasses.replace(model, remat=remat, unroll=unroll or 1)


def _remat(unrolled: ModelConfig, load: DeviceLoad) -> str:
  """The policy that recomputes least of those that fit; on a CPU nothing is recomputed."""
  if load.platform not in _TABLE:
    return 'none'
  policies = [dataclasses.replace(unrolled, remat=remat) for remat in CHOICES['remat']]
  if unrolled.unroll == 1 < unrolled.layers:  # a loop copies what it keeps: that takes longer
    policies = policies[1:]
  fits = lambda model: needed_bytes(model, load) < _SHARE * (load.memory or _SMALLEST)
  # CHOICES lists the policies from the one that recomputes nothing to the one that recomputes most.
  return next(filter(fits, policies), policies[-1]).remat


def needed_bytes(model: ModelConfig, load: DeviceLoad) -> float:
  """An estimate of the bytes on a device that a training step needs.

  Parameters, what the optimizer keeps, gradients, and their sum over micro-batches; activations
  that wait for the backward pass; and the larger of logits with their gradients and a block that a
  loop computes again, for the two are never there at once.
  """
  table = _TABLE[load.platform]
  # All of the state is float32, 4 bytes: four or five arrays of the parameters' size with AdamW.
  # Rules that keep less count as AdamW: runs with them were always given its choices.
  arrays = 2 + max(2.0, load.kept) + (load.microbatches > 1)
  state = 4 * parameter_count(model) / load.devices * arrays
  block = lambda remat: load.tokens * kept_bytes(model, remat, load.tensor)
  # Logits are float32, their gradients bfloat16.
  logits = 6 * min(load.tokens * model.vocab_size, load.logits or default_logits(load.platform))
  if model.remat == 'none':
    return state + table.unrolled * model.layers * block('save_matmuls') + logits
  return state + table.looped * model.layers * block(model.remat) + max(
      logits, table.recomputed * block('save_matmuls'))
