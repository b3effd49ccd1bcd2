"""One analysis of some models, one model at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator

import numpy as np

from sink_jax.analyses import subjects
from sink_jax.analyses.options import Options
from sink_jax.analyses.subjects import Subject
from sink_jax.analyses.table import Analysis, find
from sink_jax.data.inputs import stored
from sink_jax.models.run import Run


def measure_all(analysis: Analysis, models: Iterable[Subject], options: Options) -> list[dict]:
  """What the analysis finds in each model, ready for JSON.

  Args:
    models: may load them as they are asked for; none is kept.

  Raises:
    ValueError: the options or the inputs do not fit a model; names the option.
  """
  module = analysis.module()
  make = getattr(module, 'make_inputs', subjects.make_inputs)
  results = []
  for subject in models:
    name = subject.run.name or 'model'
    inputs = make(subject, options)
    options.say(f'{name}: {inputs.tokens.shape[0]} sequences of {inputs.tokens.shape[1]} tokens')
    told = dataclasses.replace(options, batch_size=options.at_a_time(options.length))
    results.append(module.measure(subject.run, inputs, told))
  return results


def analyse(name: str, run: Run, tokens=None, *, plot=None, **options) -> dict:
  """One analysis of one model, such as `sj.analyse('lengths', run, tokens, lengths=(16, 64))`.

  Args:
    name: of `python -m sink_jax.analyses --list`.
    tokens: (S, T) to look at; by default the inputs that the options ask for.
    plot: a path to draw to (PNG).
    options: fields of `sink_jax.analyses.options.Options`.

  Returns:
    What the analysis found, ready for JSON; its module says what is in it.

  Raises:
    ValueError: the name, an option, the tokens or the model do not fit; names the remedy.
  """
  analysis = find(name)
  subject, module = Subject.of_run(run), analysis.module()
  if tokens is None:
    [result] = measure_all(analysis, [subject], analysis.options(**options))
  else:
    if getattr(module, 'OWN_INPUTS', False):
      raise ValueError(f'{name} compares inputs of its own: leave out tokens, and say which by '
                       'inputs=, source=, sequences= and length=.')
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
      raise ValueError(f'tokens must be integers of shape (S, T), not {tokens.dtype} of shape '
                       f'{tokens.shape}.')
    subjects.check_length(run, tokens.shape[1])
    given = stored(tokens, run.config.vocab_size, 'tokens of the caller')
    told = analysis.options(**{'sequences': len(tokens), 'length': tokens.shape[1]} | options)
    result = module.measure(run, given, dataclasses.replace(
        told, batch_size=told.at_a_time(tokens.shape[1])))
  if plot is not None:
    module.draw([result], plot)
  return result


def load_all(analysis: Analysis, checkpoints: list[str], workdirs: list[str],
             options: Options) -> Iterator[Subject]:
  """Published models and runs of ours, each loaded when its turn comes.

  Raises:
    ValueError: a model cannot be loaded. CheckpointError: no usable checkpoint in a workdir.
  """
  companions = getattr(analysis.module(), 'companions', list)
  published = companions(checkpoints)
  total = len(published) + len(workdirs)
  for number, name in enumerate([*published, *workdirs], 1):
    options.say(f'[{number}/{total}] {name}')
    if number <= len(published):
      yield Subject.of_checkpoint(name, options.dtype, options.fsdp)
    else:
      yield Subject.of_workdir(os.path.expanduser(name))


def table_of(analysis: Analysis, results: list[dict]) -> list[list[str]]:
  """The results in columns, with their header first: what the module has as `rows`."""
  rows = getattr(analysis.module(), 'rows', None)
  if rows:
    return rows(results)
  plain = [key for key, value in results[0].items()
           if isinstance(value, (int, float)) and not isinstance(value, bool)]
  return [['model', *plain], *([result['model'] or 'model', *(f'{result[key]:.4g}'
                                                              for key in plain)]
                               for result in results)]
