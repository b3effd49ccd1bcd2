"""All kinds of input by name; a module is imported when its kind is needed."""

from __future__ import annotations

import importlib

_MODULES = {
    'slots': 'slots', 'configs': 'configs', 'settings': 'configs', 'jsonl': 'jsonl',
    'tokenizers': 'tokenizers', 'text_tokenizers': 'tokenizers', 'headers': 'pretrained',
    'families': 'pretrained', 'checkpoints': 'pretrained', 'run_files': 'workdirs',
    'load_run': 'workdirs', 'run_sizes': 'workdirs', 'caches': 'caches',
    'nonfinite_models': 'nonfinite', 'attention_maps': 'nonfinite'}
NAMES = tuple(_MODULES)


def load(name: str):
  """The `Kind` of this name; 'planted-NAME' are the defects that the tests plant."""
  module = 'planted' if name.startswith('planted-') else _MODULES[name]
  return importlib.import_module(f'tests.fuzz.{module}').KINDS[name]
