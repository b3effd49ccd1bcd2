"""GGUF files: every tensor type, every architecture, metadata, names, and damaged files."""

import hashlib
import re
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import sink_jax as sj
from sink_jax.attention.position import Llama3Rope
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.gguf import TYPES, GgufFile
from sink_jax.pretrained import hub
from sink_jax.pretrained.load import model_type
from tests.pretrained import gguf_files, tiny


@pytest.mark.parametrize('name', TYPES)
def test_every_type_is_read_as_gguf_dequantises_it(tmp_path, name):
  rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[name]
  block, size = gguf.GGML_QUANT_SIZES[kind]
  shape = 3, 5, 512
  if name.endswith('_K'):  # the package cannot quantise these, but any bytes are numbers
    data = rng.integers(0, 60, (*shape[:2], 512 // block * size), np.uint8)
  else:
    data = gguf.quants.quantize(rng.standard_normal(shape, np.float32), kind)
  arrays = {'before': np.ones(7, np.float32), 'x': data}
  metadata = {'general.architecture': 'llama'}
  file = GgufFile(gguf_files.write(tmp_path / 'x.gguf', metadata, arrays, {'x': name}))
  assert (file.tensors['x'].shape, file.tensors['x'].type) == (shape, name)
  found = file.read('x')
  assert found.dtype == np.float32
  assert_array_equal(found, gguf.quants.dequantize(data, kind))


def load(path, hf, values={}, arrays=None):
  """The model of a GGUF file with the metadata and tensors of a config.json; None: without it."""
  metadata = {key: x for key, x in (gguf_files.metadata(hf) | values).items() if x is not None}
  arrays = gguf_files.tensors(hf, tiny.tensors(hf) if arrays is None else arrays)
  return sj.load_pretrained(gguf_files.write(path / 'x.gguf', metadata, arrays))


LLAMA, GEMMA3 = gguf_files.LLAMA, gguf_files.GEMMA3
BIASED = LLAMA | {'attention_bias': True, 'mlp_bias': True}
SCALED = {'gemma3.rope.scaling.type': 'linear', 'gemma3.rope.scaling.factor': 8.0}
SLIDING = 'gemma3.attention.sliding_window'


def rounded(config):
  """The config with six digits: a file stores eps and the base in float32."""
  return re.sub(r'\d[\d.]*(e-?\d+)?', lambda number: f'{float(number[0]):.6g}', repr(config))


@pytest.mark.parametrize(
  'hf, values',
  [
    (BIASED, {}),
    (BIASED | {'tie_word_embeddings': True}, {}),
    (LLAMA | {'model_type': 'qwen2'}, {}),
    (LLAMA | {'model_type': 'qwen3', 'head_dim': 16}, {}),
    (GEMMA3, {}),  # the seventh layer begins a second period
    (GEMMA3 | {'rope_scaling': {'rope_type': 'linear', 'factor': 8}}, SCALED),
    (GEMMA3 | {'sliding_window_pattern': 2}, {f'{SLIDING}_pattern': 2}),
    (GEMMA3 | {'sliding_window_pattern': 1}, {SLIDING: 0}),
  ],
)
def test_a_file_equals_its_safetensors(tmp_path, hf, values):
  arrays = tiny.write(tmp_path / 'hf', hf)
  ours, theirs = load(tmp_path, hf, values, arrays), sj.load_pretrained(tmp_path / 'hf')
  assert model_type(ours) == model_type(theirs)
  assert rounded(ours.config) == rounded(theirs.config)
  # The file of Gemma stores 1 + w, rounded.
  error = 3e-7 if 'gemma3' in hf['model_type'] else 0
  close = lambda x, y: assert_allclose(x, y, 0, error)
  jax.tree.map(close, ours.params, theirs.params)
  assert (ours.name, ours.bos) == ('x', 'none')
  assert_array_equal(sj.tokenize(ours, 'abc 01')[0], [14, 15, 11, 12])


def test_llama3_scaling_is_found_in_its_factors(tmp_path):
  hf = LLAMA | {'rope_theta': 5e5, 'hidden_size': 256, 'num_attention_heads': 4}
  inverse = 5e5 ** (-np.arange(0, 64, 2) / 64)
  wavelengths = 2 * np.pi / inverse
  share = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
  factors = 1 / ((1 - share) / 32 + share)  # llama.cpp divides frequencies by these
  rope = Llama3Rope(
    base=5e5, factor=32, low_frequency_factor=1, high_frequency_factor=4, original_length=8192
  )

  def loaded(factors, values={}):
    arrays = gguf_files.tensors(hf, tiny.tensors(hf))
    arrays['rope_freqs.weight'] = factors.astype(np.float32)
    metadata = gguf_files.metadata(hf) | values
    return sj.load_pretrained(gguf_files.write(tmp_path / 'x.gguf', metadata, arrays))

  assert loaded(factors).config.attention.position == rope
  with pytest.raises(ValueError, match='rope_freqs.weight'):
    loaded(factors**1.1)
  with pytest.raises(ValueError, match='rope.scaling.factor'):
    loaded(factors, {'llama.rope.scaling.factor': 4.0})
  for hf in (hf | {'model_type': 'qwen2'}, GEMMA3):  # only LLaMA has factors
    with pytest.raises(ValueError, match='x.gguf.* rope_freqs.weight'):
      loaded(factors)


@pytest.mark.parametrize(
  'file, values, name',
  [
    ('x.gguf', {}, 'x (Q4_0)'),
    ('y.gguf', {'general.file_type': 15}, 'y (Q4_K_M)'),
    ('z.q4_0.gguf', {}, 'z.q4_0'),
    ('u.gguf', {'general.file_type': 999}, 'u (Q4_0)'),  # unknown
  ],
)
def test_names_say_that_weights_are_quantised(tmp_path, file, values, name):
  hf = LLAMA | {'intermediate_size': 64}
  arrays = gguf_files.tensors(hf, tiny.tensors(hf))
  types = {name: 'Q4_0' for name, x in arrays.items() if x.ndim == 2}
  path = gguf_files.write(tmp_path / file, gguf_files.metadata(hf) | values, arrays, types)
  assert sj.load_pretrained(path).name == name


@pytest.mark.parametrize(
  'values, factor',
  [
    ({}, 1.0),
    ({'scaling.factor': 4.0}, 4.0),
    ({'scaling.type': 'linear'}, 1.0),
    ({'scaling.type': 'none', 'scaling.factor': 4.0}, 1.0),
    # The old name of the factor counts if there is no new one.
    ({'scale_linear': 4.0}, 4.0),
    ({'scale_linear': 4.0, 'scaling.factor': 0.0}, 1.0),
  ],
)
def test_linear_scaling_is_the_default_as_in_llama_cpp(tmp_path, values, factor):
  run = load(tmp_path, LLAMA, {f'llama.rope.{key}': value for key, value in values.items()})
  assert run.config.attention.position.factor == factor


# By the namespaces of llama.cpp: nothing reads the first ones, and the others say its defaults.
OUTSIDE = {
  'mradermacher.quantize_version': '2',
  'mergekit.weight': [0.5, 0.25],
  'quantize.imatrix.file': 'x',
  'anything': True,
  'qwen2.expert_count': 8,
  'general.file_type': 999,
  'general.type': 'model',
  'general.tags': ['a', 'b'],
  'general.sampling.temp': 0.5,
  'split.no': 0,
  'split.count': 1,
  'split.tensors.count': 9,
}
NO_CHANGE = {
  'expert_count': 0,
  'expert_used_count': 0,
  'attention.causal': True,
  'attention.scale': 0.0,
  'attention.clamp_kqv': 0.0,
  'attention.sliding_window': 0,
  'logit_scale': 1.0,
  'embedding_scale': 0.0,
  'pooling_type': 0,
  'leading_dense_block_count': 0,
  'rope.scale_linear': 1.0,
  'rope.scaling.factor': 0.0,
  'rope.scaling.attn_factor': 1.0,
  'rope.scaling.original_context_length': 4,
  'rope.scaling.finetuned': True,
  'rope.scaling.type': 'none',
  'rope.dimension_count': 8,
  'attention.value_length_swa': 8,
  'tensor_data_layout': 'Meta AI original pth',
  'attention.head_count': [4, 4, 4],
  'attention.head_count_kv': [2, 2, 2],
  'feed_forward_length': [12, 12, 12],
}


def test_metadata_that_change_no_result_are_ignored(tmp_path):
  plain = load(tmp_path, LLAMA)
  inside = {f'llama.{key}': value for key, value in NO_CHANGE.items()}
  for values in (OUTSIDE, inside, {'llama.logit_scale': 0.0}):
    run = load(tmp_path, LLAMA, values)
    assert run.config == plain.config
    jax.tree.map(assert_array_equal, run.params, plain.params)


@pytest.mark.parametrize(
  'key, value',
  [
    ('llama.embedding_length', None),
    ('llama.block_count', None),
    ('llama.attention.head_count', 0),
    ('llama.attention.head_count_kv', [2, 1, 2]),
    ('llama.attention.head_count_kv', [2, 2]),
    ('llama.feed_forward_length', [12, 12, 8]),
    ('llama.expert_count', 8),
    ('llama.expert_used_count', 2),
    ('llama.attention.causal', False),
    ('llama.attention.clamp_kqv', 8.0),
    ('llama.attention.scale', 0.125),
    ('llama.attention.sliding_window', 4),
    ('llama.logit_scale', 0.5),
    ('llama.pooling_type', 3),
    ('llama.final_logit_softcapping', 30.0),
    ('llama.a_new_key', 1),
    ('llama.rope.scaling.type', 'yarn'),
    ('llama.rope.scaling.attn_factor', 1.5),
    ('llama.rope.dimension_count', 4),
    ('llama.attention.value_length', 4),
    ('llama.rope.dimension_count_swa', 4),
    ('general.type', 'adapter'),
    ('general.architecture', 'bert'),
  ],
)
def test_metadata_that_change_a_result_are_refused(tmp_path, key, value):
  with pytest.raises(ValueError, match=key) as error:
    load(tmp_path, LLAMA, {key: value})
  assert 'x.gguf' in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'pattern, full',
  [
    (None, [6]),
    (3, [3, 6]),
    (1, [1, 2, 3, 4, 5, 6, 7]),
    (0, []),
    ([True, True, True, True, True, False, True], [6]),
    ([True, False] * 3 + [True], None),
    ([1] * 7, None),
    (True, None),
  ],
)
def test_the_pattern_of_gemma3_says_which_layers_have_no_window(tmp_path, pattern, full):
  values = {f'{SLIDING}_pattern': pattern}
  if full is None:  # llama.cpp reads only a number here, and would compute with its default
    with pytest.raises(ValueError, match=f'{SLIDING}_pattern'):
      load(tmp_path, GEMMA3, values)
    return
  specs = load(tmp_path, GEMMA3, values).config.attention_specs[:7]
  assert [i for i, spec in enumerate(specs, 1) if not spec.mask.window] == full
  assert all(spec.position.base == (1e4 if spec.mask.window else 1e6) for spec in specs)


def test_a_part_of_a_split_model_says_how_to_merge(tmp_path):
  metadata = {'general.architecture': 'llama', 'split.no': 1, 'split.count': 3}
  later = gguf_files.write(tmp_path / 'x-2.gguf', metadata, {'x': np.ones(4, 'f4')})
  for call in (
    lambda: load(tmp_path, LLAMA, {'split.count': 3}),
    lambda: sj.load_pretrained(later),
  ):
    with pytest.raises(ValueError, match='split.count.*llama-gguf-split --merge'):
      call()


def test_the_page_says_which_architectures_load(tmp_path):
  page = (Path(__file__).parents[2] / 'docs/open_models.md').read_text()
  rows = re.findall(r'^\| `([\w-]+)` \|.*\| (loads|refused)', page, re.MULTILINE)
  assert len(rows) >= 10
  for architecture, said in rows:
    path = gguf_files.write(tmp_path / 'x.gguf', {'general.architecture': architecture}, {})
    # A file that has nothing else lacks the size of the model.
    missing = 'general.architecture' if said == 'refused' else f'{architecture}.block_count'
    with pytest.raises(ValueError, match=missing):
      sj.load_pretrained(path)


def test_tensors_are_named_as_in_the_file(tmp_path):
  arrays = gguf_files.tensors(LLAMA, tiny.tensors(LLAMA))
  for name in ('blk.1.ffn_up.weight', 'token_embd.weight'):
    others = {other: x for other, x in arrays.items() if other != name}
    path = gguf_files.write(tmp_path / 'x.gguf', gguf_files.metadata(LLAMA), others)
    with pytest.raises(ValueError, match=f'x.gguf.*{name}'):
      sj.load_pretrained(path)


@pytest.mark.parametrize(
  'content, words',
  [
    (b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n', 'git lfs pull'),
    (b'', ''),
    (b'PK\x03\x04' * 30, ''),
    (b'GGUF\x01\0\0\0' + b'\0' * 64, ''),
    (None, ''),
  ],
)
def test_a_file_of_another_kind_is_named(tmp_path, content, words):
  path = tmp_path / 'x.gguf'
  if content is not None:
    path.write_bytes(content)
  for read in (sj.load_pretrained, TextTokenizer.from_path):
    with pytest.raises(ValueError, match=f'x.gguf.*{words}'):
      read(path)


@pytest.fixture
def install(tmp_path, monkeypatch):
  """Installs fake packages that contain no code."""
  monkeypatch.syspath_prepend(str(tmp_path / 'site'))
  monkeypatch.setenv('SINK_JAX_CACHE', str(tmp_path / 'cache'))

  def install(package, file, content):
    info = tmp_path / 'site' / f'{package.replace("-", "_")}-1.0.dist-info'
    info.mkdir(parents=True)
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n')
    (info / 'RECORD').write_text(f'{info.name}/METADATA,,\n{package}/{file},,\n')
    (tmp_path / 'site' / package).mkdir()
    (tmp_path / 'site' / package / file).write_bytes(content)

  return install


def test_models_of_installed_packages_are_found_by_name(install, monkeypatch):
  digest = hashlib.sha256(b'this is a test').hexdigest()
  one = hub.Packaged(('some-model',), 'owner/one')
  two = hub.Packaged(('part-1', 'part-2'), 'owner/two', 'two.gguf', digest)
  monkeypatch.setattr(hub, 'PACKAGED', {'Model-One': one, 'Model-Two': two})
  monkeypatch.setattr(hub, '_downloaded', lambda name, *_: f'from {name}')
  assert hub.resolve('Model-One') == ('from owner/one', 'Model-One')
  install('some-model', 'weights.gguf', b'one')
  install('part-1', 'two.gguf.part0', b'this is ')
  assert hub.resolve('Model-Two') == ('from owner/two', 'Model-Two')
  install('part-2', 'two.gguf.part1', b'a test')
  for text, name, content in (
    ('model-one', 'Model-One', b'one'),
    ('Model-Two', 'Model-Two', b'this is a test'),
  ):
    path, found = hub.resolve(text)
    assert (found, path.read_bytes()) == (name, content)
  assert hub.resolve('Model-Two@main') == ('from owner/two', 'Model-Two@main')
  path.unlink()
  monkeypatch.setitem(hub.PACKAGED, 'Model-Two', two._replace(sha256='0' * 64))
  with pytest.raises(ValueError, match='part-1'):
    hub.resolve('Model-Two')
  assert not path.exists()
