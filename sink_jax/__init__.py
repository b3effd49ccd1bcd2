"""sink_jax: attention sinks in language models, measured and trained in JAX.

    import sink_jax as sj
    sj.sink_rate(sj.importance(attention))        # your own maps, NumPy or JAX
    report = sj.probe(sj.load_run(workdir), tokens)

Letters of shapes in names, as in `q_BxTxHxDh`: B batch, S sequences of a probe, L queries, T keys
or tokens, N layers, D model, H heads, Hkv key/value heads, Dh head, F ffn or features, V
vocabulary. Positions are 1-based where the paper's are (Sink_1) and nowhere else. Names are
imported when first used: the metrics need only NumPy and JAX.
"""

import importlib
from typing import Any

_MODULES = {
  'sink_jax.component': 'from_string',
  'sink_jax.attention.spec': 'AttentionSpec',
  'sink_jax.attention': 'Dims Param',
  'sink_jax.attention.reference': 'attention_map',
  'sink_jax.kernels.dispatch': 'attend',
  'sink_jax.kernels.importance': 'Importance streaming_importance',
  'sink_jax.kernels.check': 'SinkCheck check_sink_gradients',
  'sink_jax.models.decode': 'CachePolicy',
  'sink_jax.models.config': 'ModelConfig',
  'sink_jax.models.run': 'Run',
  'sink_jax.models.graft': 'graft',
  'sink_jax.models.record': 'GraftReport Record RecordOptions Seen maps',
  'sink_jax.models.sizes': 'parameter_count sized',
  'sink_jax.evaluate.sinks': 'importance sink_rate emergence_step',
  'sink_jax.evaluate.probe': 'probe',
  'sink_jax.evaluate.sink_report': 'SinkReport',
  'sink_jax.pretrained.load': 'load_pretrained tokenize',
  'sink_jax.train.load': 'load_run',
  'sink_jax.analyses.runner': 'analyse',
  'sink_jax.analyses.card': 'card card_of',
  'sink_jax.analyses.recorder': 'record_attention record_hidden',
  'sink_jax.report.runs': 'read_runs',
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
  if name in _MODULE_OF:
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
  if name == '__all__':
    return __dir__()
  if not name.startswith('_') and name in (components := _components()):
    return components[name]
  raise AttributeError(f'sink_jax has no {name!r}; it exports {", ".join(__dir__())}.')


def __dir__() -> list[str]:
  return sorted([*_MODULE_OF, *_components()])


def _components() -> dict[str, type]:
  """Every component of attention that is defined, by name."""
  from sink_jax.attention.spec import COMPONENTS
  from sink_jax.component import registry

  return {name: cls for base in COMPONENTS.values() for name, cls in registry(base).items()}
