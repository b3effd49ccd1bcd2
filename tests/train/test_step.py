"""One training step: losses, microbatches, meshes, a golden number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.data.batches import Batch
from sink_jax.models.sharding import make_mesh
from sink_jax.models.transformer import init_params
from sink_jax.train import loss
from sink_jax.train.loss import training_weights
from sink_jax.train.optimizer import OptimizerConfig, Sgd
from sink_jax.train.step import init_state, make_train_step
from tests.models.numpy_model import numpy_model
from tests.random_params import next_token_losses, random_params, tiny_config
from tests.train.runs import run_python


small_model = functools.partial(tiny_config, heads=2, vocab_size=11)


def batch(size=8, length=12, seed=0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 11, (size, length + 1)).astype(np.int32)
  weights = (rng.random((size, length)) > 0.3).astype(np.float32)
  return Batch(tokens[:, :-1], tokens[:, 1:], weights)


def step(config, batch, microbatches=1, seed=0, gradient_dtype='float32', **options):
  optimizer, mesh = OptimizerConfig(**options), make_mesh()
  state = init_state(config, optimizer, seed, mesh)
  train = make_train_step(config, optimizer, mesh, microbatches, gradient_dtype=gradient_dtype)
  return train(state, batch, optimizer.learning_rate)


def plain_cross_entropy(h, kernel, targets, weights):
  logits = h @ kernel
  chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
  return jnp.sum((jax.nn.logsumexp(logits, -1) - chosen) * weights)


def test_runs_that_differ_in_seed_or_learning_rate_share_a_program():
  config, mesh = small_model(), make_mesh()
  shared = make_train_step(config, OptimizerConfig(), mesh)
  assert make_train_step(config, OptimizerConfig(), mesh) is shared
  before = shared._cache_size()
  for seed, rate in enumerate((1e-3, 2e-3, 0.0)):
    state = init_state(config, OptimizerConfig(), seed, mesh)
    params = jax.tree.map(np.asarray, state.params)
    new, _ = shared(state, batch(), rate)
    moved = any(
      np.any(a != b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(new.params))
    )
    assert moved == (rate > 0)
  assert shared._cache_size() <= before + 1


@pytest.mark.parametrize('logits', [2**24, 3 * 5 * 11, 1])
def test_cross_entropy_in_chunks(logits):  # chunks of all 7 positions, of 4 (padded), of 1
  rng = np.random.default_rng(0)
  h, kernel = rng.standard_normal((3, 7, 4)), 3 * rng.standard_normal((4, 11))
  targets, weights = rng.integers(0, 11, (3, 7)), rng.random((3, 7), np.float32)
  in_chunks = lambda *inputs: loss.cross_entropy(*inputs, targets, weights, logits)
  at_once = lambda *inputs: plain_cross_entropy(*inputs, targets, weights)
  inputs = [jnp.asarray(x, jnp.float32) for x in (h, kernel)]
  value, grads = jax.value_and_grad(lambda *x: 2 * in_chunks(*x), (0, 1))(*inputs)
  with jax.enable_x64(True):
    definition = jax.value_and_grad(at_once, (0, 1))
    wanted, of_definition = jax.device_get(definition(h, kernel))
  np.testing.assert_allclose(in_chunks(*inputs), wanted, rtol=1e-5)  # no gradient is asked for
  np.testing.assert_allclose(value, 2 * wanted, rtol=1e-5)
  for ours, theirs in zip(grads, of_definition):
    np.testing.assert_allclose(ours, 2 * theirs, rtol=1e-4, atol=1e-5)


def test_the_loss_needs_no_logits_of_all_positions():
  h, kernel = jnp.zeros((8, 1024, 8)), jnp.zeros((8, 50432))
  targets, weights = jnp.zeros((8, 1024), jnp.int32), jnp.ones((8, 1024))
  size = lambda f: (
    jax.jit(jax.grad(f, argnums=(0, 1)))
    .lower(h, kernel, targets, weights)
    .compile()
    .memory_analysis()
    .temp_size_in_bytes
  )
  all_logits = 8 * 1024 * 50432 * 4
  assert size(plain_cross_entropy) > all_logits  # this test can detect full logits
  assert size(loss.cross_entropy) < all_logits


@pytest.mark.parametrize(
  'options',
  [
    dict(biases=('out', 'ffn', 'unembed')),
    dict(embedding_dim=6, tied=True, logit_cap=1.5, norm_location='after'),
  ],
  ids=str,
)
def test_gradients_of_every_unembedding(options):
  config = small_model(attention=sj.AttentionSpec(position=sj.Nope()), **options)
  params, data = random_params(config), batch(2, 5)
  ours = functools.partial(
    loss.summed_loss, config, batch=data, weights_BxT=data.weights, logits=22
  )
  grads = jax.grad(lambda p: ours(params=p))(params)
  # Compare with finite differences of a NumPy float64 model, along one parameter after another.
  rng = np.random.default_rng(3)
  leaves, tree = jax.tree.flatten(jax.tree.map(np.float64, params))
  row = np.hstack([data.tokens, data.targets[:, -1:]])

  def numpy_loss(i, moved):
    logits = numpy_model(
      config, tree.unflatten([*leaves[:i], moved, *leaves[i + 1 :]]), data.tokens
    )
    return np.sum(next_token_losses(logits, row) * data.weights)

  for i, (x, gradient) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
    direction = rng.standard_normal(x.shape)
    slope = numpy_loss(i, x + 1e-5 * direction) - numpy_loss(i, x - 1e-5 * direction)
    assert np.sum(gradient * direction) == pytest.approx(slope / 2e-5, rel=1e-4, abs=1e-4)


def test_squared_error():
  rng = np.random.default_rng(0)
  config = small_model(vocab_size=0, input_features=5, output_features=3)
  params = init_params(config, 0)
  data = Batch(*(rng.standard_normal(s).astype(np.float32) for s in ((2, 4, 5), (2, 4, 3), (2, 4))))
  outputs = sj.Run(config, params).logits(data.tokens)
  expected = (((outputs - data.targets) ** 2).sum(-1) * data.weights).sum()
  assert loss.summed_loss(config, params, data, data.weights) == pytest.approx(float(expected))


def test_a_prefix_of_p_drops_the_first_p_minus_1_targets():
  ones = jnp.ones((2, 6))
  weights = lambda mask, **options: training_weights(
    ones, small_model(attention=sj.AttentionSpec(mask=mask), **options)
  )
  kept = weights(sj.Prefix(length=4))
  np.testing.assert_array_equal(kept[0], [0, 0, 0, 1, 1, 1])  # x_5 is the first target
  np.testing.assert_array_equal(weights(sj.Prefix(length=4), sink_tokens=1)[0], [0, 0, 1, 1, 1, 1])
  np.testing.assert_array_equal(weights(sj.Prefix(length=1)), ones)
  np.testing.assert_array_equal(weights(sj.Window(size=4)), ones)


def test_singular_vectors_follow_their_kernels():
  config = small_model(linear='sigma_reparam')
  first = init_state(config, OptimizerConfig(), 0, make_mesh()).params['blocks']
  state, _ = step(config, batch(), learning_rate=0.1)
  for room in ('attention', 'ffn'):
    for name, own in state.params['blocks'][room].items():
      old = first[room][name]
      assert np.all(old['gamma'] == 1) and np.all(own['gamma'] != 1)
      kernel = np.asarray(own['kernel'], np.float64)
      size = lambda u: np.linalg.norm(np.einsum('lu,luv->lv', u, kernel), axis=1)
      largest = np.linalg.norm(kernel, 2, axis=(1, 2))
      np.testing.assert_allclose(size(own['singular']), largest, rtol=1e-3)
      np.testing.assert_allclose(np.linalg.norm(own['singular'], axis=1), 1, rtol=1e-6)
      assert (size(old['singular']) < 0.997 * largest).any()


@pytest.mark.parametrize('microbatches', [2, 8])
def test_microbatches_change_nothing(microbatches):
  # The weights differ between sequences, so that a mean of means would be wrong. The rule is SGD,
  # because Adam's first step is the sign of the gradient, which magnifies rounding near zero.
  whole, parts = (step(small_model(), batch(), m, rule=Sgd()) for m in (1, microbatches))
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_are_rounded_as_asked_on_one_device_too():
  # At rate 1, from parameters near 0, SGD without clipping moves by the gradient.
  options = dict(rule=Sgd(), learning_rate=1.0, weight_decay=0.0, clip=0.0)
  kernel = lambda state: state.params['blocks']['ffn']['w1']['kernel']
  given = kernel(init_state(small_model(), OptimizerConfig(), 0, make_mesh()))
  after = lambda dtype: step(small_model(), batch(), gradient_dtype=dtype, **options)[0]
  exact, rounded = (given - kernel(after(dtype)) for dtype in ('float32', 'bfloat16'))
  np.testing.assert_allclose(rounded, rounded.astype(jnp.bfloat16).astype(jnp.float32), atol=1e-7)
  np.testing.assert_allclose(rounded, exact, rtol=2**-8, atol=1e-7)
  assert np.abs(rounded - exact).max() > 1e-6


def test_a_golden_step():
  # Guards the complete step, including initialisation, against unnoticed changes.
  state, metrics = step(small_model(), batch())
  numbers = [
    float(metrics['loss']),
    float(metrics['grad_norm']),
    float(sum(jnp.abs(x).sum() for x in jax.tree.leaves(state.params))),
  ]
  np.testing.assert_allclose(
    numbers, [2.5172600746154785, 0.5337172150611877, 762.8805541992188], rtol=1e-5
  )


SHARDED = """
import re
import jax, jax.numpy as jnp, numpy as np, pytest, sink_jax as sj
from sink_jax.data.batches import Batch
from sink_jax.kernels import dispatch
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.run import record
from sink_jax.train.optimizer import OptimizerConfig, Sgd
from sink_jax.models.sharding import batch_sharding, make_mesh
from sink_jax.train.step import init_state, make_train_step, make_validation_step

