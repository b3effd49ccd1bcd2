"""Every analysis of published models. A new one is a module and an entry here, with its options.

A module has the functions of `interface.AnalysisModule`. What else an analysis needs stands in its
entry: a function that makes its inputs, for example, or the options that its `measure` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from sink_jax.analyses import (
  angles,
  chat,
  domains,
  heads,
  hellaswag,
  kinds,
  last_query,
  lengths,
  loaded_models,
  maps,
  norms,
  positions,
  repeated_tokens,
  scale,
  streaming,
)
from sink_jax.analyses.interface import AnalysisModule, Result
from sink_jax.analyses.loaded_models import LoadedModel
from sink_jax.analyses.options import INPUTS, Options, check_given
from sink_jax.arguments import check_known
from sink_jax.evaluate.inputs import Inputs
from sink_jax.io.terminal import text_table

# Thresholds of the curves against the length, around the paper's 0.3.
_MORE = (0.1, 0.2, 0.3, 0.4, 0.5)


@dataclasses.dataclass(frozen=True)
class Analysis:
  """One analysis: its module, and what differs from the other analyses.

  Attributes:
    module: measures, draws and tabulates.
    figure: the figure or table of the paper that it reproduces.
    line: what it shows, in one line.
    reads: names of the options that `measure` reads.
    defaults: values of options that differ from those of `Options`.
    inputs: names of the options that `make_inputs` reads.
    make_inputs: makes the inputs for a model.
    compares_inputs: whether the analysis compares several sets of inputs that it makes itself, so
      that a caller's tokens cannot take their place.
    any_length: whether the inputs may be longer than the positions that the model has.
    every_kind: whether natural inputs bring random ones with them.
    thresholds: whether it takes several epsilons.
    float32: whether its activations are float32, whatever the dtype of the model.
    check_all: takes a length and an epsilon, and measures models of the analysis's own making;
      None where the analysis needs a model from the user.
    check_first: takes the options, before a model is loaded, and raises a ValueError where
      something else that `measure` needs is not here, such as a package.
    companions: takes names of checkpoints, and returns those to load when these are given.
  """

  module: AnalysisModule
  figure: str
  line: str
  reads: tuple[str, ...]
  defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
  inputs: tuple[str, ...] = INPUTS
  make_inputs: Callable[[LoadedModel, Options], Inputs] = loaded_models.make_inputs
  compares_inputs: bool = False
  any_length: bool = False
  every_kind: bool = False
  thresholds: bool = False
  float32: bool = False
  check_all: Callable[[int, float], list[Result]] | None = None
  check_first: Callable[[Options], None] = lambda options: None
  companions: Callable[[list[str]], list[str]] = list

  @property
  def name(self) -> str:
    """The name of its module, by which a person asks for it."""
    return self.module.__name__.rpartition('.')[2]

  def takes(self, *, tokens: bool = False, checkpoints: bool = False,
            workdirs: bool = False) -> tuple[str, ...]:
    """Names of the options that make a difference.

    Args:
      tokens: whether a caller gives the inputs.
      checkpoints: whether published models are to be loaded, which takes options too.
      workdirs: whether runs trained with sink_jax are to be loaded.
    """
    # A published model is loaded in `dtype`, parameters included, whatever the analysis computes
    # in. The parameters of a run stay as they are stored, so where the analysis is of float32
    # nothing is left that `dtype` could change.
    loading = {'dtype': checkpoints or workdirs and not self.float32, 'fsdp': checkpoints}
    return tuple(dict.fromkeys([*(() if tokens else self.inputs), *self.reads,
                                *(name for name, applies in loading.items() if applies)]))

  def options(self, takes: Sequence[str] | None = None, **given: Any) -> Options:
    """The options of a person: those given that are not None, else the defaults of the analysis.

    Args:
      takes: names of the options that make a difference; by default for a model in memory.

    Raises:
      ValueError: an option makes no difference, or has an impossible value; names the option.
      TypeError: there is no such option; names the nearest.
    """
    given = {key: value for key, value in given.items() if value is not None}
    # An analysis of every kind reads text and draws tokens, so it takes both source and seed.
    kind = (self.defaults | given).get('inputs', 'natural')
    check_given(given, self.takes() if takes is None else takes, self.name,
                '' if self.every_kind and kind == 'natural' else kind)
    for name, value in given.items():
      if isinstance(getattr(Options, name, None), tuple) and not isinstance(value, (tuple, list)):
        raise ValueError(f'{name}={value!r} must be several, such as ({value!r},).')
    options = Options(**{**self.defaults, **given})
    if not self.thresholds and len(options.epsilons) > 1:
      raise ValueError(f'--epsilons: {self.name} takes one threshold at most, such as '
                       '--epsilons=0.3.')
    return options


# Options that several analyses read: those of a probe, of a rate of sinks, and of single heads.
_PROBE = ('dtype', 'batch_size')
_RATE = ('epsilons', *_PROBE)
_CHOICE = ('layers', 'heads')

ANALYSES = {analysis.name: analysis for analysis in [
    Analysis(lengths, 'Figure 3', 'Sink_1 against the length T of the inputs',
             ('lengths', *_RATE), {'epsilons': _MORE},
             ('lengths', *(name for name in INPUTS if name != 'length')), lengths.make_inputs,
             thresholds=True),
    Analysis(kinds, 'Table 1 (left)', 'Sink_1 on text, random tokens and one repeated token',
             _RATE, make_inputs=kinds.make_inputs, compares_inputs=True, every_kind=True),
    Analysis(chat, 'Table 1 (right)', 'Sink_1 of base models and their chat versions', _RATE,
             companions=chat.companions),
    Analysis(scale, 'Figure 4 (left)', 'Sink_1 against the number of parameters, by family', _RATE),
    Analysis(hellaswag, 'Figure 10', 'Sink_1 beside HellaSwag accuracy, by family and scale',
             (*_RATE, 'bos', 'hellaswag', 'limit'), check_first=hellaswag.check_first),
    Analysis(domains, 'Figure 9', 'Sink_1 on the domains of a corpus, such as the Pile',
             _RATE, {'epsilons': (0.2, 0.3, 0.4), 'source': 'Stdlib()'},
             ('source', 'sequences', 'length', 'bos'), domains.make_inputs,
             compares_inputs=True, thresholds=True),
    Analysis(heads, 'Figures 19 to 24, 27', 'importance of the first token over blocks and heads',
             _RATE),
    Analysis(maps, 'Figures 25, 26', 'attention maps of single heads', _CHOICE,
             {'sequences': 10}, float32=True),
    Analysis(norms, 'Figure 2 (top), Figures 11 to 14',
             'norms of the first token and of the others', _PROBE),
    Analysis(angles, 'Figure 2 (bottom), Figures 15 to 18', 'angles between queries and keys',
             (*_CHOICE, *_PROBE)),
    Analysis(positions, 'Table 7', 'the first position vector replaced or swapped',
             ('positions', *_RATE), {'inputs': 'repeat'}),
    Analysis(repeated_tokens, 'Propositions 1 to 4',
             'attention to repeated tokens, and its closed forms', ('epsilons',),
             {'inputs': 'repeat'}, float32=True, check_all=repeated_tokens.check_all),
    Analysis(last_query, 'StreamingLLM, Figure 12',
             'attention of the last query to the first token', (*_CHOICE, *_PROBE),
             {'sequences': 16, 'length': 4096}, make_inputs=last_query.make_inputs),
    Analysis(streaming, 'StreamingLLM, Figure 3',
             'perplexity of a long text with caches of one size', ('cache_size', 'sinks'),
             {'sequences': 1, 'length': 2048}, make_inputs=streaming.make_inputs, any_length=True),
]}


def find(name: str) -> Analysis:
  """Returns the analysis of a name.

  Raises:
    ValueError: there is none; lists the names.
  """
  check_known(name, ANALYSES, 'No analysis')
  return ANALYSES[name]


def as_text() -> str:
  """Lists all analyses with their defaults, a line each, then the options that each takes."""
  shown = lambda value: ','.join(map(str, value)) if isinstance(value, tuple) else value
  defaults = lambda a: ''.join(f' --{key}={shown(value)}' for key, value in a.defaults.items())
  computed = ' and '.join(a.name for a in ANALYSES.values() if a.float32)
  flags = lambda a: ' '.join(f'--{name}' for name in a.takes(checkpoints=True))
  return '\n'.join([
      *text_table(['analysis', 'of the paper', 'what it shows'],
                  [[a.name, a.figure,
                    a.line + (f' (by default{defaults(a)})' if a.defaults else '')]
                   for a in ANALYSES.values()], left=range(3)), '',
      *text_table(['analysis', f'options (--fsdp, and of {computed} --dtype, of published models)'],
                  [[a.name, flags(a)] for a in ANALYSES.values()], left=range(2))])
