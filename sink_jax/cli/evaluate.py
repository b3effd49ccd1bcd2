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
from sink_jax.analyses.options import Options as AnalysisOptions
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
  from sink_jax.cli.evaluate_models import as_text, evaluate_pretrained, evaluate_run
  from sink_jax.io import compile_cache

  command.quiet_logs()
  compile_cache.enable()
  given = command.given_of(options, InputOptions)
  if options.workdir is not None:
    found = evaluate_run(options.workdir, options.out, epsilon=options.epsilon, **given)
  else:
    assert options.checkpoint and options.out  # both are required above
    if options.epsilon is not None:
      given['epsilons'] = (options.epsilon,)
    found = evaluate_pretrained(options.checkpoint, options.out, AnalysisOptions(**given))
  result, paths = found
  print(as_text(result), *paths, sep='\n')
