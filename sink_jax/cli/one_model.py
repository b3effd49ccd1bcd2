"""What commands about one model have in common: how a person names it, and how it is loaded."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from sink_jax.arguments import check_least
from sink_jax.cli import parser

if TYPE_CHECKING:  # it imports jax
  from sink_jax.analyses.loaded_models import LoadedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(parser.CommandOptions):
  """The options that name a model.

  Attributes:
    checkpoint: a published model: its folder, a name such as Pythia-160M, or 'owner/name' on the
      Hugging Face hub.
    workdir: folder of a training run instead.
    dtype: of parameters and activations.
    fsdp: devices to split the parameters of a published model over.
  """

  checkpoint: str | None = None
  workdir: str | None = None
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  fsdp: int = 1

  def __post_init__(self):
    if (self.checkpoint is None) == (self.workdir is None):
      raise ValueError('name a model: either --checkpoint or --workdir.')
    check_least(self, fsdp=1)
    if self.fsdp > 1 and self.workdir is not None:
      raise ValueError('--fsdp is for published models; a run is loaded onto one device.')

  def load(self) -> LoadedModel:
    """Loads the model, its activations in `dtype`; raises as `load_pretrained` or `load_run`."""
    from sink_jax.analyses.loaded_models import LoadedModel

    if self.checkpoint is not None:
      return LoadedModel.of_checkpoint(self.checkpoint, self.dtype, self.fsdp)
    assert self.workdir is not None  # one of the two is given
    return LoadedModel.of_workdir(self.workdir, self.dtype)
