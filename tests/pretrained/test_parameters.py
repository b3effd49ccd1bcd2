"""Filling the parameter tree: refusals, memory, and the devices that hold it."""

import weakref

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import sink_jax as sj
from sink_jax.data.tokenizer import Bytes
from sink_jax.models.arrays import first_not_finite
from sink_jax.models.generate import text_losses
from sink_jax.pretrained import parameters
from sink_jax.pretrained.families import FAMILIES
from sink_jax.pretrained.files import Checkpoint
from sink_jax.train.start import open_source
from sink_jax.pretrained.stored_tensors import LeafPart, StoredTensor
from tests.pretrained import tiny
from tests.train.runs import run_python

GATE = 'model.layers.1.mlp.gate_proj.weight'
GAIN = LeafPart('final_norm/gain')


def refused(folder, *parts, **options):
  with pytest.raises(ValueError) as caught:
    sj.load_pretrained(folder, **options)
  for part in parts:
    assert part in str(caught.value), caught.value


def test_every_tensor_has_its_place_and_linear_layers_are_transposed(tmp_path):
  arrays = tiny.write(tmp_path, files=3)
  run = sj.load_pretrained(tmp_path)
  assert run.name == tmp_path.name
  params = run.params
  assert_array_equal(params['embed'], arrays['model.embed_tokens.weight'])
  assert_array_equal(params['unembed']['kernel'], arrays['lm_head.weight'].T)
  assert_array_equal(params['blocks']['ffn']['w1']['kernel'][1], arrays[GATE].T)
  for layer, gain in enumerate(params['blocks']['norm2']['gain']):
    assert_array_equal(gain, arrays[f'model.layers.{layer}.post_attention_layernorm.weight'])


@pytest.mark.parametrize(
  'stored, dtype',
  [
    ('float32', 'bfloat16'),
    ('float16', 'float32'),
    ('bfloat16', 'float32'),
    ('float64', 'bfloat16'),
  ],
)
def test_dtypes(tmp_path, stored, dtype):
  # A third has more digits than any of these dtypes.
  thirds = {name: x / np.float64(3) for name, x in tiny.tensors(tiny.LLAMA).items()}
  arrays = {name: x.astype(stored) for name, x in thirds.items()}
  tiny.write(tmp_path, arrays=arrays)
  run = sj.load_pretrained(tmp_path, dtype=dtype)
  assert run.config.dtype == dtype
  assert {x.dtype for x in jax.tree.leaves(run.params)} == {np.dtype(dtype)}
  # As in PyTorch, float64 becomes float32 before it becomes bfloat16; the others are exact.
  expected = arrays[GATE].T.astype('float32').astype(dtype)
  assert_array_equal(run.params['blocks']['ffn']['w1']['kernel'][1], expected)


TIED = tiny.LLAMA | dict(tie_word_embeddings=True)
EMBED, EXPERTS = 'model.embed_tokens.weight', 'model.layers.1.mlp.experts.gate_up_proj'


def changed(name, index, value, stored='float32'):
  """Changes one number of a tensor, after storing all tensors in the dtype `stored`."""

  def change(own):
    own = {name: x if x.dtype == np.uint8 else x.astype(stored) for name, x in own.items()}
    own[name][index] = value
    return own

  return change


def case(change, *words, hf=tiny.LLAMA, dtype='float32'):
  """(changes of the tensors of a checkpoint, words of the error, config.json, dtype of a load)."""
  return change, words, hf, dtype


