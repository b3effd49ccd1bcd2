"""sink_jax: attention sinks in language models, measured and trained in JAX.

    import sink_jax as sj
    sj.sink_rate(sj.importance(attention))        # your own maps, NumPy or JAX
    report = sj.probe(sj.load_run(workdir), tokens)

Letters of shapes in names, as in `q_BxTxHxDh`: B batch, S sequences of a probe, L queries,
T keys or tokens, N layers, D model, H heads, Hkv key/value heads, Dh head, F ffn or
features, V vocabulary. Positions are 1-based where the paper's are (Sink_1) and nowhere
else. Names are imported when first used, so that the metrics need NumPy, JAX and jaxtyping alone.
A component class of sink_jax/attention is public by itself, without an entry here.
"""

import importlib
import warnings
from pathlib import Path
from typing import Any

from sink_jax.arguments import explained
from sink_jax.component import components_in

_EXPORTS = {
    'sink_jax.component': ['from_string'],
    'sink_jax.attention.spec': ['AttentionSpec'],
    'sink_jax.attention.param': ['Dims', 'Param'],
    'sink_jax.attention.reference': ['attention_map'],
    'sink_jax.kernels.dispatch': ['attend'],
    'sink_jax.kernels.importance': ['Importance', 'streaming_importance'],
    'sink_jax.models.config': ['ModelConfig'],
    'sink_jax.models.decode': ['CachePolicy'],
    'sink_jax.models.run': ['Run'],
    'sink_jax.models.graft': ['graft'],
    'sink_jax.models.graft_report': ['GraftReport'],
    'sink_jax.models.record': ['Record', 'RecordOptions'],
    'sink_jax.models.sizes': ['parameter_count', 'sized'],
    'sink_jax.evaluate.sinks': ['importance', 'sink_rate', 'emergence_step'],
    'sink_jax.evaluate.probe': ['probe'],
    'sink_jax.evaluate.sink_report': ['SinkReport'],
    'sink_jax.pretrained.load': ['load_run', 'load_pretrained', 'tokenize'],
    'sink_jax.analyses.runner': ['analyse'],
}
# Every component of attention is public without an entry above.
_COMPONENTS = {name: f'sink_jax.attention.{file}' for name, file in components_in(
    Path(__file__).parent / 'attention').items()}
# Names of version 0.1 that have become others; they go with the next version.
_DEPRECATED = {'build': 'from_string', 'Want': 'RecordOptions'}
_HOME = _COMPONENTS | {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll] computed, see above
__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
  if name in _DEPRECATED:
    # Level 2: the warning names the line that used the name, and not this one.
    warnings.warn(f'sink_jax.{name} is now sink_jax.{_DEPRECATED[name]}.', DeprecationWarning, 2)
    name = _DEPRECATED[name]
  if name not in _HOME:
    raise AttributeError(f'sink_jax has no {name!r}; it exports {", ".join(__all__)}.')
  value = getattr(importlib.import_module(_HOME[name]), name)
  # Functions are explained where they are defined.
  return explained(value) if isinstance(value, type) else value


def __dir__() -> list[str]:
  return __all__
