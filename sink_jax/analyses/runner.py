"""One analysis of some models, one model at a time."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from sink_jax.analyses import loaded_models
from sink_jax.analyses.loaded_models import LoadedModel
from sink_jax.analyses.options import Options
from sink_jax.analyses.registry import Analysis, find
from sink_jax.data.inputs import Inputs, stored
from sink_jax.evaluate.finite import find_not_finite, not_finite
from sink_jax.models.precision import matmul_precision
from sink_jax.models.run import Run
from sink_jax.train.checkpoint import CheckpointError

_FAILURES = (ValueError, CheckpointError, OSError, jax.errors.JaxRuntimeError)  # such as no memory
_MESSAGE = 500  # characters


def measure_all(analysis: Analysis, models: Sequence[tuple[str, Callable[[], LoadedModel]]],
                options: Options, write: Callable[[list, list], None] = lambda results, failed: None
                ) -> tuple[list[dict], list[dict]]:
  """What the analysis finds in each model, ready for JSON; what fails in one spares the others.

  Args:
    models: names, and what loads them; each is loaded when its turn comes, and none is kept.
    write: called after every model with all that there is so far.

  Returns:
    The results of the models that succeeded, and {'model', 'error'} of those that did not.

  Raises:
    ValueError, CheckpointError, OSError, JaxRuntimeError: from a model that is the only one.
  """
  results, failed = [], []
  for number, (name, load) in enumerate(models, 1):
    options.say(f'[{number}/{len(models)}] {name}')
    try:
      results.append(measure(analysis, load(), options))
    except _FAILURES as error:
      if len(models) == 1:
        raise
      message = ' '.join(str(error).split())[:_MESSAGE]
      options.say(f'{name} failed: {message}')
      failed.append({'model': _without_path(name), 'error': message})
    write(results, failed)
  return results, failed


def measure(analysis: Analysis, subject: LoadedModel, options: Options,
            given: Inputs | None = None) -> dict:
  """What the analysis finds in one model, with its 'checkpoint' and the 'options' that it read.

  And 'matmul_precision', that of its matrix products: 'highest' where activations are float32.

  Args:
    given: inputs in place of those that the options ask for.

  Raises:
    ValueError: the options or the inputs do not fit the model; names the option. A number of
      the result is not finite; names the number, and a parameter or the remedy.
  """
  module, name = analysis.module(), subject.run.name or 'model'
  make = getattr(module, 'make_inputs', loaded_models.make_inputs)
  inputs = make(subject, options) if given is None else given
  options.say(f'{name}: {inputs.tokens.shape[0]} sequences of {inputs.tokens.shape[1]} tokens')
  told = dataclasses.replace(options, batch_size=options.at_a_time(options.length))
  takes = {*analysis.takes(tokens=given is not None), *subject.loaded_by}
  found = module.measure(subject.run, inputs, told)
  if place := find_not_finite(found):
    raise not_finite(subject.run, f'{name}: {".".join(map(str, place))}', options.dtype)
  dtype = options.dtype if 'dtype' in takes else subject.run.config.dtype
  return found | {'checkpoint': checkpoint(subject.run), 'options': _plain(told, takes),
                  'matmul_precision': matmul_precision('float32' if analysis.float32 else dtype)}


def checkpoint(run: Run) -> dict:
  """Which model a result is of: folder (its own name alone), step, dtype, number of parameters.

  A snapshot of the hub has the folder of its repository, and its revision.
  """
  found = {'folder': None, 'step': run.step, 'dtype': run.config.dtype,
           'parameters': sum(x.size for x in jax.tree.leaves(run.params))}
  if run.folder is not None:
    folder = Path(run.folder).absolute()
    found['folder'] = folder.name
    if re.fullmatch('[0-9a-f]{40}', folder.name):
      found |= {'folder': folder.parents[1].name if folder.parent.name == 'snapshots'
                else folder.name, 'revision': folder.name}
  return found


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
    TypeError: there is no such option; names the nearest.
  """
  analysis = find(name)
  options = analysis.options(analysis.takes(tokens=tokens is not None), **options)
  subject, given = LoadedModel.of_run(run), None
  if tokens is not None:
    if getattr(analysis.module(), 'OWN_INPUTS', False):
      raise ValueError(f'{name} compares inputs of its own: leave out tokens, and say which by '
                       'inputs=, source=, sequences= and length=.')
    given = _given(subject, tokens, getattr(analysis.module(), 'ANY_LENGTH', False))
    sequences, length = given.tokens.shape
    options = dataclasses.replace(options, sequences=sequences, length=length)
  result = measure(analysis, subject, options, given)
  if plot is not None:
    analysis.module().draw([result], plot)
  return result


def loaders(analysis: Analysis, checkpoints: list[str], workdirs: list[str],
            options: Options) -> list[tuple[str, Callable[[], LoadedModel]]]:
  """Names of published models and of runs of ours, and what loads each."""
  companions = getattr(analysis.module(), 'companions', list)
  published = lambda name: lambda: LoadedModel.of_checkpoint(name, options.dtype, options.fsdp)
  trained = lambda name: lambda: LoadedModel.of_workdir(os.path.expanduser(name), options.dtype)
  return [*((name, published(name)) for name in companions(checkpoints)),
          *((name, trained(name)) for name in workdirs)]


def _given(subject, tokens, any_length):
  """Tokens of a caller as inputs of a model; a ValueError where they do not fit it."""
  run, tokens = subject.run, np.asarray(tokens)
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(f'tokens must be integers of shape (S, T), not {tokens.dtype} of shape '
                     f'{tokens.shape}.')
  if not tokens.size:
    raise ValueError(f'tokens of shape {tokens.shape} are empty: give one sequence or more.')
  size = run.config.vocab_size
  if size and not 0 <= tokens.min() <= tokens.max() < size:
    raise ValueError(f'tokens reach from {tokens.min()} to {tokens.max()}, and the vocabulary has '
                     f'{size} entries: use the tokenizer of the model.')
  if not any_length:
    loaded_models.check_length(run, tokens.shape[1])
  made = stored(tokens, size, 'tokens of the caller')
  bos = made.description['bos'] | {'protocol': 'as given'}
  return dataclasses.replace(made, tokenizer=subject.tokenizer,
                             description=made.description | {'kind': 'given', 'bos': bos})


def _plain(options, names):
  """Options of these names for JSON: lists for tuples, files by their own names."""
  found = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)
           if field.name in names}
  found |= {name: _without_path(found[name]) for name in ('source', 'hellaswag') if name in found}
  return {name: list(value) if isinstance(value, tuple) else value
          for name, value in found.items()}


def _without_path(name):
  """A name as it is, and of a path on this machine its last part."""
  path = os.path.expanduser(name)
  return os.path.basename(os.path.normpath(path)) if os.path.isabs(path) else name