mesh = make_mesh(2, 2, 2)
config = sj.sized('tiny', vocab_size=11, implementation='pallas')
optimizer = OptimizerConfig()
state = init_state(config, optimizer, 0, mesh)
tokens = np.zeros((8, 64), np.int32)
batch = Batch(tokens, tokens, np.ones((8, 64), np.float32))
lower = lambda f, *x: f.trace(*x).lower(lowering_platforms=('tpu',)).as_text()
texts = [lower(make_train_step(config, optimizer, mesh), state, batch, optimizer.learning_rate),
         lower(make_validation_step(config, mesh), state.params, batch),
         lower(record, config, sj.RecordOptions(), mesh, state.params, jnp.asarray(tokens[:5]))]
assert all('tpu_custom_call' in text for text in texts)
assert sj.Run(config, state.params).record(tokens[:5]) is not None

fused = pytest.importorskip('jax._src.cudnn.fused_attention_stablehlo')
fused.check_cudnn_version = lambda: 91002  # a CPU installation cannot tell
dispatch.platform = lambda: 'cuda'
q = jax.ShapeDtypeStruct((8, 64, 4, 16), jnp.bfloat16, sharding=batch_sharding(mesh))
with mesh_context(mesh):
  text = jax.jit(lambda q: sj.attend(sj.AttentionSpec(), q, q, q, implementation='cudnn')).trace(
      q).lower(lowering_platforms=('cuda',)).as_text()
assert re.search('fmhaSoftmax.*tensor<2x64x2x16xbf16>', text), text
"""


def test_kernels_are_not_left_to_the_partitioner():
  # A TPU refuses such kernels. A GPU would gather the batch on every device.
  run_python('-c', SHARDED, devices=8)
