"""The keys of a config that a graft changes, and those that it keeps as its source has them.

A config has a value for every component of attention, also where a person has named none. A graft
therefore changes what the config changes of the defaults, which are those of configs/base.py, and
keeps all else of the source; `init.kept` lists it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sink_jax.attention.spec import COMPONENTS, AttentionSpec
from sink_jax.component import from_string
from sink_jax.models.config import ModelConfig

_ATTENTION = tuple(f'attention.{name}' for name in COMPONENTS)
GRAFT_KEYS = (*_ATTENTION, 'model.norm', 'model.sink_tokens')


def kept_keys(kept: str | None) -> tuple[str, ...]:
  """The keys that `init.kept` names."""
  return tuple(filter(None, (key.strip() for key in (kept or '').split(','))))


def default_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Those of GRAFT_KEYS whose values in a config mean the default."""
  default = {'attention': AttentionSpec(), 'model': ModelConfig}
  sections = {key: key.split('.') for key in GRAFT_KEYS}
  return tuple(key for key, (section, name) in sections.items()
               if value_of(config, key) == getattr(default[section], name))


def value_of(config: Mapping[str, Any], key: str) -> Any:
  """The value of one of GRAFT_KEYS in a config: a component, a text or a number."""
  section, name = key.split('.')
  value = config[section][name]
  return from_string(COMPONENTS[name], value) if key in _ATTENTION else value


def with_kept(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
  """The config with its keys in `init.kept` as another config has them, if that has them.

  A key that has another value than the default stays as it is.
  """
  config = dict(config)
  kept = kept_keys(config.get('init', {}).get('kept'))
  left = default_keys(config) if kept else ()
  for section, name in (key.split('.') for key in kept if key in left):
    there = other.get(section)
    if isinstance(there, Mapping) and name in there:
      config[section] = {**config[section], name: there[name]}
  return config
