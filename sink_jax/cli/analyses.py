"""Carries out one analysis of models, and writes and prints what it has found."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sink_jax.analyses import registry, runner
from sink_jax.analyses.interface import Result
from sink_jax.analyses.options import Options
from sink_jax.analyses.runner import Failure
from sink_jax.cli.command import say
from sink_jax.cli.model_options import Analyses
from sink_jax.cli.results import made_folder, write_found
from sink_jax.io import compile_cache
from sink_jax.io.paths import AnyPath
from sink_jax.io.tables import text_table


def main(options: Analyses) -> None:
  """Carries out the analysis, and prints its table and the names of its files."""
  if options.list:
    print(registry.as_text())
    return
  compile_cache.enable()
  text, paths, failures = analyse_models(options)
  print(text, *paths, sep='\n')
  if failures:
    sys.exit('\n'.join(f'error: {failure["model"]}: {failure["error"]}' for failure in failures))


def analyse_models(options: Analyses) -> tuple[str, Sequence[AnyPath], Sequence[Failure]]:
  """Carries out an analysis, and writes OUT/NAME.json, after every model, and OUT/NAME.png.

  Without models, an analysis that has `check_all` makes its own.

  Returns:
    The results as a table for a terminal, the paths of the files, and {'model', 'error'} of the
    models that failed among several. There is no picture of no results.

  Raises:
    ValueError: an option, a model or its inputs cannot be used; names it and the remedy.
    CheckpointError: no usable checkpoint in a workdir, where that is the only model.
  """
  analysis, checkpoints, workdirs = registry.find(options.name), options.checkpoint, options.workdir
  has_models = bool(checkpoints or workdirs)
  if not (has_models or analysis.check_all):
    raise ValueError('name a model: --checkpoint=, published ones, or --workdir=, runs trained '
                     'with sink_jax.')
  given = options.given_of(Options)
  # People count blocks and heads from 1, as the paper does; the program counts from 0.
  given |= {name: tuple(i - 1 for i in given[name]) for name in ('layers', 'heads')
            if name in given}
  takes = (analysis.takes(checkpoints=bool(checkpoints), workdirs=bool(workdirs))
           if has_models else ('length', 'epsilons'))  # of check_all
  chosen = analysis.options(takes, **{'say': say} | given)
  analysis.check_first(chosen)
  folder = made_folder(options.out)
  numbers, picture = (folder / f'{analysis.name}.{suffix}' for suffix in ('json', 'png'))
  there = numbers.exists()

  def write(results: list[Result], failures: list[Failure]) -> None:
    if results or not there:  # failures alone take the place of nothing that was found before
      write_found(numbers, {'analysis': analysis.name, 'figure': analysis.figure,
                            'results': results, 'failed': failures})

  # The file is written after every model: hours of work are not lost where a later one ends the
  # process.
  if analysis.check_all and not has_models:
    results, failures = analysis.check_all(chosen.length, chosen.epsilon), []
    write(results, failures)
  else:
    models = runner.loaders(analysis, [*checkpoints], [*workdirs], chosen)
    results, failures = runner.measure_all(analysis, models, chosen, write)
  # Every model has failed: there is nothing to draw.
  if not results:
    return (f'{analysis.figure}: no results' + there * f'; {numbers} stays as it was',
            [] if there else [numbers], failures)
  analysis.module.draw(results, picture)
  head, *rows = analysis.module.rows(results)
  text = '\n'.join([f'{analysis.figure}: {analysis.line}', *text_table(head, rows)])
  return text, [numbers, picture], failures
