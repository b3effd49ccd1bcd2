"""Registers analyses, and carries one out on a model or several.

An analysis is a function of a `Model` and of its options, which returns rows: flat dicts of numbers
and words, ready for JSON. Blocks and heads count from 1. The runner adds the name of the model.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import os
import pkgutil
import re
import textwrap
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from sink_jax.analyses.models import InputOptions, Model
from sink_jax.arguments import check_known
from sink_jax.evaluate.activations import not_finite
from sink_jax.evaluate.inputs import Inputs, stored
from sink_jax.foreign import as_array, standard_promotion
from sink_jax.io.paths import to_path
from sink_jax.io.terminal import text_table
from sink_jax.models.arrays import check_ids, matmul_precision
from sink_jax.models.run import Run
from sink_jax.pictures import style
from sink_jax.pictures.style import Row

# Options of several analyses.
Epsilon = Annotated[float, tyro.conf.arg(help='threshold of the sink rate.')]
Epsilons = Annotated[
  tuple[float, ...], tyro.conf.arg(help='thresholds of the sink rate, such as 0.2,0.3.')
]
Heads = Annotated[
  tuple[str, ...],
  tyro.conf.arg(
    help='BLOCK.HEAD, from 1, such as 5.1,10.3; by default two with sinks and two without.'
  ),
]
SOURCE_TEXT = 'source_text'  # the column with the name of a text, where there are several
_LINES = 40  # of a table in a terminal
_TITLES = 3  # models whose findings are the title of a picture; of more the picture is a comparison


@dataclasses.dataclass(frozen=True)
class Analysis:
  """An analysis: its function, figure and picture, and its default inputs and models.

  finding: says in a sentence what the rows of one model show.
  """

  function: Callable[..., list[Row]]
  figure: str
  draw: Callable[[list[Row]], Figure]
  finding: Callable[[list[Row]], str] | None
  inputs: InputOptions
  models: Callable[[], list[Run]] | None = None

  @property
  def name(self) -> str:
    return self.function.__name__

  @property
  def line(self) -> str:
    """The first line of its docstring."""
    return inspect.cleandoc(self.function.__doc__ or '').partition('\n')[0].rstrip('.')

  @property
  def parameters(self) -> dict[str, tuple[Any, Any]]:
    """{name: (annotation, default)} of its options, from which a command line is made."""
    hints = typing.get_type_hints(self.function, include_extras=True)
    return {
      name: (hints[name], parameter.default)
      for name, parameter in list(inspect.signature(self.function).parameters.items())[1:]
    }

  def picture(self, rows: list[Row]) -> Figure:
    """Draws the rows, with the finding of each model as the title."""
    figure = self.draw(rows)
    models = style.groups(rows, ('model',))
    if self.finding and len(models) <= _TITLES:
      letters = int(12 * figure.get_figwidth())  # that fit into a line
      findings = [f'{name}: {self.finding(of_model)}' for name, of_model in models.items()]
      words = '\n'.join(textwrap.fill(finding, letters) for finding in findings)
      figure.suptitle(words, fontsize=style.FONT)
    return figure


ANALYSES: dict[str, Analysis] = {}


def analysis(
  figure: str,
  draw: Callable[[list[Row]], Figure],
  *,
  finding: Callable[[list[Row]], str] | None = None,
  models: Callable[[], list[Run]] | None = None,
  **inputs: Any,
) -> Callable:
  """Registers a function as the analysis of a figure; `inputs`: its defaults of `InputOptions`."""

  def register(function):
    ANALYSES[function.__name__] = Analysis(
      function, figure, draw, finding, InputOptions(**inputs), models
    )
    return function

  return register


def all_analyses() -> dict[str, Analysis]:
  """Every analysis by name, after an import of all modules of this folder."""
  for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
    if module.name != 'lm_eval':  # needs an optional package
      importlib.import_module(f'sink_jax.analyses.{module.name}')
  return ANALYSES


def find(name: str) -> Analysis:
  """The analysis of a name; a ValueError lists them all."""
  check_known(name, all_analyses(), 'No analysis')
  return ANALYSES[name]


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
  """The rows of one analysis of models, and how they were made, by model."""

  analysis: Analysis
  rows: list[Row]
  models: list[dict[str, Any]]

  @property
  def found(self) -> dict[str, Any]:
    """What is stored as JSON."""
    about = {'analysis': self.analysis.name, 'figure': self.analysis.figure}
    return about | {'models': self.models, 'rows': self.rows}

  def plot(self, path: str | os.PathLike | None = None) -> Figure:
    """Draws the rows, and writes a PNG file if a path is given."""
    figure = self.analysis.picture(self.rows)
    if path is not None:
      to_path(path).write_bytes(style.png(figure))
    return figure

  def __str__(self) -> str:
    """The rows as a table for a terminal, without lists, cut if long. Rates have their unit."""
    names = [
      name for row in self.rows for name, x in row.items() if not isinstance(x, (list, dict))
    ]
    columns = list(dict.fromkeys(names))
    heads = [f'{name} (%)' if name.startswith('sink_') else name for name in columns]
    cells = [[_cell(row.get(name)) for name in columns] for row in self.rows[:_LINES]]
    more = len(self.rows) - len(cells)
    return '\n'.join([*text_table(heads, cells), *[f'and {more} rows more'] * bool(more)])


def _cell(value: Any) -> str:
  if value is None:
    return ''
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def measure(
  chosen: Analysis,
  run: Run,
  inputs: InputOptions,
  options: dict[str, Any],
  tokens: Inputs | None = None,
) -> Result:
  """Measures one model; a ValueError names an option that does not fit, or a number not finite."""
  for name in {'epsilon', 'epsilons'} & set(options):
    if not all(0 < epsilon < 1 for epsilon in np.ravel(options[name])):
      raise ValueError(f'--{name} must lie between 0 and 1; the paper has 0.3.')
  model = Model(run, inputs, tokens)
  name = run.name or 'model'
  rows = [{'model': name} | row for row in chosen.function(model, **options)]
  for row in rows:
    for column, value in row.items():
      if isinstance(value, float) and not math.isfinite(value):
        raise not_finite(run, column, inputs.dtype)
  source = os.path.basename(inputs.source) if os.path.isabs(inputs.source) else inputs.source
  about = {
    'model': name,
    'checkpoint': checkpoint(run),
    'inputs': model.descriptions,
    'options': dataclasses.asdict(inputs) | {'source': source} | options,
    'matmul_precision': matmul_precision(inputs.dtype),
  }
  return Result(chosen, rows, [about])


@standard_promotion()
def analyse(name: str, run: Run, tokens: ArrayLike | None = None, **options: Any) -> Result:
  """Runs one analysis of one model: `sj.analyse('lengths', run, tokens, lengths=(16, 64))`.

  Args:
    name: the name of the analysis; `python -m sink_jax analyses --list` prints all.
    run: the model.
    tokens: ids (S, T); by default the inputs that the options describe.
    options: options of the analysis, and of its inputs (`sink_jax.analyses.models.InputOptions`).

  Returns:
    The result: `pandas.DataFrame(result.rows)` is its table, and `result.plot()` its picture. The
    columns sink_1, sink_2, ... are percent, where `sink_rate` returns shares.

  Raises:
    ValueError: the name, the value of an option or the tokens do not fit.
    TypeError: an option does not exist.
  """
  chosen, given = find(name), None
  of_inputs = InputOptions.__dataclass_fields__.keys() & options.keys()
  inputs = dataclasses.replace(chosen.inputs, **{key: options.pop(key) for key in of_inputs})
  if tokens is not None:
    ids = np.asarray(as_array(tokens, 'tokens'))
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
      raise ValueError(f'tokens must be ids of shape (S, T), not {ids.dtype} of shape {ids.shape}.')
    check_ids(ids, run.config.vocab_size)
    given = stored(ids, run.config.vocab_size, 'tokens of the caller')
    given.description.update(kind='given', bos=given.description['bos'] | {'protocol': 'as given'})
    inputs = dataclasses.replace(inputs, sequences=ids.shape[0], length=ids.shape[1])
  return measure(chosen, run, inputs, options, given)


def checkpoint(run: Run) -> dict[str, str | int | None]:
  """Which model a result is of: the last part of its folder, its step, dtype and size.

  A snapshot of the hub, models--OWNER--NAME/snapshots/REVISION, has its repository and revision.
  """
  folder = Path(run.folder).absolute() if run.folder else None
  found = {
    'folder': folder and folder.name,
    'step': run.step,
    'dtype': run.config.dtype,
    'parameters': sum(x.size for x in jax.tree.leaves(run.params)),
  }
  if folder and folder.parent.name == 'snapshots' and re.fullmatch('[0-9a-f]{40}', folder.name):
    found |= {'folder': folder.parents[1].name, 'revision': folder.name}
  return found


def named_heads(model: Model, heads: Sequence[str]) -> list[tuple[int, int]]:
  """(n, h), from 0, of heads BLOCK.HEAD; n counts attention blocks. ValueError: a wrong head."""
  names = {
    f'{block}.{head + 1}': (n, head)
    for n, block in enumerate(model.blocks)
    for head in range(model.run.config.heads)
  }
  for head in heads:
    check_known(str(head), names, '--heads: there is no')
  return [names[str(head)] for head in heads]
