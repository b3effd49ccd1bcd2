"""InitOptions: the section `init` of a config, where the parameters of a run begin."""

from __future__ import annotations

import dataclasses
import math

from sink_jax.arguments import check_known
from sink_jax.models.graft import STARTS
from sink_jax.train.kept import GRAFT_KEYS, kept_keys

CHOICES = {
    'keep': ('params',),
    'graft': ('', *STARTS),
    'train': ('all', 'new', 'attention'),
}


@dataclasses.dataclass(frozen=True)
class InitOptions:
  """Parameters of another model to begin with, in the place of those that `seed` draws.

  source: the workdir of a run, or a folder or name as `load_pretrained` takes it; '' for none.
    Of a run it is the newest good checkpoint.
  keep: what is taken of the source: 'params'. The optimizer starts fresh, at step 0.
  graft: '' where attention, norm and sink tokens have to be the source's. Otherwise what the config
    changes of their defaults takes the place of the source's, and parameters that the source lacks
    start as `sink_jax.graft` says.
  kept: what a graft leaves as the source has it, such as 'attention.position, model.norm'. Where a
    run begins it is empty, for all that the config leaves at its default, and then as it was
    found. With '' nothing is kept, so that a graft can put a default in the source's place, such
    as Causal() in that of a window.
  train: the parameters that an update changes: 'all'; 'new', those that the source has not; or
    'attention', those of the attention of all blocks, and the new ones. The optimizer neither
    keeps nor decays anything of the others.
  distill: the weight in the loss of the divergence KL(source || model) of a position's next token,
    in nats, beside the cross-entropy.
  step: of a source that is a run, None otherwise. hash: SHA-256 of the source's files. Both are
    empty in the config of a run that begins, unless a source of another hash is to be refused, and
    then as they were found. new: paths of the parameters that a graft has added, likewise.

  Raises:
    ValueError: an unknown choice, or an option that needs a source where there is none.
  """

  source: str = ''
  keep: str = 'params'
  graft: str = ''
  train: str = 'all'
  distill: float = 0.0
  step: int | None = None
  hash: str | None = None
  new: str | None = None
  kept: str | None = None

  def __post_init__(self):
    for name, allowed in CHOICES.items():
      if getattr(self, name) not in allowed:
        raise ValueError(f'init.{name} = {getattr(self, name)!r}; choices: {", ".join(allowed)}.')
    if type(self.source) is not str:
      raise ValueError(f'init.source = {self.source!r} must be a folder or the name of a model.')
    for name, kind in (('step', int), ('hash', str), ('new', str), ('kept', str)):
      if getattr(self, name) is not None and type(getattr(self, name)) is not kind:
        raise ValueError(f'init.{name} = {getattr(self, name)!r} must be '
                         f'{"a whole number" if kind is int else "a text"}, or empty.')
    if not 0 <= self.distill < math.inf:  # NaN fails every comparison
      raise ValueError(f'init.distill must be >= 0 and finite, not {self.distill}.')
    if self.new is not None and not self.graft:
      raise ValueError(f'init.new = {self.new!r} names what init.graft has added: leave it empty.')
    if self.kept is not None and not self.graft:
      raise ValueError(f'init.kept = {self.kept!r} is for grafts: set init.graft, or leave it empty.')
    for key in kept_keys(self.kept):
      check_known(key, GRAFT_KEYS, 'init.kept has an unknown key')
    if not self.source:
      for name in ('graft', 'train', 'distill', 'step', 'hash', 'new', 'kept'):
        if getattr(self, name) != getattr(InitOptions, name):
          raise ValueError(f'init.{name} = {getattr(self, name)!r} is for runs that begin with the '
                           'parameters of another model: name it by init.source.')