@pytest.mark.parametrize(
  'change, words, hf, dtype',
  [
    case(lambda own: {GATE: own[GATE].astype('float8_e4m3fn')}, GATE, 'F8', 'BF16'),
    case(
      lambda own: {f'{EXPERTS}_blocks': own[f'{EXPERTS}_blocks'].astype('f4')},
      f'{EXPERTS}_blocks is',
      'F32, and not',
      'U8',
      hf=tiny.GPT_OSS,
    ),
    case(lambda own: {GATE: own[GATE][:-1]}, 'of-00003.safetensors', GATE, '(11, 8)', '(12, 8)'),
    case(
      lambda own: dict.fromkeys(name for name in own if 'self_attn' in name),
      'lacks tensors',
      'model.layers.1.self_attn.q_proj.weight and 7 more',
      'config.json',
    ),
    case(
      lambda own: {'model.layers.3.mlp.gate_proj.weight': own[GATE]},
      'has unknown tensors',
      'model.layers.3.mlp.gate_proj.weight',
      'config.json',
    ),
    case(lambda own: {'norm.weight': own['model.norm.weight']}, 'a tensor twice'),
    case(
      lambda own: {'lm_head.weight': own[EMBED] + 1},
      'tie_word_embeddings',
      'lm_head.weight',
      hf=TIED,
    ),
    case(
      changed(GATE, (3, 5), np.nan),
      f'of-00003.safetensors: the tensor {GATE}',
      'nan at [3, 5]',
      'download the file again',
    ),
    case(changed(GATE, (3, 5), np.nan, 'bfloat16'), 'nan at [3, 5]'),
    case(changed(GATE, (3, 5), -np.inf, 'float16'), '-inf at [3, 5]', dtype='bfloat16'),
    case(
      changed(GATE, (3, 5), -3.4e38),
      GATE,
      'holds 3.4e+38, which bfloat16 cannot hold',
      '--dtype=float32',
      dtype='bfloat16',
    ),
    case(changed(GATE, (3, 5), 1e300, 'float64'), GATE, 'holds 1e+300, which float32 cannot hold'),
    case(
      lambda own: (own := changed(EMBED, (1, 1), np.nan)(own)) | {'lm_head.weight': own[EMBED]},
      'nan at [1, 1]',
      hf=TIED,
    ),
    case(
      changed(f'{EXPERTS}_scales', (0, 0, 0), 255),
      f'the tensor {EXPERTS}_blocks with {EXPERTS}_scales holds',
      hf=tiny.GPT_OSS,
    ),
  ],
)
def test_tensors_that_cannot_be_the_model_s_are_named(tmp_path, change, words, hf, dtype):
  arrays = tiny.tensors(hf)
  arrays |= change(arrays)
  tiny.write(tmp_path, hf, {name: x for name, x in arrays.items() if x is not None}, files=3)
  refused(tmp_path, str(tmp_path), *words, dtype=dtype)


def bare(arrays):
  """Tensors without the prefix of their names."""
  return {name.removeprefix('model.'): x for name, x in arrays.items()}


