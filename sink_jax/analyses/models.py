"""The models that analyses measure, and their inputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from sink_jax.arguments import check_known, check_least
from sink_jax.data.sources import DocumentSource
from sink_jax.data.tokenizer import BOS
from sink_jax.evaluate import inputs as made
from sink_jax.evaluate.inputs import KINDS, Inputs
from sink_jax.evaluate.probe import probe, probed
from sink_jax.evaluate.sink_report import SinkReport
from sink_jax.io.paths import is_workdir
from sink_jax.io.terminal import Progress
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import Run
from sink_jax.models.sharding import make_mesh
from sink_jax.pretrained.load import load_pretrained
from sink_jax.train.load import load_run
from sink_jax.train.workdir import read_config, read_experiment

_TOKENS_AT_A_TIME = 16384
# A corpus as large as the Pile is not read to its end (Appendix B.2).
_PILE = (
  'Pile-CC',
  'PubMed Central',
  'ArXiv',
  'Github',
  'FreeLaw',
  'StackExchange',
  'USPTO Backgrounds',
  'PubMed Abstracts',
  'Gutenberg (PG-19)',
  'Wikipedia (en)',
  'DM Mathematics',
  'Ubuntu IRC',
  'EuroParl',
  'HackerNews',
  'PhilPapers',
  'NIH ExPorter',
  'Enron Emails',
)


@dataclasses.dataclass(frozen=True)
class InputOptions:
  """The inputs of a model, and how many sequences it reads at a time."""

  #: natural (text), random (tokens drawn at random) or repeat (one token, over and over).
  inputs: Literal['natural', 'random', 'repeat'] = 'natural'
  #: where text comes from: a file or a folder of one kind (.jsonl, .txt or .md), or a source
  #: such as Jsonl(path='pile.jsonl', domain_field='meta.pile_set_name'); by default the
  #: documentation in Python's standard library.
  source: str = ''
  sequences: int = 100  # number of sequences.
  #: how many suffice, if the text has fewer documents of that length; by default all.
  least: int | None = None
  length: int = 64  # tokens of a sequence.
  #: how sequences begin: none, tokenizer (as the tokenizer begins a text; the default with text) or
  #: force (always one BOS).
  bos: Literal['none', 'tokenizer', 'force'] | None = None
  seed: int = 0  # seed of the random tokens.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # dtype of activations.
  batch_size: int | None = None  # sequences at a time; by default as many as have 16,384 tokens.

  def __post_init__(self):
    for name, value, choices in (
      ('inputs', self.inputs, KINDS),
      ('bos', self.bos or 'none', BOS),
      ('dtype', self.dtype, ('float32', 'bfloat16')),
    ):
      check_known(value, choices, f'--{name}: there is no')
    check_least(self, sequences=1, least=1, length=2, seed=0, batch_size=1)

  def at_a_time(self, length: int) -> int:
    """The number of sequences of a length that are measured at a time."""
    return self.batch_size or max(1, _TOKENS_AT_A_TIME // length)


class Model:
  """A model under analysis: it makes its inputs, and keeps their descriptions for the record.

  given: a caller's inputs, instead of those that the options ask for. blocks: those with attention,
  from 1.
  """

  def __init__(self, run: Run, options: InputOptions, given: Inputs | None = None):
    self.run, self.options, self.given = run, options, given
    self.blocks = [n + 1 for n in run.config.attention_layers]
    self.descriptions: list[dict[str, Any]] = []

  @property
  def config(self) -> ModelConfig:
    """The config of the run as a probe computes it, with the dtype of the options."""
    return probed(self.run.config, self.options.dtype)

  def inputs(self, kind: str = 'sequences', **changes: Any) -> Inputs:
    """Inputs by the options and `changes` to them; a ValueError if they do not fit the model.

    kind: 'sequences' are documents' first tokens, 'long text' joins documents, and 'domains' has
    `sequences` of every domain.
    """
    options = dataclasses.replace(self.options, **changes)
    if self.given is None:
      if kind != 'long text':  # a cache may read more tokens than the model has positions
        self.run.config.attention.position.check_length(options.length)
      inputs = make_inputs(self.run, options, kind)
    else:
      inputs = self.given
    if kind == 'domains' and not inputs.description.get('domains'):
      raise ValueError(
        'domains compares texts: leave out tokens and --inputs, and name a --source= of texts.'
      )
    self.descriptions.append(inputs.description)
    return inputs

  def batches(self, tokens: np.ndarray, size: int | None = None) -> Iterator[np.ndarray]:
    """Batches of tokens (S, T) in turn, `size` sequences each; shows how many are done."""
    size = size or self.options.at_a_time(tokens.shape[1])
    with contextlib.closing(
      Progress(
        f'{self.run.name}, T = {tokens.shape[1]}',
        len(tokens),
        unit='sequence',
        enabled=len(tokens) > size,
      )
    ) as progress:
      for start in range(0, len(tokens), size):
        yield tokens[start : start + size]
        progress.update(min(start + size, len(tokens)))

  def report(self, tokens: np.ndarray) -> SinkReport:
    """The probe of tokens (S, T)."""
    return probe(
      self.run, tokens, dtype=self.options.dtype, batch_size=self.options.at_a_time(tokens.shape[1])
    )


def load(
  checkpoint: str | None,
  workdir: str | None = None,
  dtype: str = 'float32',
  fsdp: int = 1,
  plugins: str = '',
) -> Run:
  """Loads a published model, its parameters split over `fsdp` devices, or a run, with `plugins`."""
  if checkpoint is None:
    assert workdir is not None
    if fsdp > 1:
      raise ValueError(f'--fsdp={fsdp} splits published models only: leave it out with --workdir.')
    run = load_run(workdir, plugins=plugins)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=dtype))
  devices = jax.device_count()
  if fsdp < 1 or devices % fsdp:
    raise ValueError(f'--fsdp={fsdp} does not divide the {devices} devices of this machine.')
  return load_pretrained(checkpoint, dtype=dtype, mesh=make_mesh(-1, fsdp) if fsdp > 1 else None)


def make_inputs(run: Run, options: InputOptions, kind: str = 'sequences') -> Inputs:
  """Inputs in the tokens of a model; see `Model.inputs`."""
  sequences, length, text = options.sequences, options.length, options.inputs == 'natural'
  size = run.config.vocab_size
  if not size:
    raise ValueError(f'{run.name} has continuous inputs: analyses need a model of tokens.')
  if text and not options.source and makes_its_tokens(run):
    return stored_inputs(run, sequences, length)
  try:
    tokenizer = run.tokenizer
  except (ValueError, OSError) as error:
    if text:
      raise ValueError(
        f'{run.name}: no tokenizer for text: {str(error).rstrip(".")}; --inputs=random and '
        '--inputs=repeat need none.'
      ) from None
    tokenizer = None
  if text:
    make = {'sequences': made.natural, 'long text': made.long_text, 'domains': made.by_domain}[kind]
    more: dict[str, Any] = {'domains': _PILE} if kind == 'domains' else {}
    if kind == 'sequences' and options.least:
      more = {'least': options.least}
    return make(
      tokenizer,
      made.open_source(options.source),
      sequences=sequences,
      length=length,
      bos=options.bos or 'tokenizer',
      **more,
    )
  # A table of embeddings is often longer than the list of tokens; some tokenizers have tokens that
  # were added after the training.
  return made.random_tokens(
    min(size, tokenizer.vocab_size) if tokenizer else size,
    sequences=sequences,
    length=length,
    bos=options.bos or 'none',
    seed=options.seed,
    tokenizer=tokenizer,
    repeat=options.inputs == 'repeat',
  )


def makes_its_tokens(run: Run) -> bool:
  """True for a run of a synthetic task, whose probe tokens stand for text."""
  if run.folder is None or not is_workdir(run.folder):
    return False
  return not isinstance(read_experiment(run.folder).data.source, DocumentSource)


def stored_inputs(run: Run, sequences: int | None = None, length: int | None = None) -> Inputs:
  """The probe tokens that a run stores, the first ones if numbers are given.

  Raises:
    ValueError: it stores none, or fewer.
  """
  tokens = run.probe_tokens
  if tokens is None or run.folder is None:
    raise ValueError(f'{run.name} stores no probe tokens: use --inputs=random.')
  asked = {'sequences': sequences, 'length': length}
  for (name, wanted), stored in zip(asked.items(), tokens.shape):
    if wanted is not None and wanted > stored:
      raise ValueError(
        f'--{name}={wanted}: the run stores {tokens.shape[0]} sequences of {tokens.shape[1]} '
        f'tokens; choose up to {stored}.'
      )
  source = read_config(run.folder)['data']['source']
  words = f'probe_tokens.npy ({source})'
  return made.stored(np.asarray(tokens)[:sequences, :length], run.config.vocab_size, words)
