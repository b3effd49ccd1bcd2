"""Probes a model for attention sinks: a run trained here, or a published model.

    python -m sink_jax evaluate --workdir=runs/quickstart/text-softmax
    python -m sink_jax evaluate --checkpoint=Pythia-160M --out=pythia

A run is probed on the inputs stored with it, a published model on text, random tokens or one
repeated token. Writes sink_report.json and pictures (importance per head, attention maps, norm
ratios, and the training curves of a run).
"""

from __future__ import annotations

import dataclasses

from sink_jax.analyses.options import INPUTS, InputOptions, check_given
from sink_jax.cli import command
from sink_jax.cli.one_model import ModelOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, InputOptions):
  """The options of a probe, and those of the inputs of a published model.

  Attributes:
    workdir: folder of a run instead. All tokens that it stores are probed, in the dtype of its own
      probes, where --sequences, --length and --dtype do not say otherwise.
    out: folder to write to; a published model needs one. By default WORKDIR/evaluation.
    epsilon: threshold of the sink rate; by default the run's own, or 0.3.
  """

  workdir: str | None = None
  out: str | None = None
  epsilon: float | None = None

  def __post_init__(self):
    ModelOptions.__post_init__(self)
    InputOptions.__post_init__(self)
    if self.epsilon is not None and not 0 < self.epsilon < 1:
      raise ValueError(f'--epsilon={self.epsilon:g}: importance lies between 0 and 1; the paper '
                       'uses 0.3.')
    given = self.given & {field.name for field in dataclasses.fields(InputOptions)}
    if self.workdir is not None:
      self.unused('is for published models: a run is probed on the inputs stored with it. Other '
                  'inputs: python -m sink_jax analyses.',
                  *sorted(given - {'sequences', 'length', 'dtype'}))
    elif not self.out:
      raise ValueError('--out is needed: the folder to write to.')
    else:
      check_given(given, (*INPUTS, 'dtype', 'fsdp'), 'a probe of a published model', self.inputs)


def main(options: Options) -> None:
  """Probes the model, writes the report, and prints its summary."""
  from sink_jax.cli.evaluate_models import as_text, evaluate
  from sink_jax.io import compile_cache

  command.quiet_logs()
  compile_cache.enable()
  result, paths = evaluate(options)
  print(as_text(result), *paths, sep='\n')
