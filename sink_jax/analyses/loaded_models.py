"""Models to analyse, with their tokenizers, and the inputs made for them."""

from __future__ import annotations

import dataclasses

from sink_jax.analyses.options import Options
from sink_jax.data import inputs
from sink_jax.data.documents import DocumentSource
from sink_jax.data.inputs import Inputs
from sink_jax.data.text_tokenizer import TextTokenizer
from sink_jax.models.run import Run
from sink_jax.pretrained.load import load_pretrained, load_run
from sink_jax.train.experiment import from_dict
from sink_jax.train.run_dir import is_workdir, read_config
from sink_jax.train.sharding import make_mesh


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model and its tokenizer.

  problem: why there is no tokenizer. task: the synthetic task that a run learned; its own
  probe tokens then stand for text. loaded_by: names of the options that it was loaded by.
  """

  run: Run
  tokenizer: TextTokenizer | None = None
  problem: str = 'a model without a folder has no tokenizer'
  task: str = ''
  loaded_by: tuple[str, ...] = ()

  @classmethod
  def of_checkpoint(cls, path_or_name, dtype: str = 'float32', fsdp: int = 1) -> LoadedModel:
    """A published model, its parameters split over `fsdp` devices; see `load_pretrained`."""
    mesh = make_mesh(-1, fsdp) if fsdp > 1 else None
    subject = cls.of_run(load_pretrained(path_or_name, dtype=dtype, mesh=mesh))
    return dataclasses.replace(subject, loaded_by=('dtype', 'fsdp'))

  @classmethod
  def of_workdir(cls, workdir, dtype: str = 'float32') -> LoadedModel:
    """A training run of ours, its activations in `dtype`; see `load_run` for the errors."""
    run = load_run(workdir)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=dtype))
    return dataclasses.replace(cls.of_run(run), loaded_by=('dtype',))

  @classmethod
  def of_run(cls, run: Run) -> LoadedModel:
    """A model that is loaded already."""
    task = _task(run)
    try:
      tokenizer = run.tokenizer
      assert isinstance(tokenizer, TextTokenizer)  # what both loaders read
      return cls(run, tokenizer, task=task)
    except (ValueError, OSError) as error:  # matters to text alone
      problem = str(error).rstrip('.')
      return cls(run, problem=problem, task=task)

  def text_tokenizer(self, drawn: bool = True) -> TextTokenizer:
    """The tokenizer.

    Args:
      drawn: whether tokens drawn at random would do in place of text.

    Raises:
      ValueError: there is none, or it is not this model's.
    """
    if self.tokenizer is None:
      advice = '; --inputs=random and --inputs=repeat need none' if drawn else ''
      raise ValueError(f'{self.run.name}: no tokenizer for text: {self.problem}{advice}.')
    self.tokenizer.check_vocabulary(self.run.config.vocab_size)
    return self.tokenizer


def make_inputs(subject: LoadedModel, options: Options) -> Inputs:
  """The inputs that the options ask for, in the tokens of this model.

  Raises:
    ValueError: no tokenizer, too little text, more tokens than the model has positions, or a
      BOS protocol that the tokenizer cannot keep.
  """
  check_length(subject.run, options.length)
  size = dict(sequences=options.sequences, length=options.length)
  if options.inputs == 'natural':
    if subject.task and not options.source:
      options.say(f'{subject.run.name}: no text, but the probe tokens of {subject.task}')
      return _stored(subject, options)
    if not options.source:
      options.say('no --source: text is the documentation in the Python standard library')
    return inputs.natural(subject.text_tokenizer(), inputs.open_source(options.source),
                          bos=options.bos or 'tokenizer', **size)
  tokenizer = subject.tokenizer and subject.text_tokenizer()
  vocab_size = tokenizer.vocab_size if tokenizer else subject.run.config.vocab_size
  if not vocab_size:
    raise ValueError(f'{subject.run.name} has continuous inputs and no tokens to draw from.')
  make = inputs.random_tokens if options.inputs == 'random' else inputs.repeated_token
  return make(vocab_size, bos=options.bos or 'none', seed=options.seed, tokenizer=tokenizer, **size)


def check_length(run: Run, length: int) -> None:
  """Raises a ValueError where the model has no position for so many tokens."""
  try:
    run.config.attention.position.check_length(length)
  except ValueError as error:
    raise ValueError(f'{run.name}, --length or --lengths: {error}') from None


def _task(run):
  """The synthetic task that a run of ours learned; '' of any other model."""
  if run.folder is None or not is_workdir(run.folder):
    return ''
  source = from_dict(read_config(run.folder)).data.source
  return '' if isinstance(source, DocumentSource) else repr(source)


def _stored(subject, options):
  tokens = subject.run.probe_tokens
  if tokens is None or tokens.ndim != 2:
    raise ValueError(f'{subject.run.name} stores no probe tokens, and {subject.problem}: use '
                     '--inputs=random.')
  for name, wanted, there in zip(('sequences', 'length'), (options.sequences, options.length),
                                 tokens.shape):
    if wanted > there:
      raise ValueError(f'--{name}={wanted}: {subject.task} makes its own tokens, and the run '
                       f'stores {tokens.shape[0]} sequences of {tokens.shape[1]} of them.')
  return inputs.stored(tokens[:options.sequences, :options.length],
                       subject.run.config.vocab_size, f'probe tokens of {subject.task}')
