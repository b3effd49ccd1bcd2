"""Loads models to analyse with their tokenizers, and makes the inputs for them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from sink_jax.analyses.options import Options
from sink_jax.data.sources import DocumentSource
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.evaluate import inputs
from sink_jax.evaluate.inputs import Inputs
from sink_jax.io.paths import AnyPath
from sink_jax.models.run import Run
from sink_jax.pretrained.load import load_pretrained, load_run
from sink_jax.train.config import from_dict
from sink_jax.train.workdir import is_workdir, read_config
from sink_jax.train.sharding import make_mesh


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model and its tokenizer.

  Attributes:
    run: the model.
    tokenizer: None where there is none.
    problem: why there is no tokenizer; matters only where text is asked for.
    task: the synthetic task that a run has learned, whose stored probe tokens then take the place
      of text; '' of any other model.
    loaded_by: names of the options that decided how the model was loaded.
  """

  run: Run
  tokenizer: TextTokenizer | None = None
  problem: str = 'a model without a folder has no tokenizer'
  task: str = ''
  loaded_by: tuple[str, ...] = ()

  @classmethod
  def of_checkpoint(cls, path_or_name: str, dtype: str = 'float32', fsdp: int = 1) -> LoadedModel:
    """Loads a published model, its parameters split over `fsdp` devices; see `load_pretrained`."""
    if (devices := jax.device_count()) % fsdp:
      raise ValueError(f'--fsdp={fsdp} does not divide the {devices} devices of this machine.')
    # -1: the data axis takes the other factor of the number of devices.
    mesh = make_mesh(-1, fsdp) if fsdp > 1 else None
    model = cls.of_run(load_pretrained(path_or_name, dtype=dtype, mesh=mesh))
    return dataclasses.replace(model, loaded_by=('dtype', 'fsdp'))

  @classmethod
  def of_workdir(cls, workdir: str | AnyPath, dtype: str = 'float32') -> LoadedModel:
    """Loads a run trained with sink_jax, its activations in `dtype`; raises as `load_run`."""
    run = load_run(workdir)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=dtype))
    return dataclasses.replace(cls.of_run(run), loaded_by=('dtype',))

  @classmethod
  def of_run(cls, run: Run) -> LoadedModel:
    """Adds the tokenizer to a model that is loaded already."""
    task = _task(run)
    try:
      tokenizer = run.tokenizer
      assert isinstance(tokenizer, TextTokenizer)  # what both loaders read
      return cls(run, tokenizer, task=task)
    except (ValueError, OSError) as error:  # an analysis of random tokens does not need it
      problem = str(error).rstrip('.')
      return cls(run, problem=problem, task=task)

  def text_tokenizer(self, drawn: bool = True) -> TextTokenizer:
    """Returns the tokenizer.

    Args:
      drawn: whether tokens drawn at random can take the place of text, for the error.

    Raises:
      ValueError: there is none.
    """
    if self.tokenizer is None:
      advice = '; --inputs=random and --inputs=repeat need none' if drawn else ''
      raise ValueError(f'{self.run.name}: no tokenizer for text: {self.problem}{advice}.')
    return self.tokenizer


def make_inputs(model: LoadedModel, options: Options) -> Inputs:
  """Makes the inputs that the options ask for, in the tokens of this model.

  Raises:
    ValueError: no tokenizer, too little text, more tokens than the model has positions, or a
      BOS protocol that the tokenizer cannot keep.
  """
  check_length(model.run, options.length)
  sequences, length = options.sequences, options.length
  if options.inputs == 'natural':
    if model.task and not options.source:
      options.say(f'{model.run.name}: no text, but the probe tokens of {model.task}')
      return _stored(model, options)
    if not options.source:
      options.say('no --source: text is the documentation in the Python standard library')
    return inputs.natural(model.text_tokenizer(), inputs.open_source(options.source),
                          sequences=sequences, length=length, bos=options.bos or 'tokenizer')
  # A table of embeddings is often padded beyond the ids of the tokenizer, and the vectors of the
  # padding belong to no token; some tokenizers have tokens that were added after the training.
  tokenizer, vocab_size = model.tokenizer, model.run.config.vocab_size
  if tokenizer:
    vocab_size = min(vocab_size, tokenizer.vocab_size)
  if not vocab_size:
    raise ValueError(f'{model.run.name} has continuous inputs and no tokens to draw from.')
  # Section 3.3 leaves the BOS out of random and repeated tokens, so 'none' is the default.
  return inputs.random_tokens(
      vocab_size, sequences=sequences, length=length, bos=options.bos or 'none', seed=options.seed,
      tokenizer=tokenizer, repeat=options.inputs == 'repeat')


def check_length(run: Run, length: int) -> None:
  """Checks that a model has positions for this many tokens.

  Raises:
    ValueError: it has not.
  """
  try:
    run.config.attention.position.check_length(length)
  except ValueError as error:
    raise ValueError(f'{run.name}, --length or --lengths: {error}') from None


def _task(run: Run) -> str:
  """The synthetic task that a run has learned; '' of any other model."""
  if run.folder is None or not is_workdir(run.folder):
    return ''
  source = from_dict(read_config(run.folder)).data.source
  return '' if isinstance(source, DocumentSource) else repr(source)


def _stored(model: LoadedModel, options: Options) -> Inputs:
  """Inputs of the probe tokens that a run of a synthetic task has stored."""
  tokens = model.run.probe_tokens
  # The stored inputs of a task of continuous inputs are features (S, T, F), not token ids.
  if tokens is None or tokens.ndim != 2:
    raise ValueError(f'{model.run.name} stores no probe tokens, and {model.problem}: use '
                     '--inputs=random.')
  for name, wanted, stored in zip(('sequences', 'length'), (options.sequences, options.length),
                                  tokens.shape):
    if wanted > stored:
      raise ValueError(f'--{name}={wanted}: {model.task} makes its own tokens, and the run '
                       f'stores {tokens.shape[0]} sequences of {tokens.shape[1]} of them.')
  return inputs.stored(np.asarray(tokens)[:options.sequences, :options.length],
                       model.run.config.vocab_size, f'probe tokens of {model.task}')
