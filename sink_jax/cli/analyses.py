"""Carries out one analysis of published models, or of runs trained with sink_jax.

    python -m sink_jax analyses lengths --checkpoint=Pythia-14M,GPT2 --out=analyses

It writes NAME.json and NAME.png. A model that fails does not stop the others: NAME.json lists it as
'failed', and the exit status is 1. `python -m sink_jax analyses --list` names all analyses, with
the defaults that are not those below.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import tyro

from sink_jax.analyses import options as of_analyses
from sink_jax.cli import command, parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(of_analyses.Options, parser.CommandOptions):
  """The options of the command, and those of an analysis.

  Attributes:
    name: of the analysis.
    list: print the names of the analyses and stop.
    checkpoint: published models: folders, names such as Pythia-14M, or 'owner/name' on the Hugging
      Face hub.
    workdir: runs trained with sink_jax.
    out: folder to write to.
    layers: blocks to look at, from 1, such as 1,3.
    heads: heads to look at, from 1.
  """

  name: tyro.conf.Positional[str] = ''
  list: bool = False
  checkpoint: tuple[str, ...] = ()
  workdir: tuple[str, ...] = ()
  out: str | None = None
  layers: tuple[int, ...] | None = None
  heads: tuple[int, ...] | None = None


def main(options: Options) -> None:
  """Carries out the analysis; one line instead of a traceback for what cannot be done."""
  import jax

  from sink_jax.analyses import registry, runner
  from sink_jax.cli.analyse_models import analyse_models
  from sink_jax.io import compile_cache

  command.quiet_logs()
  if options.list:
    print(registry.as_text())
    return
  if not options.name:
    raise ValueError('name one analysis, such as: python -m sink_jax analyses lengths '
                     '--checkpoint=Pythia-14M --out=analyses. --list names all.')
  compile_cache.enable()
  try:
    text, paths, failures = analyse_models(
        options.name, list(options.checkpoint), list(options.workdir), options.out,
        say=command.say, **_given(options))
  except jax.errors.JaxRuntimeError as error:  # of a model that is the only one
    command.stop(f'{runner.in_one_line(error)}. Where the memory of the device is full: '
                 '--batch_size=1, fewer tokens, --dtype=bfloat16, or --fsdp over several devices.')
  print(text, *paths, sep='\n')
  if failures:
    sys.exit('\n'.join(f'error: {failure["model"]}: {failure["error"]}' for failure in failures))


def _given(options: Options) -> dict[str, Any]:
  """The options of the analysis that a person has written, as Python has them."""
  given = command.given_of(options, of_analyses.Options)
  # People count blocks and heads from 1, as the paper does; the program counts from 0.
  return given | {name: tuple(i - 1 for i in given[name])
                  for name in ('layers', 'heads') if name in given}
