"""Carries out an analysis of models, one model at a time."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np
from numpy.typing import ArrayLike

from sink_jax.analyses import loaded_models
from sink_jax.analyses.interface import AnalysisResult, PictureFile, Result
from sink_jax.analyses.loaded_models import LoadedModel
from sink_jax.analyses.options import Options
from sink_jax.analyses.registry import Analysis, find
from sink_jax.evaluate.activations import not_finite
from sink_jax.evaluate.inputs import Inputs, stored
from sink_jax.models.arrays import check_ids, matmul_precision
from sink_jax.models.run import Run
from sink_jax.train.checkpoint import CheckpointError

# A JaxRuntimeError is how a device says that its memory is full.
_FAILURES = (ValueError, CheckpointError, OSError, jax.errors.JaxRuntimeError)
_MESSAGE = 500  # characters


class Failure(TypedDict):
  """A model that could not be measured, as NAME.json lists it."""

  model: str
  error: str


def measure_all(analysis: Analysis, models: Sequence[tuple[str, Callable[[], LoadedModel]]],
                options: Options, write: Callable[[list[Result], list[Failure]], None] | None = None
                ) -> tuple[list[Result], list[Failure]]:
  """Measures models one after the other; a model that fails does not stop the rest.

  Args:
    analysis: what is measured.
    models: a name and a function that loads the model. A model is loaded when its turn comes, and
      is freed before the next one.
    options: the same for all models.
    write: is called after every model with all results and failures so far.

  Returns:
    The results of the models that succeeded, and the failures of those that did not.

  Raises:
    ValueError, CheckpointError, OSError, JaxRuntimeError: from a model that is the only one.
  """
  results, failures = [], []
  for number, (name, load) in enumerate(models, 1):
    options.say(f'[{number}/{len(models)}] {name}')
    try:
      # No variable holds the loaded model, so its memory is free when the next one is loaded.
      results.append(measure(analysis, load(), options))
    except _FAILURES as error:
      if len(models) == 1:
        raise
      message = in_one_line(error)
      options.say(f'{name} failed: {message}')
      failures.append({'model': _without_path(name), 'error': message})
    if write is not None:
      write(results, failures)
  return results, failures


def in_one_line(error: BaseException) -> str:
  """The message of an error without line ends, cut where a device lists all its memory."""
  return ' '.join(str(error).split())[:_MESSAGE]


def measure(analysis: Analysis, model: LoadedModel, options: Options,
            inputs: Inputs | None = None) -> Result:
  """Measures one model.

  Args:
    analysis: what is measured.
    model: the model, and the tokenizer that makes its inputs.
    options: what a person chose.
    inputs: stand in for those that the options ask for.

  Returns:
    The result of the module, with three keys more: 'checkpoint', which model it is; 'options',
    those that were read; and 'matmul_precision', that of matrix products ('highest' where
    activations are float32).

  Raises:
    ValueError: the options or the inputs do not fit the model; names the option. A number of
      the result is not finite; names the number, and a parameter or the remedy.
  """
  run, name = model.run, model.run.name or 'model'
  takes = {*analysis.takes(tokens=inputs is not None), *model.loaded_by}
  inputs = analysis.make_inputs(model, options) if inputs is None else inputs
  options.say(f'{name}: {inputs.tokens.shape[0]} sequences of {inputs.tokens.shape[1]} tokens')
  # The record names the batch size that was used, not that it was left to the program.
  options = dataclasses.replace(options, batch_size=options.at_a_time(options.length))
  result = analysis.module.measure(run, inputs, options)
  for keys, value in jax.tree.leaves_with_path(result):
    if isinstance(value, float) and not math.isfinite(value):
      raise not_finite(run, f'{name}: {jax.tree_util.keystr(keys, simple=True, separator=".")}', options.dtype)
  dtype = options.dtype if 'dtype' in takes else run.config.dtype
  return result | {'checkpoint': checkpoint(run), 'options': _plain(options, takes),
                   'matmul_precision': matmul_precision('float32' if analysis.float32 else dtype)}


def checkpoint(run: Run) -> dict[str, str | int | None]:
  """Identifies the model of a result: folder, step, dtype and number of parameters.

  The folder is its last part alone, since results are published and paths of a machine are not.
  A snapshot of the Hugging Face hub has the folder of its repository, and its revision.
  """
  identity: dict[str, str | int | None] = {
      'folder': None, 'step': run.step, 'dtype': run.config.dtype,
      'parameters': sum(x.size for x in jax.tree.leaves(run.params))}
  if run.folder is not None:
    folder = Path(run.folder).absolute()
    identity['folder'] = folder.name
    # The hub's cache is models--OWNER--NAME/snapshots/REVISION; a copy of it may lack the upper
    # two.
    if re.fullmatch('[0-9a-f]{40}', folder.name):
      identity |= {'folder': folder.parents[1].name if folder.parent.name == 'snapshots'
                   else folder.name, 'revision': folder.name}
  return identity


def analyse(name: str, run: Run, tokens: ArrayLike | None = None, *,
            plot: PictureFile | None = None, **options: Any) -> AnalysisResult:
  """Runs one analysis of one model: `sj.analyse('lengths', run, tokens, lengths=(16, 64))`.

  Args:
    name: the name of the analysis; `python -m sink_jax analyses --list` prints all names.
    run: the model.
    tokens: ids (S, T); by default the inputs that the options describe.
    plot: the PNG file to draw to; by default nothing is drawn.
    options: fields of `sink_jax.analyses.options.Options`.

  Returns:
    The measured numbers, a dict ready for JSON with the method `plot`. The function
    `measure` in the analysis's module documents the keys.

  Raises:
    ValueError: the name, an option, the tokens or the model do not fit; the message names the
      remedy, or the nearest name.
  """
  analysis = find(name)
  chosen = analysis.options(analysis.takes(tokens=tokens is not None), **options)
  model, inputs = LoadedModel.of_run(run), None
  if tokens is not None:
    if analysis.compares_inputs:
      raise ValueError(f'{name} compares inputs of its own: leave out tokens, and say which by '
                       'inputs=, source=, sequences= and length=.')
    inputs = _inputs_of(model, np.asarray(tokens), analysis.any_length)
    sequences, length = inputs.tokens.shape
    chosen = dataclasses.replace(chosen, sequences=sequences, length=length)
  result = measure(analysis, model, chosen, inputs)
  if plot is not None:
    analysis.module.draw([result], plot)
  return AnalysisResult(result, analysis.module)


def loaders(analysis: Analysis, checkpoints: list[str], workdirs: list[str],
            options: Options) -> list[tuple[str, Callable[[], LoadedModel]]]:
  """Pairs the names of published models and of runs with the functions that load them.

  Raises:
    ValueError: a model is named twice.
  """
  published = lambda name: LoadedModel.of_checkpoint(name, options.dtype, options.fsdp)
  trained = lambda name: LoadedModel.of_workdir(os.path.expanduser(name), options.dtype)
  kinds = {**dict.fromkeys(analysis.companions(checkpoints), published),
           **dict.fromkeys(workdirs, trained)}
  places = {}
  for name in [*checkpoints, *workdirs]:
    path = os.path.expanduser(name)
    place = os.path.realpath(path) if os.path.exists(path) else name
    if place in places:
      raise ValueError(f'{name} is named twice: leave it out once.')
    places[place] = name
  labels = dict(zip(places.values(), _tails(list(places))))
  # The outer function binds the names: a single one would see the last of the loop.
  called = lambda name, load: lambda: _called(load(name), labels.get(name))
  return [(name, called(name, load)) for name, load in kinds.items()]


def _tails(places: Sequence[str]) -> list[str | None]:
  """The last parts of each path, as many as tell it from the others; None where one does."""
  tails: list[str | None] = [None] * len(places)
  parts = [Path(place).parts for place in places]
  for i, mine in enumerate(parts):
    count = next(n for n in range(1, len(mine) + 1) if n == len(mine) or not any(
        other[-n:] == mine[-n:] for j, other in enumerate(parts) if i != j))
    if count > 1:
      tails[i] = '/'.join(mine[-count:])
  return tails


def _called(model: LoadedModel, name: str | None) -> LoadedModel:
  """The model under another name; None: under its own."""
  return model if name is None else dataclasses.replace(
      model, run=dataclasses.replace(model.run, name=name))


def _inputs_of(model: LoadedModel, tokens: np.ndarray, any_length: bool) -> Inputs:
  """Makes inputs of a caller's tokens; raises a ValueError where they do not fit the model."""
  run = model.run
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(f'tokens must be integers of shape (S, T), not {tokens.dtype} of shape '
                     f'{tokens.shape}.')
  if not tokens.size:
    raise ValueError(f'tokens of shape {tokens.shape} are empty: give one sequence or more.')
  size = run.config.vocab_size
  if size:
    check_ids(tokens, size)
  if not any_length:
    loaded_models.check_length(run, tokens.shape[1])
  # `stored` writes the record of a run's probe tokens, and these are a caller's.
  made = stored(tokens, size, 'tokens of the caller')
  bos = made.description['bos'] | {'protocol': 'as given'}
  return dataclasses.replace(made, tokenizer=model.tokenizer,
                             description=made.description | {'kind': 'given', 'bos': bos})


def _plain(options: Options, names: Collection[str]) -> dict[str, Any]:
  """The options of these names for JSON: tuples as lists, files without their folders."""
  values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)
            if field.name in names}
  values |= {name: _without_path(values[name]) for name in ('source', 'hellaswag')
             if name in values}
  return {name: list(value) if isinstance(value, tuple) else value
          for name, value in values.items()}


def _without_path(name: str) -> str:
  """A name as it is; of an absolute path its last part."""
  path = os.path.expanduser(name)
  return os.path.basename(os.path.normpath(path)) if os.path.isabs(path) else name
