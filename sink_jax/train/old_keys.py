"""Config keys of older versions: what stands in their place today.

The configs of stored runs keep being read. Nothing here imports jax or optax, so that a command
can answer a mistaken option at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_RULE = ('name', 'beta1', 'beta2', 'eps')  # of `optimizer`, before it had a rule
# Components of `attention` that are younger than configs, and what was computed without them.
_COMPONENTS = {'temperature': 'Fixed()', 'value': 'PlainValue()', 'head': 'PlainOutput()'}
_OPTIONS = {'linear': 'plain', 'head_dim': None, 'pattern': None, 'parallel_residual': None,
            'biases': None, 'embedding_dim': None, 'tied': None,
            'logit_cap': None}  # of `model`, likewise
_INIT = {'source': '', 'keep': 'params', 'graft': '', 'train': 'all', 'distill': 0.0, 'step': None,
         'hash': None, 'new': None, 'kept': None}


def with_components(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config with the components of attention, options of the model and `init` that it lacks.

  They are what it computed.
  """
  config = dict(config)
  config.setdefault('init', {})
  for section, known in (('attention', _COMPONENTS), ('model', _OPTIONS), ('init', _INIT)):
    if isinstance(named := config.get(section), Mapping):  # else it is refused where it is read
      config[section] = {**named, **{k: v for k, v in known.items() if k not in named}}
  return config


def with_update_rule(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config with `optimizer.rule` in place of `optimizer.name`, `beta1`, `beta2` and `eps`.

  A config without those keys stays as it is, and so does one whose values are no numbers: what
  is wrong with it is said where it is read.
  """
  optimizer = config.get('optimizer')
  if not isinstance(optimizer, Mapping) or not set(_OF_RULE) <= set(optimizer):
    return dict(config)
  name, *numbers = (optimizer[key] for key in _OF_RULE)
  try:
    name, (b1, b2, eps) = str(name), map(float, numbers)
  except (TypeError, ValueError, OverflowError):
    return dict(config)
  # Spelled as the repr of the rule, which is what a config of today has.
  rule = {'adamw': f'AdamW(b1={b1!r}, b2={b2!r}, eps={eps!r})', 'sgd': 'Sgd(momentum=0.0)'}
  kept = {key: value for key, value in optimizer.items() if key not in _OF_RULE}
  return dict(config, optimizer={'rule': rule.get(name, name), **kept})


def with_current_keys(config: dict[str, Any]) -> dict[str, Any]:
  """The config of a stored run, with the keys that are younger than it.

  Their values are what its program computed: where a key has another default by now, a resumed run
  still does what it did when it began.
  """
  init = config.get('init')
  if isinstance(init, dict) and init.get('graft'):
    init.setdefault('kept', '')  # all components were those of the config
  config = with_components(with_update_rule(config))
  config.setdefault('loss_logits', 2**26)
  config.setdefault('gradient_reduction', 'microbatch')
  mesh, model, data = (config.get(section) for section in ('mesh', 'model', 'data'))
  if isinstance(mesh, dict):
    mesh.setdefault('tensor', 1)
  if isinstance(data, dict):
    data.setdefault('valid_source', '')
  if isinstance(model, dict):
    model.setdefault('unroll', 1)
    if isinstance(model.get('remat'), bool):
      model['remat'] = 'blocks' if model['remat'] else 'none'
  return config


def hint(key: str) -> str:
  """Words that follow an error about an unknown config key, such as 'optimizer.beta2'; or ''."""
  section, _, name = key.rpartition('.')
  if section != 'optimizer' or name not in _OF_RULE:
    return ''
  return ("; optimizer.name, beta1, beta2 and eps are one key now, such as optimizer.rule="
          "'AdamW(b1=0.9, b2=0.95, eps=1e-08)' or optimizer.rule='Sgd(momentum=0.0)'")
