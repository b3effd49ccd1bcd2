"""Every analysis of published models. A new one is a module and a line here, with its options.

A module has `measure(run, inputs, options) -> dict`, ready for JSON, with 'model' and 'inputs';
`draw(results, path)`, which draws the results of several models into one PNG; and
`rows(results) -> [[str]]`, a table for the terminal with its header first. Where it needs them:
`make_inputs(subject, options) -> Inputs` in place of `subjects.make_inputs`; `OWN_INPUTS = True`
where no other inputs will do; `ANY_LENGTH = True` where they may exceed a model's positions;
`check_all(length, epsilon) -> results`, which needs no model; and `companions(names) -> names`,
the checkpoints to load when these are given.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from sink_jax.analyses.options import INPUTS, Options, check_given

_MORE = (0.1, 0.2, 0.3, 0.4, 0.5)


@dataclasses.dataclass(frozen=True)
class Analysis:
  """One analysis. figure: of the paper. line: what it shows. defaults: its own of Options.

  reads: options that `measure` reads. inputs: those that `make_inputs` reads. every_kind: whether
  its natural inputs bring random ones with them. thresholds: whether it takes several epsilons.
  float32: whether its activations are float32, whatever the dtype of the model.
  """

  figure: str
  line: str
  name: str
  reads: tuple[str, ...]
  defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
  inputs: tuple[str, ...] = INPUTS
  every_kind: bool = False
  thresholds: bool = False
  float32: bool = False

  def module(self) -> ModuleType:
    """The module of that name beside this one."""
    return importlib.import_module(f'sink_jax.analyses.{self.name}')

  def takes(self, *, tokens: bool = False, checkpoints: bool = False,
            workdirs: bool = False) -> tuple[str, ...]:
    """Names of the options that make a difference.

    Args:
      tokens: whether a caller gives the inputs. checkpoints, workdirs: whether published models,
        runs of ours are to be loaded, which takes options too.
    """
    loading = {'dtype': checkpoints or workdirs and not self.float32, 'fsdp': checkpoints}
    return tuple(dict.fromkeys([*(() if tokens else self.inputs), *self.reads,
                                *(name for name, does in loading.items() if does)]))

  def options(self, takes: Sequence[str] | None = None, **given) -> Options:
    """Its options: those given that are not None, else its own defaults.

    Args:
      takes: names of the options that make a difference; by default for a model in memory.

    Raises:
      ValueError: an option that makes no difference, or a value that cannot be; names the option.
      TypeError: there is no such option; names the nearest.
    """
    given = {key: value for key, value in given.items() if value is not None}
    kind = (self.defaults | given).get('inputs', 'natural')
    check_given(given, self.takes() if takes is None else takes, self.name,
                '' if self.every_kind and kind == 'natural' else kind)
    options = Options(**{**self.defaults, **given})
    if not self.thresholds and len(options.epsilons) > 1:
      raise ValueError(f'--epsilons: {self.name} takes one threshold at most, such as '
                       '--epsilons=0.3.')
    return options


_PROBE = ('dtype', 'batch_size')
_RATE = ('epsilons', *_PROBE)
_CHOSEN = ('layers', 'heads')

ANALYSES = {analysis.name: analysis for analysis in [
    Analysis('Figure 3', 'Sink_1 against the length T of the inputs', 'lengths',
             ('lengths', *_RATE), {'epsilons': _MORE},
             ('lengths', *(name for name in INPUTS if name != 'length')), thresholds=True),
    Analysis('Table 1 (left)', 'Sink_1 on text, random tokens and one repeated token', 'kinds',
             _RATE, every_kind=True),
    Analysis('Table 1 (right)', 'Sink_1 of base models and their chat versions', 'chat', _RATE),
    Analysis('Figure 4 (left)', 'Sink_1 against the number of parameters, by family', 'scale',
             _RATE),
    Analysis('Figure 10', 'Sink_1 beside HellaSwag accuracy, by family and scale', 'hellaswag',
             (*_RATE, 'bos', 'hellaswag', 'limit')),
    Analysis('Figure 9', 'Sink_1 on the domains of a corpus, such as the Pile', 'domains',
             _RATE, {'epsilons': (0.2, 0.3, 0.4), 'source': 'Stdlib()'},
             ('source', 'sequences', 'length', 'bos'), thresholds=True),
    Analysis('Figures 19 to 24, 27', 'importance of the first token over blocks and heads',
             'heads', _RATE),
    Analysis('Figures 25, 26', 'attention maps of single heads', 'maps', _CHOSEN,
             {'sequences': 10}, float32=True),
    Analysis('Figure 2 (top), Figures 11 to 14', 'norms of the first token and of the others',
             'norms', _PROBE),
    Analysis('Figure 2 (bottom), Figures 15 to 18', 'angles between queries and keys', 'angles',
             (*_CHOSEN, *_PROBE)),
    Analysis('Table 7', 'the first position vector replaced or swapped', 'positions',
             ('positions', *_RATE), {'inputs': 'repeat'}),
    Analysis('Propositions 1 to 4', 'attention to repeated tokens, and its closed forms',
             'repeated_tokens', ('epsilons',), {'inputs': 'repeat'}, float32=True),
    Analysis('StreamingLLM, Figure 12', 'attention of the last query to the first token',
             'last_query', (*_CHOSEN, *_PROBE), {'sequences': 16, 'length': 4096}),
    Analysis('StreamingLLM, Figure 3', 'perplexity of a long text with caches of one size',
             'streaming', ('cache_size', 'sinks'), {'sequences': 1, 'length': 2048}),
]}


def find(name: str) -> Analysis:
  """The analysis of a name.

  Raises:
    ValueError: there is none; lists the names.
  """
  if name in ANALYSES:
    return ANALYSES[name]
  close = difflib.get_close_matches(name, ANALYSES, n=1)
  hint = f' Did you mean {close[0]}?' if close else ''
  raise ValueError(f'No analysis {name!r}.{hint} Choices: {", ".join(ANALYSES)}.')


def as_text() -> str:
  """All analyses, a line each, with their own defaults; then the options that each takes."""
  own = lambda value: ','.join(map(str, value)) if isinstance(value, tuple) else value
  defaults = lambda a: ''.join(f' --{key}={own(value)}' for key, value in a.defaults.items())
  lines = [f'{a.name:<16}{a.figure:<37}{a.line}' + (
      f' (by default{defaults(a)})' if a.defaults else '') for a in ANALYSES.values()]
  flags = lambda a: ' '.join(f'--{name}' for name in a.takes(checkpoints=True))
  return '\n'.join([*lines, '', 'Options (--fsdp of published models):',
                    *(f'{a.name:<16}{flags(a)}' for a in ANALYSES.values())])
