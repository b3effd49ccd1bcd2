"""What the modules of analyses have in common, and what passes between them and other rooms."""

from __future__ import annotations

import io
from os import PathLike
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

from sink_jax.analyses.options import Options
from sink_jax.evaluate.inputs import Inputs
from sink_jax.models.run import Run

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# The numbers of one model: a dict that json.dumps takes as it is. It is not a dataclass because it
# leaves the room as JSON and comes back from files, where `paper.open_protocol` checks its keys;
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


class AnalysisResult(dict[str, Any]):
  """The numbers of one analysis of one model, as a dict, with its picture."""

  def __init__(self, result: Result, module: AnalysisModule):
    super().__init__(result)
    self._module = module

  def plot(self, path: PictureFile | None = None, *, ax: Axes | None = None) -> Figure:
    """Draws the picture of the analysis, as one image, and returns the figure.

    Args:
      path: the PNG file to write; by default none is written.
      ax: the Matplotlib axes to draw on; by default those of a new figure.
    """
    from matplotlib.image import imread  # matplotlib only when a picture is wanted

    from sink_jax.evaluate import plots

    raw = io.BytesIO()
    self._module.draw([self], raw)
    if path is not None:
      self._module.draw([self], path)
    image = imread(io.BytesIO(raw.getvalue()))
    if ax is None:
      height, width, _ = image.shape
      ax = plots.new_axes(width / plots.DPI, height / plots.DPI)
    ax.imshow(image)
    ax.set_axis_off()
    return plots.figure_of(ax)


def model_name(result: Result) -> str:
  """The name of a result's model in pictures and tables; a run may have none."""
  return result['model'] or 'model'
