"""Carries out one analysis of models, and writes and prints what it has found."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Sequence

import tyro

from sink_jax.analyses import options as analyses
from sink_jax.analyses import registry, runner
from sink_jax.analyses.interface import Result
from sink_jax.analyses.runner import Failure
from sink_jax.cli.main import say
from sink_jax.cli.results import writable_folder, write_found
from sink_jax.io import compile_cache
from sink_jax.io.paths import AnyPath
from sink_jax.io.terminal import text_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(analyses.Options):
  """Carries out one analysis of published models, or of runs trained with sink_jax.

      python -m sink_jax analyses lengths --checkpoint=Pythia-14M,GPT2 --out=analyses

  It writes NAME.json, after every model, and NAME.png. Of several models one that fails does not
  stop the others: NAME.json lists it as 'failed', and the exit code is 1. --list names all
  analyses, with the defaults that are not those below.
  """

  name: tyro.conf.Positional[str] = ''  # of the analysis.
  list: bool = False  # print the names of the analyses and stop.
  #: published models: folders, names such as Pythia-14M, or 'owner/name' on the Hugging Face hub.
  checkpoint: tuple[str, ...] = ()
  workdir: tuple[str, ...] = ()  # runs trained with sink_jax.
  out: str | None = None  # folder to write to.
  layers: tuple[int, ...] | None = None  # blocks to look at, from 1, such as 1,3.
  heads: tuple[int, ...] | None = None  # heads to look at, from 1.


def main(options: Options, given: Collection[str]) -> None:
  """Carries out the analysis, and prints its table and the names of its files."""
  if options.list:
    print(registry.as_text())
    return
  compile_cache.enable()
  text, paths, failures = analyse_models(options, given)
  print(text, *paths, sep='\n')
  if failures:
    sys.exit('\n'.join(f'error: {one["model"]}: {one["error"]}' for one in failures))


def analyse_models(options: Options, given: Collection[str]) -> tuple[
    str, Sequence[AnyPath], Sequence[Failure]]:
  """Carries out an analysis, and writes OUT/NAME.json, after every model, and OUT/NAME.png.

  Without models, an analysis that has `check_all` makes its own.

  Returns:
    The results as a table for a terminal, the paths of the files, and {'model', 'error'} of the
    models that failed among several.

  Raises:
    ValueError: an option, a model or its inputs cannot be used; names it and the remedy.
    CheckpointError: no usable checkpoint in a workdir, where that is the only model.
  """
  analysis, checkpoints, workdirs = registry.find(options.name), options.checkpoint, options.workdir
  has_models = bool(checkpoints or workdirs)
  if not (has_models or analysis.check_all):
    raise ValueError('name a model: --checkpoint= or --workdir=.')
  chosen = {field.name: getattr(options, field.name) for field in dataclasses.fields(
      analyses.Options) if field.name in given}
  # People count blocks and heads from 1, as the paper does; the program counts from 0.
  chosen |= {name: tuple(i - 1 for i in chosen[name]) for name in ('layers', 'heads')
             if name in chosen}
  takes = (analysis.takes(checkpoints=bool(checkpoints), workdirs=bool(workdirs))
           if has_models else ('length', 'epsilons'))  # of check_all
  settings = analysis.options(takes, **{'say': say} | chosen)
  analysis.check_first(settings)
  folder = writable_folder(options.out)
  numbers, picture = (folder / f'{analysis.name}.{suffix}' for suffix in ('json', 'png'))
  there = numbers.exists()

  def write(results: list[Result], failures: list[Failure]) -> None:
    if results or not there:  # failures alone take the place of nothing that was found before
      write_found(numbers, {'analysis': analysis.name, 'figure': analysis.figure,
                            'results': results, 'failed': failures})

  if analysis.check_all and not has_models:
    results, failures = analysis.check_all(settings.length, settings.epsilon), []
    write(results, failures)
  else:
    models = runner.loaders(analysis, [*checkpoints], [*workdirs], settings)
    results, failures = runner.measure_all(analysis, models, settings, write)
  if not results:  # every model has failed
    return (f'{analysis.figure}: no results' + there * f'; {numbers} stays as it was',
            [] if there else [numbers], failures)
  analysis.module.draw(results, picture)
  head, *rows = analysis.module.rows(results)
  text = '\n'.join([f'{analysis.figure}: {analysis.line}', *text_table(head, rows)])
  return text, [numbers, picture], failures
