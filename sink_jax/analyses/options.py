"""The options of analyses, and errors for those that would change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from sink_jax.arguments import nearest
from sink_jax.data.inputs import BOS, KINDS
from sink_jax.evaluate.sinks import EPSILON

# Of a batch where no batch_size is given, whatever the length of its sequences.
_TOKENS_AT_A_TIME = 16384
# Names of the options that `loaded_models.make_inputs` reads.
INPUTS = ('inputs', 'source', 'sequences', 'length', 'bos', 'seed')
DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class Options:
  """What a person chooses for an analysis; each analysis reads the options that concern it.

  Attributes:
    inputs: 'natural', 'random' or 'repeat'.
    source: where text comes from; '' for the documentation in Python's standard library.
    sequences: S of the inputs.
    length: T of the inputs.
    lengths: T of a sweep over lengths, in ascending order.
    epsilons: thresholds of the sink rate, in ascending order.
    bos: how sequences begin; '' means 'tokenizer' for text, 'none' for tokens drawn at random.
    seed: of tokens drawn at random.
    layers: blocks from 0; None leaves the choice to the analysis.
    heads: heads from 0; None likewise.
    positions: token positions from 1; None likewise.
    cache_size: tokens that a cache keeps.
    sinks: how many of them are the first tokens of the text.
    dtype: of the activations.
    batch_size: sequences of `length` tokens at a time. Of sequences of another length, as many as
      have the same number of tokens in all; None for 16,384 tokens. Attention maps and caches are
      batched by their memory instead.
    fsdp: devices over which the parameters of a published model are split.
    hellaswag: a local file with the questions of HellaSwag; '' downloads them.
    limit: how many questions; None for all.
    say: is called with a line of progress.
  """

  inputs: str = 'natural'
  source: str = ''
  sequences: int = 100
  length: int = 64
  lengths: tuple[int, ...] = (16, 32, 64, 128, 256)
  epsilons: tuple[float, ...] = (EPSILON,)
  bos: str = ''
  seed: int = 0
  layers: tuple[int, ...] | None = None
  heads: tuple[int, ...] | None = None
  positions: tuple[int, ...] | None = None
  cache_size: int = 64
  sinks: int = 4
  dtype: str = 'float32'
  batch_size: int | None = None
  fsdp: int = 1
  hellaswag: str = ''
  limit: int | None = None
  # Not compared: every lambda is a function of its own, and options that differ in nothing else
  # should be equal.
  say: Callable[[str], None] = dataclasses.field(default=lambda line: None, compare=False)

  def __post_init__(self):
    for name, choices in (('inputs', KINDS), ('bos', ('', *BOS)), ('dtype', DTYPES)):
      if getattr(self, name) not in choices:
        raise ValueError(f'--{name}={getattr(self, name)}: choose '
                         f'{", ".join(filter(None, choices))}.')
    # The least length has a token beside the first; the least cache a recent token beside a sink.
    for name, least in (('sequences', 1), ('length', 2), ('batch_size', 1), ('limit', 1),
                        ('seed', 0), ('cache_size', 2), ('sinks', 1), ('fsdp', 1)):
      value = getattr(self, name)
      if value is not None and value < least:
        raise ValueError(f'--{name}={value} must be at least {least}.')
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
    TypeError: there is no such option; names the nearest.
    ValueError: an option would change nothing.
  """
  names = [field.name for field in dataclasses.fields(Options)]
  flags = ', '.join(f'--{name}' for name in names if name in takes)
  for name in given:
    if name not in names:
      close = nearest(name, names)
      hint = f' Did you mean {close!r}?' if close else ''
      raise TypeError(f'There is no option {name!r}.{hint} {what} takes {flags}.')
    if name != 'say' and name not in takes:
      raise ValueError(f'--{name} would change nothing: {what} takes {flags}.')
  # Which of these two is read depends on the value of a third option, so `takes` has both.
  if 'source' in given and kind in ('random', 'repeat'):
    raise ValueError(f'--source would change nothing: --inputs={kind} reads no text.')
  if 'seed' in given and kind == 'natural':
    raise ValueError('--seed would change nothing: nothing is drawn at random without '
                     '--inputs=random or --inputs=repeat.')
