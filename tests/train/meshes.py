"""Training steps on eight devices against one. test_meshes.py runs this in a separate process.

python -m tests.train.meshes CASE:DATAxFSDPxTENSOR ...
"""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import sink_jax as sj
from sink_jax.data.batches import Batch
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.sharding import batch_sharding, make_mesh, replicated
from sink_jax.train.loss import cross_entropy
from sink_jax.train.optimizer import Muon, OptimizerConfig, Sgd
from sink_jax.train.step import init_state, make_train_step
from tests.random_params import tiny_config

# The components that have parameters, or constants, of a head, and those that mix heads.
CASES = {
  'sink': (
    dict(kv_bias=sj.SinkLogit(), value=sj.ValueScale(), head=sj.ElementGate(opening=0.25)),
    dict(implementation='chunked', kv_heads=4),
  ),
  'alibi': (
    dict(position=sj.Alibi(), kv_bias=sj.KBias(), qk_norm=sj.ProjectionQKNorm()),
    dict(
      implementation='pallas',
      kv_heads=4,
      norm_location='after',
      ffn='tanh_geglu',
      logit_cap=2.0,
      tied=True,
      remat='save_attention',
    ),
  ),
  'sigma': (
    dict(
      similarity=sj.Sigmoid(),
      normalizer=sj.RowSum(eps=1e-8),
      position=sj.Relative(),
      value=sj.ValueScale(),
      qk_norm=sj.QKNorm(),
      head=sj.HeadNorm(),
    ),
    dict(
      implementation='chunked',
      linear='sigma_reparam',
      norm_location='sandwich',
      norm='single',
      sink_tokens=1,
      remat='save_matmuls',
    ),
  ),
  'biases': (
    dict(
      feature_map=sj.Mlp(),
      temperature=sj.LogLength(),
      kv_bias=sj.VBias(shared=True),
      head=sj.HeadGate(source='value'),
    ),
    dict(
      implementation='reference',
      norm='layernorm',
      norm_location='post',
      combine_heads='add',
      biases=('qkv', 'out', 'ffn'),
      remat='blocks',
    ),
  ),
}
MICROBATCHES = {'sink': 4, 'biases': 2}
# Adam's first steps are signs of gradients, which magnify rounding near zero. An eps as large as
# the gradients prevents this.
RULES = {'sink': Muon(eps=0.1)}
VOCAB, HEADS, BATCH, LENGTH, STEPS = 24, 8, 8, 16, 3


def train(case, mesh):
  """(loss and gradient norm of each step, parameters, importance, compiled step as text)."""
  slots, options = CASES[case]
  microbatches = MICROBATCHES.get(case, 1)
  sequences = BATCH * microbatches
  config = tiny_config(
    d_model=64,
    heads=HEADS,
    ffn_hidden=48,
    vocab_size=VOCAB,
    attention=sj.AttentionSpec(**slots),
    **options,
  )
  optimizer = OptimizerConfig(rule=RULES.get(case, Sgd()), learning_rate=1e-2)
  rate = optimizer.learning_rate
  state = init_state(config, optimizer, 0, mesh)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, VOCAB, (sequences, LENGTH + 1)).astype(np.int32)
  weights = (rng.random((sequences, LENGTH)) > 0.3).astype(np.float32)
  batch = jax.device_put(Batch(tokens[:, :-1], tokens[:, 1:], weights), batch_sharding(mesh))
  step = (
    make_train_step(config, optimizer, mesh, microbatches if mesh.size > 1 else 1)
    .lower(state, batch, rate)
    .compile()
  )
  curve = []
  for _ in range(STEPS):
    state, metrics = step(state, batch, rate)
    curve.append([float(metrics['loss']), float(metrics['grad_norm'])])
  probe = tokens[:3, :13]  # neither sequences nor positions divide evenly
  importance = sj.Run(config, state.params).record(probe).layers.importance
  return np.array(curve), state.params, importance, step.as_text()


def odd_loss(mesh):
  """The loss, with its gradients, of a batch that does not divide evenly."""
  rng = np.random.default_rng(0)
  h, kernel = rng.standard_normal((3, 13, 8), np.float32), rng.standard_normal((8, 11), np.float32)
  with mesh_context(mesh):
    return jax.jit(
      jax.value_and_grad(cross_entropy, argnums=(0, 1)),
      out_shardings=replicated(mesh) if mesh else None,
    )(h, kernel, rng.integers(0, 11, (3, 13)), rng.random((3, 13), np.float32))


def compare(case, sizes, one):
  """Compares a training run on (data, fsdp, tensor) with the run on one device."""
  mesh = make_mesh(*sizes)
  curve, params, importance, program = train(case, mesh)
  np.testing.assert_allclose(curve, one[0], rtol=1e-6)
  distance = jax.tree.map(
    lambda a, b: np.linalg.norm(a - np.asarray(b)) / np.linalg.norm(b),
    jax.tree.map(np.asarray, params),
    one[1],
  )
  assert max(jax.tree.leaves(distance)) < 1e-6, distance
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), importance, one[2])
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    odd_loss(mesh),
    odd_loss(None),
  )
  largest = max((np.abs(curve / one[0] - 1).max(), max(jax.tree.leaves(distance))))
  print(f'{case} {sizes}: {largest:.1e}')
  if sizes[1:] == (1, 1):
    assert 'all-reduce' in program
    assert not any(kind in program for kind in ('all-gather', 'all-to-all', 'collective-permute'))
  query = params['blocks']['attention']['query']['kernel']
  # A device keeps only its share of both axes of a projection.
  assert query.addressable_shards[0].data.size * sizes[1] * sizes[2] == query.size


if __name__ == '__main__':
  device = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  alone = Mesh(device, ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)
  for argument in sys.argv[1:]:
    name, shape = argument.split(':')
    compare(name, tuple(map(int, shape.split('x'))), train(name, alone))
