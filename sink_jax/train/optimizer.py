"""The optimizer: an update rule, its schedule, decoupled weight decay and clipping.

The semantics are those of PyTorch's AdamW and clip_grad_norm_, which the official implementation
(sail-sg/Attention-Sink) uses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from sink_jax.component import Component, option, registry

# Layers whose kernel does not multiply hidden states: a table of inputs, the unembedding, and the
# depthwise convolution of a Mamba mixer.
_NOT_HIDDEN = ('embed', 'unembed', 'conv')


class UpdateRule(Component):
  """A rule that scales gradients to an update; `optimizer.rule` of a config names it.

  Clipping comes before it, and weight decay and the learning rate after it: see `make_optimizer`.
  A new rule is a subclass here, its formula in tests/train/test_optimizer.py, and a row of
  docs/training.md.
  """

  abstract = True

  def __post_init__(self):
    # With a decay of 1 the bias correction 1 - b^t would divide by 0.
    for name in ('b1', 'b2', 'momentum'):
      self._check(name, 0 <= getattr(self, name, 0) < 1, 'in [0, 1)')
    # With eps 0 a parameter whose gradient has always been 0, such as the embedding of an id that
    # never occurs, would get the update 0 / 0.
    self._check('eps', getattr(self, 'eps', 1) > 0, '> 0')

  def _check(self, name: str, holds: bool, range_: str) -> None:
    if not holds:
      raise ValueError(f'optimizer.rule = {self}: {name} must be {range_}.')

  def transformation(self) -> optax.GradientTransformation:
    """The scaling of gradients, without clipping, decay and learning rate."""
    raise NotImplementedError


class AdamW(UpdateRule):
  """Adam's scaling (Kingma and Ba 2015) as in PyTorch's AdamW (Loshchilov and Hutter 2019).

  b1, b2: decay of the averages of the gradient and of its square. eps: added to the root.
  """

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8

  def transformation(self) -> optax.GradientTransformation:
    return optax.scale_by_adam(self.b1, self.b2, self.eps)


class Sgd(UpdateRule):
  """Gradient descent, with heavy-ball momentum where `momentum` is not 0.

  momentum: decay of the running sum of gradients that is the update; 0 keeps no state.
  """

  momentum: float = 0.0

  def transformation(self) -> optax.GradientTransformation:
    return optax.trace(self.momentum) if self.momentum else optax.identity()


class Muon(UpdateRule):
  """Orthogonalized momentum for the matrices of hidden layers, and AdamW for everything else.

  Jordan et al. 2024 (kellerjordan.github.io/posts/muon, github.com/KellerJordan/Muon): the update
  of a matrix (in, out) is the Nesterov momentum of its gradient, divided by its Frobenius norm and
  taken through `steps` Newton-Schulz iterations, which bring its singular values near 1. The matrix
  of each layer and each expert is separate. Embeddings, the unembedding, depthwise convolutions and
  vectors get AdamW's scaling. Optax computes it (`optax.contrib.scale_by_muon`); unlike Jordan's
  code it corrects the bias of the momentum.

  momentum: decay of the average of the gradients. b1, b2, eps: as in AdamW, for its part.
  rms: root mean square of the entries of an update, over the learning rate: 0.2 is about AdamW's,
    so that its learning rate and decay can stay (Liu et al. 2025, arXiv:2502.16982; Outlier-Safe
    Pre-Training, arXiv:2506.19697). None: Jordan's factor sqrt(max(1, out / in)), for a learning
    rate that is the spectral norm of an update (0.02 in his code), also of AdamW's part.
  """

  momentum: float = 0.95
  steps: int = 5
  rms: float | None = 0.2
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8

  def __post_init__(self):
    super().__post_init__()
    self._check('rms', self.rms is None or self.rms > 0, '> 0, or None for sqrt(max(1, out / in))')

  def transformation(self) -> optax.GradientTransformation:
    # The axes before the last two count layers and experts.
    matrices = lambda updates: jax.tree.map(
      lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates
    )
    orthogonal = optax.contrib.scale_by_muon(
      ns_steps=self.steps, beta=self.momentum, weight_dimension_numbers=matrices
    )
    factor = lambda rows, columns: (
      max(1, columns / rows) ** 0.5 if self.rms is None else self.rms * max(rows, columns) ** 0.5
    )
    scale = optax.stateless_with_tree_map(lambda x, _: factor(*np.shape(x)[-2:]) * x)
    return optax.partition(
      {
        'muon': optax.chain(orthogonal, scale),
        'adamw': optax.scale_by_adam(self.b1, self.b2, self.eps),
      },
      self._parts,
    )

  def _parts(self, params: Any) -> Any:
    """Which part each parameter belongs to: 'muon' or 'adamw'."""
    hidden = lambda path: is_matrix(path) and not (len(path) > 1 and path[-2].key in _NOT_HIDDEN)
    return jax.tree_util.tree_map_with_path(
      lambda path, _: 'muon' if hidden(path) else 'adamw', params
    )


class OrthoAdamState(NamedTuple):
  """The state of `OrthoAdam`.

  rotations: {'rows': Q (..., m, m), 'columns': Q (..., n, n)} for every parameter (..., m, n),
    where its axes are rotated. adam: the moments of the rotated gradients.
  """

  rotations: Any
  adam: optax.OptState


class OrthoAdam(AdamW):
  """Adam's scaling in a basis that is drawn at random for each parameter and then kept.

  Kaul et al. 2025 (arXiv:2410.17174), Algorithm 1: the gradient g is rotated, Q g, Adam scales it,
  and Q^T rotates the update back, so that no channel is singled out by the basis in which Adam
  divides. The formula is from descriptions of the paper and an independent reproduction
  (Tristan22400/xai-outlier-repro). A Q of all entries of a matrix does not fit a device, so here,
  as there, it is a Kronecker product: the gradient G (m, n) becomes R G C^T. Each layer and each
  expert has separate rotations. The state holds the rotations: at 60m with 50432 tokens they have
  1.1 times the bytes of the parameters.

  b1, b2, eps: as in AdamW. seed: of the rotations.
  longest: longer axes are not rotated, such as the axis of a large vocabulary; 1 is AdamW.
  """

  seed: int = 0
  longest: int = 4096

  def transformation(self) -> optax.GradientTransformation:
    adam = super().transformation()

    def init(params: optax.Params) -> OrthoAdamState:
      return OrthoAdamState(self._rotations(params), adam.init(params))

    def update(
      updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, OrthoAdamState]:
      assert isinstance(state, OrthoAdamState)
      rotated = jax.tree.map(_rotated, updates, state.rotations)
      scaled, moments = adam.update(rotated, state.adam, params)
      back = jax.tree.map(functools.partial(_rotated, back=True), scaled, state.rotations)
      return back, OrthoAdamState(state.rotations, moments)

    return optax.GradientTransformation(init, update)

  def _rotations(self, params: optax.Params) -> Any:
    """The rotations of `OrthoAdamState`, from the paths and shapes of the parameters."""

    def rotations(path: tuple[Any, ...], x: jax.Array) -> dict[str, jax.Array]:
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      # The last two axes are rotated; of a block's parameter the first one counts the layers.
      rotated = min(2, x.ndim - (path[0].key == 'blocks'))
      counted, drawn = x.shape[: x.ndim - rotated], {}
      for side, size in list(zip(('columns', 'rows'), x.shape[::-1]))[:rotated]:
        if 1 < size <= self.longest:
          # The key follows from the path, so that an additional parameter changes no other
          # rotation.
          key = jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(f'{name}/{side}'.encode()))
          draw = functools.partial(jax.random.orthogonal, n=size, dtype=x.dtype)
          # One at a time: on a CPU, QR of a batch waits for threads of the pool that its callers
          # run in, and with several simulated devices it waits forever.
          drawn[side] = jax.lax.map(draw, jax.random.split(key, math.prod(counted))).reshape(
            *counted, size, size
          )
      return drawn

    return jax.tree_util.tree_map_with_path(rotations, params)


def is_matrix(path: tuple[Any, ...]) -> bool:
  """True if the parameter at a path is a matrix of linear layers or of the MLP feature map."""
  # By name, since a gain has two axes, too, with the axis of the layers.
  return path[-1].key.endswith('kernel') or path[-1].key.startswith('feature_map')


def _rotated(x: jax.Array, rotations: dict[str, jax.Array], back: bool = False) -> jax.Array:
  """R X C^T, or R^T X C with `back`; a missing rotation is the identity."""
  # Not in bfloat16: Adam divides by the root of the square, which makes a wrong sign of a small
  # number as large as any other.
  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  if 'rows' in rotations:
    q = rotations['rows']
    x = product(q.mT if back else q, x)
  if 'columns' in rotations:
    q = rotations['columns']
    rows = x.reshape(*q.shape[:-2], -1, q.shape[-1])  # a vector is a matrix of one row
    x = product(rows, q if back else q.mT).reshape(x.shape)
  return x


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """The section `optimizer` of a config: the rule, the schedule, the decay and the clipping.

  trained: paths of the parameters that are trained, None for all; `init.train` decides it.
  """

  rule: UpdateRule = option(
    AdamW(), f'how gradients become an update: {", ".join(registry(UpdateRule))}'
  )
  learning_rate: float = option(4e-4, 'learning rate at the peak of the schedule', least=0)
  schedule: str = option(
    'cosine',
    'cosine (the paper) or constant (all configs of the official implementation)',
    choices=('cosine', 'constant'),
  )
  final_fraction: float = option(0.1, 'share of learning_rate after the cosine', least=0, most=1)
  warmup_steps: int = option(100, 'updates of a linear warm-up', least=0)
  weight_decay: float = option(
    0.1, 'an update subtracts learning rate x this x the parameter', least=0
  )
  decay: str = option(
    'all',
    'parameters that decay: all (the official implementation) or matrices',
    choices=('all', 'matrices'),
  )
  clip: float = option(1.0, 'largest global gradient norm; 0: none', least=0)
  trained: tuple[str, ...] | None = dataclasses.field(default=None, metadata={'key': False})


def learning_rate(config: OptimizerConfig, steps: int, update: int) -> float:
  """The learning rate of update 0, 1, ..., steps - 1.

  Update s of the warm-up has (s + 1) / warmup_steps of the peak; the official implementation, which
  raises the rate with each of m micro-batches, has (s + 1 - 1/m) / warmup_steps.
  """
  peak, warmup, last = config.learning_rate, config.warmup_steps, config.final_fraction
  if update < warmup:
    return peak * (update + 1) / warmup
  if config.schedule == 'constant':
    return peak
  progress = min(1.0, (update - warmup) / max(1, steps - warmup))
  return peak * (last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2)


def make_optimizer(config: OptimizerConfig, rate: Any) -> optax.GradientTransformation:
  """Clipping, then the update rule with decoupled decay, for one update at this learning rate.

  rate: a float, which may be traced; the tree of the state does not depend on it.
  """
  # The order is PyTorch's: gradients are clipped before they enter the moments, and the decay uses
  # the parameters before the update.
  matrices = functools.partial(jax.tree_util.tree_map_with_path, lambda path, _: is_matrix(path))
  return optax.chain(
    optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
    config.rule.transformation(),
    optax.add_decayed_weights(config.weight_decay, None if config.decay == 'all' else matrices),
    optax.scale(-rate),
  )


def trained_part(config: OptimizerConfig, params: Any) -> Any:
  """The tree of the parameters that are trained: all that the optimizer sees."""
  if config.trained is None:
    return params
  flat = flatten_dict(params, sep='/')
  return unflatten_dict({path: flat[path] for path in config.trained}, sep='/')


def with_trained(params: Any, trained: Any) -> Any:
  """The parameters, with the part of the tree in `trained` replaced."""
  return unflatten_dict(flatten_dict(params) | flatten_dict(trained))