@pytest.mark.parametrize(
  'change',
  [
    bare,
    lambda own: own | {'lm_head.weight': own[EMBED]},
    lambda own: own | {'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros(2, np.float32)},
  ],
)
def test_buffers_the_prefix_and_the_unembedding_of_a_tied_model_may_be_there(tmp_path, change):
  arrays = tiny.write(tmp_path / 'whole', TIED)
  tiny.write(tmp_path / 'other', TIED, change(arrays))
  whole, other = (sj.load_pretrained(tmp_path / name).params for name in ('whole', 'other'))
  assert 'unembed' not in whole
  jax.tree.map(assert_array_equal, other, whole)


def test_a_dtype_that_is_not_a_float_is_refused(tmp_path):
  tiny.write(tmp_path)
  refused(tmp_path, "dtype = 'int8'", 'bfloat16', dtype='int8')


@pytest.fixture
def headless(tmp_path):
  """A model with and without its unembedding; in 'bare' all names lack their prefix, too."""
  hf = tiny.LLAMA | dict(vocab_size=258)
  arrays = tiny.write(tmp_path / 'whole', hf)
  del arrays['lm_head.weight']
  tiny.write(tmp_path / 'without', hf, arrays)
  tiny.write(tmp_path / 'bare', hf, bare(arrays))
  return tmp_path


def test_sinks_need_no_unembedding(headless, caplog):
  whole = sj.load_pretrained(headless / 'whole')
  size = lambda run: sum(x.size for x in jax.tree.leaves(run.params))
  for name in ('without', 'bare'):
    caplog.clear()
    run = sj.load_pretrained(headless / name)
    (remark,) = caplog.messages
    assert str(headless / name) in remark
    assert 'lm_head.weight' in remark
    assert sj.parameter_count(run.config) == size(run) == size(whole) - 258 * 8
    jax.tree.map(assert_array_equal, run.params['blocks'], whole.params['blocks'])
  tokens = np.random.default_rng(0).integers(0, 258, (3, 9))
  found, expected = (sj.probe(model, tokens) for model in (run, whole))
  assert_array_equal(found.importance, expected.importance)
  assert_array_equal(found.norms['hidden'], expected.norms['hidden'])


@pytest.mark.parametrize(
  'call',
  [
    lambda run, tokens: run.logits(tokens),
    lambda run, tokens: run.generate(tokens, 3),
    lambda run, tokens: next(
      text_losses(run.config, run.params, tokens, sj.CachePolicy(8, positions='text'))
    ),
    lambda run, tokens: sj.graft(run, tokens=tokens, attention={'head': 'HeadGate(scale=2)'}),
    lambda run, tokens: sj.analyse('edits', run, tokens),
    lambda run, tokens: open_source(run.folder),
  ],
)
def test_what_needs_an_unembedding_is_refused_without_one(headless, call):
  run = sj.load_pretrained(headless / 'without')
  with pytest.raises(ValueError, match='no unembedding .*whole model') as caught:
    call(run, np.arange(24).reshape(3, 8))
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_the_first_parameter_that_is_not_finite_is_named_by_its_layer(value):
  scalar, matrix = np.ones(()), np.ones((3, 4), 'bfloat16')
  assert first_not_finite({'a': scalar, 'b': {'c': matrix}}) is None
  assert first_not_finite({'a': scalar * value, 'b': {'c': matrix}}) == 'a'
  matrix[2, 1] = value
  assert first_not_finite({'a': scalar, 'b': {'c': matrix}}) == 'b/c[2]'


def test_a_checkpoint_has_one_layout_of_the_two_of_its_family(tmp_path):
  hf = tiny.LLAMA | dict(
    model_type='mixtral', num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1
  )
  old, new = 'model.layers.0.block_sparse_moe', 'model.layers.0.mlp'
  both = tiny.write(tmp_path / 'both', hf)
  refused(tmp_path / 'both', 'has unknown tensors', old, 'and 2 more')
  shapes = {
    f'{new}.gate.weight': (2, 8),
    f'{new}.experts.gate_up_proj': (2, 24, 8),
    f'{new}.experts.down_proj': (2, 8, 12),
  }
  fused = {name: x for name, x in both.items() if old not in name}
  fused |= {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
  tiny.write(tmp_path / 'fused', hf, fused)
  sj.load_pretrained(tmp_path / 'fused')
  del fused[f'{new}.experts.down_proj']
  tiny.write(tmp_path / 'lacks', hf, fused)
  refused(tmp_path / 'lacks', 'lacks tensors', f'{old}.experts.0.w2.weight')


def test_tokens_that_the_model_lacks_are_refused_where_a_text_has_them(tmp_path):
  tiny.write(tmp_path, tiny.LLAMA | dict(vocab_size=258))
  tokenizer = Bytes().open()
  tokenizer.model.add_tokens(['fox'])
  tokenizer.save(tmp_path)
  run = sj.load_pretrained(tmp_path)
  assert run.logits(sj.tokenize(run, 'a dog')[0][None]).shape == (1, 5, 258)
  with pytest.raises(ValueError, match='use the tokenizer of the model'):
    run.logits(sj.tokenize(run, 'a fox')[0][None])


def test_one_stored_tensor_at_a_time_and_every_one_once(tmp_path, monkeypatch):
  tiny.write(tmp_path, files=3)
  alive, seen, read = [], [], Checkpoint.read

  def watched(self, name):
    assert not [r for r in alive if r() is not None], f'{seen[-1]} is still in memory'
    x = read(self, name)
    alive.append(weakref.ref(x))
    seen.append(name)
    return x

  monkeypatch.setattr(Checkpoint, 'read', watched)
  sj.load_pretrained(tmp_path)
  assert seen == list(Checkpoint(tmp_path).entries)


def test_leaves_are_written_in_their_own_memory(tmp_path):
  # A donated leaf is deleted, so no leaf is ever in memory twice.
  tiny.write(tmp_path)
  leaf = jax.numpy.zeros((3, 8, 12))
  part = LeafPart('w', (2,), transposed=True)
  new, finite = parameters._write_part(leaf, part, np.ones((12, 8), np.float32))
  assert finite
  assert leaf.is_deleted()
  assert_array_equal(new, [np.zeros((8, 12))] * 2 + [np.ones((8, 12))])


@pytest.mark.parametrize(
  'parts', [(), (GAIN, GAIN), (LeafPart('final_norm/gain', take=lambda x: x[:4]),)]
)
def test_tables_that_do_not_fill_the_tree_are_found_out(tmp_path, monkeypatch, parts):
  tiny.write(tmp_path)
  family = FAMILIES['llama']

  def tensors(*arguments):
    return family.stored_tensors(*arguments) | {'model.norm.weight': StoredTensor((8,), parts)}

  monkeypatch.setitem(FAMILIES, 'llama', family._replace(stored_tensors=tensors))
  with pytest.raises(AssertionError, match='final_norm/gain'):
    sj.load_pretrained(tmp_path)


SHARDED = """
import sys
import jax
import numpy as np
import sink_jax as sj
from sink_jax.models.sharding import make_mesh, state_shardings

for folder in sys.argv[1:]:
  mesh = make_mesh(2, 4)
  one, many = sj.load_pretrained(folder), sj.load_pretrained(folder, mesh=mesh)
  jax.tree.map(np.testing.assert_array_equal, one.params, many.params)
  same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), many.params,
                      state_shardings(mesh, many.params))
  assert all(jax.tree.leaves(same)), same
  assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(many.params))
  tokens = np.arange(24).reshape(2, 12) % 16
  np.testing.assert_allclose(one.logits(tokens), many.logits(tokens), rtol=1e-4, atol=1e-4)
"""


def test_a_sharded_load_is_the_same_load(tmp_path):
  tiny.write(tmp_path / 'llama', files=2)
  tiny.write(tmp_path / 'gpt_oss', tiny.GPT_OSS)
  run_python('-c', SHARDED, tmp_path / 'llama', tmp_path / 'gpt_oss', devices=8)
