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
from sink_jax.cli import command, parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(InputOptions, parser.CommandOptions):
  """The options of a probe, and those of the inputs of a published model.

  Attributes:
    workdir: folder of a run. All tokens that it stores are probed where --sequences and --length
      do not choose a part, in the dtype of its own probes.
    checkpoint: a published model instead: its folder, a name such as Pythia-160M, or 'owner/name'
      on the Hugging Face hub.
    out: folder to write to; a published model needs one. By default WORKDIR/evaluation.
    epsilon: threshold of the sink rate; by default the run's own, or 0.3.
  """

  workdir: str | None = None
  checkpoint: str | None = None
  out: str | None = None
  epsilon: float | None = None


def main(options: Options) -> None:
  """Probes the model, writes the report, and prints its summary."""
  if (options.workdir is None) == (options.checkpoint is None):
    raise ValueError('name a model: either --workdir or --checkpoint.')
  given = command.given_of(options, InputOptions)
  if options.workdir is not None:
    command.unused(options, 'is for published models: a run is probed on the inputs stored with '
                   'it. Other inputs: python -m sink_jax analyses.',
                   *sorted(given.keys() - {'sequences', 'length', 'dtype'}))
  elif not options.out:
    raise ValueError('--out is needed: the folder to write to.')
  else:
    if options.epsilon is not None:
      given['epsilons'] = (options.epsilon,)
    check_given(given, (*INPUTS, 'epsilons', 'dtype', 'fsdp'), 'a probe of a published model',
                given.get('inputs', 'natural'))

  from sink_jax.cli.evaluate_models import as_text, evaluate_pretrained, evaluate_run
  from sink_jax.io import compile_cache

  command.quiet_logs()
  compile_cache.enable()
  if options.checkpoint is not None:
    assert options.out  # required above
    found = evaluate_pretrained(options.checkpoint, options.out, AnalysisOptions(**given))
  else:
    assert options.workdir is not None  # one of the two is given
    found = evaluate_run(options.workdir, options.out, epsilon=options.epsilon, **given)
  result, paths = found
  print(as_text(result), *paths, sep='\n')
