"""The options of analyses, with their help in comments, and errors for those without an effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from sink_jax.arguments import check_known, check_least
from sink_jax.evaluate import EPSILON

# Of a batch where no batch_size is given, whatever the length of its sequences.
_TOKENS_AT_A_TIME = 16384
# Names of the options that `loaded_models.make_inputs` reads.
INPUTS = ('inputs', 'source', 'sequences', 'length', 'bos', 'seed')
DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class InputOptions:
  """What a person chooses for the inputs of a model."""

  #: natural (text), random (tokens drawn at random) or repeat (one token, over and over).
  inputs: str = 'natural'
  #: where text comes from: a folder of .txt files, a .jsonl file, or a source such as
  #: Jsonl(path='pile.jsonl', domain_field='meta.pile_set_name'); by default the documentation in
  #: Python's standard library.
  source: str = ''
  sequences: int = 100  # how many.
  length: int = 64  # tokens of each.
  #: how sequences begin: none, tokenizer (as the tokenizer begins a text; the default with text) or
  #: force (one BOS, whatever it does).
  bos: str = ''
  seed: int = 0  # of tokens drawn at random.
  #: of activations, and of a published model's parameters: float32 or bfloat16.
  dtype: str = 'float32'
  fsdp: int = 1  # devices over which the parameters of a published model are split.

  def __post_init__(self):
    from sink_jax.data.tokenizer import BOS  # here, so that --help does not wait for numpy
    from sink_jax.evaluate.inputs import KINDS

    for name, choices in (('inputs', KINDS), ('bos', ('', *BOS)), ('dtype', DTYPES)):
      check_known(getattr(self, name), choices, f'--{name}: there is no')
    # The least length has a token beside the first.
    check_least(self, sequences=1, length=2, seed=0, fsdp=1)


@dataclasses.dataclass(frozen=True)
class Options(InputOptions):
  """What a person chooses for an analysis; each analysis reads the options that concern it."""

  lengths: tuple[int, ...] = (16, 32, 64, 128, 256)  # of a sweep over lengths, such as 16,64,256.
  epsilons: tuple[float, ...] = (EPSILON,)  # thresholds of the sink rate, such as 0.2,0.3.
  #: blocks from 0; by default those that the analysis chooses.
  layers: tuple[int, ...] | None = None
  #: heads from 0; by default those that the analysis chooses.
  heads: tuple[int, ...] | None = None
  #: token positions from 2, to replace or swap; by default those that the analysis chooses.
  positions: tuple[int, ...] | None = None
  cache_size: int = 64  # tokens that a cache keeps.
  sinks: int = 4  # how many of them are the first tokens of the text.
  #: sequences of `length` tokens at a time. Of sequences of another length, as many as have the
  #: same number of tokens in all; by default 16,384 tokens. Attention maps and caches are batched
  #: by their memory instead.
  batch_size: int | None = None
  #: a local .jsonl with the questions of HellaSwag; by default they are downloaded.
  hellaswag: str = ''
  limit: int | None = None  # how many questions of it; by default all.
  # Not compared: every lambda is a function of its own, and options that differ in nothing else
  # should be equal.
  #: is called with a line of progress.
  say: Callable[[str], None] = dataclasses.field(default=lambda line: None, compare=False)

  def __post_init__(self):
    super().__post_init__()
    # The least cache has a recent token beside a sink.
    check_least(self, batch_size=1, limit=1, cache_size=2, sinks=1)
    # Position 1 is the one that others take the place of, so positions begin at 2.
    for name, least in (('lengths', 2), ('layers', 0), ('heads', 0), ('positions', 2)):
      values = getattr(self, name)
      if values is not None and (not values or min(values) < least):
        first = least + (name in ('layers', 'heads'))  # the command line counts these from 1
        raise ValueError(f'--{name}: write numbers from {first} on, such as {first},{first + 1}.')
    if not self.epsilons or not all(0 < epsilon < 1 for epsilon in self.epsilons):
      raise ValueError(f'--epsilons={",".join(f"{e:g}" for e in self.epsilons)}: importance lies '
                       'between 0 and 1; the paper uses 0.3.')
    for name in ('epsilons', 'lengths'):  # a frozen dataclass has no other way to normalise
      object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))

  @property
  def epsilon(self) -> float:
    """The threshold of an analysis that takes a single one.

    Raises:
      ValueError: there are several.
    """
    first, *others = self.epsilons
    if others:
      raise ValueError('--epsilons: this analysis takes one threshold, such as --epsilons=0.3.')
    return first

  def at_a_time(self, length: int) -> int:
    """Returns how many sequences of `length` tokens are in a batch; see `batch_size`."""
    # A batch_size counts sequences of `length` tokens; what memory bounds is their tokens.
    tokens = self.batch_size * self.length if self.batch_size else _TOKENS_AT_A_TIME
    return max(1, tokens // length)


def check_given(given: Collection[str], takes: Collection[str], what: str, kind: str) -> None:
  """Checks that every option that a person gives makes a difference.

  Args:
    given: names of the options that are given.
    takes: names of the options that are read.
    what: the name of what reads them, for the error.
    kind: of the inputs; '' for every kind.

  Raises:
    ValueError: there is no such option, and the nearest is named; or it would change nothing.
  """
  names = [field.name for field in dataclasses.fields(Options)]
  flags = ', '.join(f'--{name}' for name in names if name in takes)
  for name in given:
    check_known(name, names, f'{what}: there is no option')
    if name != 'say' and name not in takes:
      raise ValueError(f'--{name} would change nothing: {what} takes {flags}.')
  # Which of these two is read depends on the value of a third option, so `takes` has both.
  if 'source' in given and kind in ('random', 'repeat'):
    raise ValueError(f'--source would change nothing: --inputs={kind} reads no text.')
  if 'seed' in given and kind == 'natural':
    raise ValueError('--seed would change nothing: nothing is drawn at random without '
                     '--inputs=random or --inputs=repeat.')
