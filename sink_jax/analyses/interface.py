"""What the modules of analyses have in common, and what passes between them and other rooms."""

from __future__ import annotations

from os import PathLike
from typing import IO, Any, Protocol, TypeAlias

from sink_jax.analyses.options import Options
from sink_jax.data.inputs import Inputs
from sink_jax.models.run import Run

# The numbers of one model: a dict that json.dumps takes as it is. It is not a dataclass because it
# leaves the room as JSON and comes back from files, where `paper.analysis_fields` checks its keys;
# the docstring of each `measure` lists them.
Result: TypeAlias = dict[str, Any]
PictureFile: TypeAlias = str | PathLike[str] | IO[bytes]


class AnalysisModule(Protocol):
  """The functions that the module of an analysis has; `registry` lists the modules."""

  # Its last part is the name of the analysis, see `registry.Analysis.name`.
  __name__: str

  def measure(self, run: Run, inputs: Inputs, options: Options) -> Result:
    """Measures one model. The result has 'model' and 'inputs', and keys of the analysis's own."""
    ...

  def draw(self, results: list[Result], path: PictureFile) -> None:
    """Draws the results of one model or more into one PNG."""
    ...

  def rows(self, results: list[Result]) -> list[list[str]]:
    """A table of the results for a terminal; its header is the first row."""
    ...


def model_name(result: Result) -> str:
  """The name of a result's model in pictures and tables; a run may have none."""
  return result['model'] or 'model'
