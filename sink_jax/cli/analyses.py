"""Carries out one analysis of models, and writes and prints its rows."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from sink_jax.analyses.models import load
from sink_jax.analyses.runner import Analysis, Result, all_analyses, find, measure
from sink_jax.cli.results import writable_folder
from sink_jax.devices import keep_freed_memory
from sink_jax.io import compile_cache
from sink_jax.io.paths import AnyPath
from sink_jax.io.terminal import say, text_table
from sink_jax.models.run import Run
from sink_jax.pictures.style import png
from sink_jax.report.files import recorded, to_json, write_files
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
  named = _loaders(options)
  if not named and chosen.models is None:
    raise ValueError('name a model: --checkpoint= or --workdir=.')
  compile_cache.enable()
  keep_freed_memory()
  folder = writable_folder(options.out)
  if not named and chosen.models:
    named = [(run.name, lambda run=run: run) for run in chosen.models()]
  result, failures = _measured(chosen, named, options, folder)
  if result.rows:
    files = write_files(folder, {f'{chosen.name}.png': png(result.plot())})
    numbers = folder / f'{chosen.name}.json'
    print(f'{chosen.figure}: {chosen.line}', result, numbers, *files, sep='\n')
  if failures:
    sys.exit('\n'.join(f'error: {one["model"]}: {one["error"]}' for one in failures))


def _loaders(options: Any) -> list[tuple[str, Callable[[], Run]]]:
  """(name, function that loads it) of each model that a person names."""
  dtype, fsdp = options.inputs.dtype, options.fsdp
  published = [
    (name, functools.partial(load, name, None, dtype, fsdp)) for name in options.checkpoint
  ]
  trained = [
    (name, functools.partial(load, None, os.path.expanduser(name), dtype, fsdp, options.plugins))
    for name in options.workdir
  ]
  return [*published, *trained]


def _measured(
  chosen: Analysis,
  named: Sequence[tuple[str, Callable[[], Run]]],
  options: Any,
  folder: AnyPath,
) -> tuple[Result, list[dict[str, str]]]:
  """The rows of all models, and those that failed; NAME.json is written after every model."""
  own = {name: getattr(options, name) for name in chosen.parameters}
  file = f'{chosen.name}.json'
  result, failures = Result(chosen, [], []), []
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
      model, words = os.path.basename(os.path.normpath(name)), ' '.join(str(error).split())
      failures.append({'model': model, 'error': words[:500]})
      say(f'{name} failed: {words[:500]}')
    if result.rows or not (folder / file).exists():  # failures do not replace what was found before
      write_files(folder, {file: to_json(recorded(result.found | {'failed': failures}))})
  return result, failures
