"""Carries out one analysis of models, and writes and prints its rows."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from sink_jax.analyses.models import load
from sink_jax.analyses.runner import Result, all_analyses, find, measure
from sink_jax.cli.results import writable_folder, write_found
from sink_jax.devices import keep_freed_memory
from sink_jax.io import compile_cache
from sink_jax.io.terminal import say, text_table
from sink_jax.models.run import Run
from sink_jax.train.checkpoint import CheckpointError

# A JaxRuntimeError is how a device says that its memory is full.
_FAILURES = (ValueError, CheckpointError, OSError, jax.errors.JaxRuntimeError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Carries out one analysis of published models, or of runs trained with sink_jax.

      python -m sink_jax analyses lengths --checkpoint=Pythia-14M,GPT2 --out=analyses

  It writes NAME.json after every model, and NAME.png. A model that fails does not stop the others:
  NAME.json lists it as 'failed', and the exit code is 1. `analyses NAME --help` has the
  options of an analysis.
  """

  # With `arg`, not comments, which tyro does not find in the classes that `options_of` makes.
  name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help='of the analysis.')] = ''
  list: Annotated[bool, tyro.conf.arg(help='print the names of the analyses and stop.')] = False
  checkpoint: Annotated[
    tuple[str, ...],
    tyro.conf.arg(
      help="published models: folders, names such as Pythia-14M, or 'owner/name' on the hub."
    ),
  ] = ()
  workdir: Annotated[tuple[str, ...], tyro.conf.arg(help='runs trained with sink_jax.')] = ()
  plugins: Annotated[
    str, tyro.conf.arg(help='Python files with components of the runs, which are imported.')
  ] = ''
  fsdp: Annotated[
    int, tyro.conf.arg(help='devices over which the parameters of a published model are split.')
  ] = 1
  out: Annotated[str | None, tyro.conf.arg(help='folder to write to.')] = None


def options_of(words: Sequence[str]) -> type[Options]:
  """The options of the analysis that the first word names, made from its function's signature."""
  if not words or words[0].startswith('-'):
    return Options
  chosen = find(words[0])
  own = [
    (name, kind, dataclasses.field(default=default))
    for name, (kind, default) in chosen.parameters.items()
  ]
  inputs = Annotated[type(chosen.inputs), tyro.conf.OmitArgPrefixes]
  return dataclasses.make_dataclass(
    chosen.name,
    [*own, ('inputs', inputs, dataclasses.field(default=chosen.inputs))],
    bases=(Options,),
    namespace={'__doc__': f'{chosen.figure}. {chosen.function.__doc__}'},
    frozen=True,
    kw_only=True,
  )


def main(options: Any) -> None:
  """Carries out the analysis, and prints its table and the names of its files."""
  if options.list:
    rows = [[name, one.figure, one.line] for name, one in sorted(all_analyses().items())]
    print(*text_table(['analysis', 'of the paper', 'what it shows'], rows, left=range(3)), sep='\n')
    return
  chosen = find(options.name)
  dtype, fsdp = options.inputs.dtype, options.fsdp
  trained = lambda name: load(None, os.path.expanduser(name), dtype, fsdp, options.plugins)
  named: list[tuple[str, Callable[[], Run]]] = [
    *((name, lambda name=name: load(name, None, dtype, fsdp)) for name in options.checkpoint),
    *((name, lambda name=name: trained(name)) for name in options.workdir),
  ]
  if not named and chosen.models is None:
    raise ValueError('name a model: --checkpoint= or --workdir=.')
  compile_cache.enable()
  keep_freed_memory()
  folder = writable_folder(options.out)
  numbers, picture = (folder / f'{chosen.name}.{suffix}' for suffix in ('json', 'png'))
  own = {name: getattr(options, name) for name in chosen.parameters}
  result, failures = Result(chosen, [], []), []

  if not named and chosen.models:
    named = [(run.name, lambda run=run: run) for run in chosen.models()]
  for number, (name, loaded) in enumerate(named, 1):
    say(f'[{number}/{len(named)}] {name}')
    try:
      run = loaded()
      if run.name in {made['model'] for made in result.models}:  # two folders of one name
        run = dataclasses.replace(run, name='/'.join(Path(name).parts[-2:]))
      found = measure(chosen, run, options.inputs, own)
      result = Result(chosen, result.rows + found.rows, result.models + found.models)
    except _FAILURES as error:
      if len(named) == 1:
        raise
      failures.append(
        {
          'model': os.path.basename(os.path.normpath(name)),
          'error': ' '.join(str(error).split())[:500],
        }
      )
      say(f'{name} failed: {failures[-1]["error"]}')
    if result.rows or not numbers.exists():  # failures do not replace what was found before
      write_found(
        numbers,
        {
          'analysis': chosen.name,
          'figure': chosen.figure,
          'models': result.models,
          'rows': result.rows,
          'failed': failures,
        },
      )
  if result.rows:
    result.plot(picture)
    print(f'{chosen.figure}: {chosen.line}', result, numbers, picture, sep='\n')
  if failures:
    sys.exit('\n'.join(f'error: {one["model"]}: {one["error"]}' for one in failures))
