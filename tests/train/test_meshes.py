"""Layouts on (data, fsdp, tensor) meshes, and that they do not change the numbers."""

import contextlib

import jax
import pytest

import sink_jax as sj
from sink_jax.train.optimizer import AdamW, Muon, OptimizerConfig, OrthoAdam
from sink_jax.train.step import state_layout
from tests.train import runs


def test_eight_devices_train_as_one_does():
  cases = ('sink:2x2x2', 'alibi:1x2x4', 'sigma:2x4x1', 'biases:8x1x1')
  out = runs.run_python('-m', 'tests.train.meshes', *cases, devices=8)
  assert len(out.splitlines()) == len(cases), out


def abstract(*sizes):
  return jax.sharding.AbstractMesh(sizes, ('data', 'fsdp', 'tensor'))


def layout(mesh, rule=AdamW(), **options):
  """{path: axes of the mesh} of parameters and of the optimiser's first moments."""
  config = sj.ModelConfig(
    **dict(layers=3, d_model=32, heads=8, kv_heads=4, ffn_hidden=48, vocab_size=100) | options
  )
  state = state_layout(config, OptimizerConfig(rule=rule), mesh)
  flat = lambda tree: {
    jax.tree_util.keystr(path, simple=True, separator='/'): tuple(x.sharding.spec)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }
  params = flat(state.params)
  moments = {
    path.partition('/mu/')[2]: spec
    for path, spec in flat(state.opt_state).items()
    if '/mu/' in path
  }
  assert moments == params
  return params


def test_parameters_are_split_by_the_table():
  spec = sj.AttentionSpec(
    kv_bias=sj.KVBias(),
    temperature=sj.LogLength(),
    value=sj.ValueScale(),
    qk_norm=sj.ProjectionQKNorm(),
    head=sj.ElementGate(opening=0.25),
  )
  options = dict(biases=('qkv', 'out', 'ffn'), attention=spec)
  specs = layout(abstract(1, 2, 4), **options)
  for rule in (Muon(), OrthoAdam()):
    assert layout(abstract(1, 2, 4), rule, **options) == specs
  assert specs['embed'] == ('fsdp', None) and specs['unembed/kernel'] == (None, 'fsdp')
  expected = {
    'attention/query/kernel': ('fsdp', 'tensor'),
    'attention/key/bias': ('tensor',),
    'attention/out/kernel': ('tensor', 'fsdp'),
    'attention/out/bias': ('fsdp',),
    'ffn/w2/kernel': ('fsdp', 'tensor'),
    'ffn/w_out/kernel': ('tensor', 'fsdp'),
    'attention/kv_bias_key': ('tensor', 'fsdp'),
    'attention/qk_norm_key_gain': ('tensor', 'fsdp'),
    'attention/temperature_scale': ('tensor',),
    'attention/value_scale': ('tensor',),
    'attention/head_kernel': ('fsdp', 'tensor'),
    'attention/head_bias': ('tensor',),
  }
  found = {name: specs[f'blocks/{name}'] for name in expected}
  assert found == {name: (None, *axes) for name, axes in expected.items()}  # layers are not split
  shared = sj.AttentionSpec(kv_bias=sj.KBias(shared=True), head=sj.HeadNorm())
  specs = layout(abstract(1, 2, 4), attention=shared)
  assert specs['blocks/attention/head_gain'] == (None, 'fsdp')
  assert 'tensor' not in specs['blocks/attention/kv_bias_key']
  # Nor are three layers over three devices.
  logits = layout(abstract(1, 3, 4), attention=sj.AttentionSpec(kv_bias=sj.SinkLogit()))
  assert logits['blocks/attention/kv_bias_logit'] == (None, 'tensor')


def test_imported_layers_keep_their_layout():
  from sink_jax.models.config import Experts, Layer, Mamba

  pattern = Layer(experts=Experts(4, 2)), Layer(mamba=Mamba(64, 4, 4, 4)), Layer()
  split, whole = (layout(abstract(1, 2, n), pattern=pattern) for n in (4, 1))
  same = lambda path: 'mamba' in path or 'layer0/ffn' in path
  assert {p: s for p, s in split.items() if same(p)} == {p: s for p, s in whole.items() if same(p)}
  assert split['blocks/layer1/ffn/w1/kernel'] == (None, 'fsdp', 'tensor')
  assert not any('tensor' in spec for spec in whole.values())


@pytest.mark.parametrize(
  'devices, changes, message',
  [
    (
      8,
      dict(model__heads=6, mesh__tensor=4),
      r'mesh.tensor = 4 does not divide model.heads = 6: .* mesh.tensor = 2',
    ),
    (8, dict(model__kv_heads=2, mesh__tensor=4), r'model.kv_heads = 2: .* mesh.tensor = 2'),
    (8, dict(model__ffn_hidden=50, mesh__tensor=4), r'model.ffn_hidden = 50: .* mesh.tensor = 2'),
    (32, dict(mesh__tensor=4, mesh__fsdp=2), None),  # a batch of 8 for 8 groups
    (32, dict(mesh__tensor=2), 'mesh.fsdp = 16 must divide .* batch_size = 16'),
    (32, dict(mesh__tensor=5), 'mesh.tensor = 5 do not fit 32 devices'),
  ],
)
def test_what_does_not_divide_is_refused(devices, changes, message, monkeypatch):
  config = dict(model__heads=8, model__d_model=48, model__ffn_hidden=64, model__vocab_size=11)
  monkeypatch.setattr(jax, 'device_count', lambda: devices)
  with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
    runs.config(**config | changes).check_devices()


TWO_SLICES = """
import jax, numpy as np, pytest, sink_jax as sj
from sink_jax.data.dataset import Batch
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.models.sharding import make_mesh
from sink_jax.train.step import init_state, make_train_step

kind = type(jax.devices()[0])
kind.slice_index = property(lambda device: device.id % 2)  # slices are mixed in jax.devices()
config = sj.sized('tiny', vocab_size=11, dtype='float32')
optimizer = OptimizerConfig()
tokens = np.random.default_rng(0).integers(0, 11, (8, 16)).astype(np.int32)
batch = Batch(tokens, tokens, np.ones(tokens.shape, np.float32))
mesh = make_mesh(4, 2, 2)
slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
# Only 'data' crosses from one slice to the other, and half of it stays within one.
assert (slices == slices[:, :1, :1]).all() and sorted(slices[:, 0, 0]) == [0, 0, 1, 1], slices
losses = []
for one in (mesh, make_mesh(1, 1, 1, jax.devices()[:1])):
  state, metrics = make_train_step(config, optimizer, one)(
      init_state(config, optimizer, 0, one), batch, optimizer.learning_rate)
  losses.append([float(metrics[name]) for name in ('loss', 'grad_norm')])
np.testing.assert_allclose(*losses, rtol=1e-6)
with pytest.raises(ValueError, match='a multiple of the 2 slices'):
  make_mesh(1, 8, 2)
"""


def test_two_slices_are_one_mesh_whose_data_axis_crosses_the_network():
  runs.run_python('-c', TWO_SLICES, devices=16)
