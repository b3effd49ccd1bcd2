"""GGUF files: every tensor type, every architecture, metadata, names, and damaged files."""

import json
import re
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import sink_jax as sj
from sink_jax.attention.position import Llama3Rope
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.gguf import TYPES, GgufFile
from sink_jax.pretrained import hub
from tests.pretrained import gguf_files, tiny
from tests.pretrained.test_parity import FIXTURES, TOLERANCE, assert_close, compare


@pytest.mark.parametrize('name', TYPES)
def test_every_type_is_read_as_gguf_dequantises_it(tmp_path, name):
  rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[name]
  block, size = gguf.GGML_QUANT_SIZES[kind]
  x = rng.standard_normal((3, 5, 2 * 256)).astype(np.float32)
  if name.endswith('_K'):  # the package cannot quantise these, but any bytes are numbers
    data = rng.integers(0, 60, (3, 5, 512 // block * size), np.uint8)
  else:
    data = gguf.quants.quantize(x, kind)
  arrays = {'before': np.ones(7, np.float32), 'x': data}
  path = gguf_files.write(
    tmp_path / 'x.gguf', {'general.architecture': 'llama'}, arrays, {'x': name}
  )
  file = GgufFile(path)
  assert file.tensors['x'].shape == x.shape and file.tensors['x'].type == name
  found = file.read('x')
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, gguf.quants.dequantize(data, kind))
  if not name.endswith('_K'):
    assert np.abs(found - x).max() < 0.3  # 4-bit numbers of size up to 4


BIASED = gguf_files.LLAMA | {'attention_bias': True, 'mlp_bias': True}
SCALED = {'gemma3.rope.scaling.type': 'linear', 'gemma3.rope.scaling.factor': 8.0}


@pytest.mark.parametrize(
  'hf, values, tolerance, rounding',
  [
    (BIASED, {}, 1e-5, 0),
    (BIASED | {'tie_word_embeddings': True}, {}, 1e-5, 0),
    # The seventh layer begins a second period. The file stores 1 + w, rounded.
    (gguf_files.GEMMA3, {}, 1e-4, 3e-7),
    (
      gguf_files.GEMMA3 | {'rope_scaling': {'rope_type': 'linear', 'factor': 8}},
      SCALED,
      1e-4,
      3e-7,
    ),
    (
      gguf_files.GEMMA3 | {'sliding_window_pattern': 2},
      {'gemma3.attention.sliding_window_pattern': 2},
      1e-4,
      3e-7,
    ),
    (
      gguf_files.GEMMA3 | {'sliding_window_pattern': 1},
      {'gemma3.attention.sliding_window': 0},
      1e-4,
      3e-7,
    ),
  ],
)
def test_a_file_equals_its_safetensors(tmp_path, hf, values, tolerance, rounding):
  arrays = tiny.write(tmp_path / 'hf', hf)
  path = gguf_files.write(
    tmp_path / 'x.gguf', gguf_files.metadata(hf) | values, gguf_files.tensors(hf, arrays)
  )
  ours, theirs = sj.load_pretrained(path), sj.load_pretrained(tmp_path / 'hf')
  assert (ours.name, ours.bos) == ('x', 'none') and ours.config.tied == theirs.config.tied
  assert ours.config.pattern == theirs.config.pattern
  tokens = np.arange(10)[None] % 16
  # The file stores eps and the base in float32.
  np.testing.assert_allclose(
    ours.logits(tokens), theirs.logits(tokens), rtol=tolerance, atol=tolerance / 10
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, 0, rounding), ours.params, theirs.params
  )
  np.testing.assert_array_equal(sj.tokenize(ours, 'abc 01')[0], [14, 15, 11, 12])


def of_fixture(tmp_path, name):
  """A GGUF file of a stored checkpoint, and the numbers that transformers computed with it."""
  hf = json.loads((FIXTURES / name / 'config.json').read_text())
  arrays = gguf_files.tensors(hf, load_file(FIXTURES / name / 'model.safetensors'))
  path = gguf_files.write(tmp_path / 'x.gguf', gguf_files.metadata(hf), arrays)
  return sj.load_pretrained(path), load_file(FIXTURES / name / 'expected.safetensors')


def test_qwen3_equals_transformers(tmp_path):
  compare(FIXTURES / 'qwen3', of_fixture(tmp_path, 'qwen3')[0])


def test_qwen2_equals_transformers(tmp_path):
  run, expected = of_fixture(tmp_path, 'qwen2')
  # The second block of this checkpoint has a window of 4 tokens, which a file cannot say.
  inside = slice(None), slice(4)
  logits = run.logits(expected['tokens'][inside])
  assert_close(logits, expected['logits'][inside], 'logits', TOLERANCE)
  assert np.abs(run.params['blocks']['attention']['key']['bias']).max() > 0


def test_llama3_scaling_is_found_in_its_factors(tmp_path):
  size, rope = (
    64,
    Llama3Rope(
      base=5e5, factor=32, low_frequency_factor=1, high_frequency_factor=4, original_length=8192
    ),
  )
  hf = gguf_files.LLAMA | {'rope_theta': 5e5, 'hidden_size': 4 * size}
  inverse = 5e5 ** (-np.arange(0, size, 2) / size)
  wavelengths = 2 * np.pi / inverse
  share = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
  factors = 1 / ((1 - share) / 32 + share)  # llama.cpp divides frequencies by these
  arrays = gguf_files.tensors(hf, tiny.tensors(hf)) | {'rope_freqs.weight': factors.astype('f4')}
  path = gguf_files.write(tmp_path / 'x.gguf', gguf_files.metadata(hf), arrays)
  assert sj.load_pretrained(path).config.attention.position == rope
  arrays['rope_freqs.weight'] = (factors**1.1).astype('f4')
  with pytest.raises(ValueError, match='rope_freqs.weight'):
    sj.load_pretrained(gguf_files.write(tmp_path / 'y.gguf', gguf_files.metadata(hf), arrays))
  arrays['rope_freqs.weight'] = factors.astype('f4')
  twice = gguf_files.metadata(hf) | {'llama.rope.scaling.factor': 4.0}
  with pytest.raises(ValueError, match='rope.scaling.factor'):
    sj.load_pretrained(gguf_files.write(tmp_path / 'z.gguf', twice, arrays))


def test_only_llama_has_factors_of_frequencies(tmp_path):
  hf = gguf_files.LLAMA | {'model_type': 'qwen2'}
  arrays = gguf_files.tensors(hf, tiny.tensors(hf))
  arrays['rope_freqs.weight'] = np.full(4, 2, np.float32)
  path = gguf_files.write(tmp_path / 'x.gguf', gguf_files.metadata(hf), arrays)
  with pytest.raises(ValueError, match='rope_freqs.weight'):
    sj.load_pretrained(path)


def quantised(path, values={}):
  hf = gguf_files.LLAMA | {'intermediate_size': 64}
  arrays = gguf_files.tensors(hf, tiny.tensors(hf))
  types = {name: 'Q4_0' for name, x in arrays.items() if x.ndim == 2}
  return gguf_files.write(path, gguf_files.metadata(hf) | values, arrays, types)


def test_names_say_that_weights_are_quantised(tmp_path):
  mixture, unknown = {'general.file_type': 15}, {'general.file_type': 999}
  for file, values, name in (
    ('x.gguf', {}, 'x (Q4_0)'),
    ('y.gguf', mixture, 'y (Q4_K_M)'),
    ('z.q4_0.gguf', {}, 'z.q4_0'),
    ('u.gguf', unknown, 'u (Q4_0)'),
  ):
    assert sj.load_pretrained(quantised(tmp_path / file, values)).name == name


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
  hf = gguf_files.LLAMA
  metadata = gguf_files.metadata(hf) | {f'llama.rope.{key}': value for key, value in values.items()}
  path = gguf_files.write(tmp_path / 'x.gguf', metadata, gguf_files.tensors(hf, tiny.tensors(hf)))
  assert sj.load_pretrained(path).config.attention.position.factor == factor


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


@pytest.fixture(scope='module')
def logits_with(tmp_path_factory):
  """A function: metadata to add to those of a small model -> logits and path of that file."""
  folder, hf = tmp_path_factory.mktemp('metadata'), gguf_files.LLAMA
  arrays = gguf_files.tensors(hf, tiny.tensors(hf))

  def logits(values):
    kept = {
      key: value for key, value in (gguf_files.metadata(hf) | values).items() if value is not None
    }
    path = gguf_files.write(folder / 'x.gguf', kept, arrays)
    return np.asarray(sj.load_pretrained(path).logits(np.arange(10)[None])), path

  return logits


def test_metadata_that_change_no_result_are_ignored(logits_with):
  plain = logits_with({})[0]
  inside = {f'llama.{key}': value for key, value in NO_CHANGE.items()}
  np.testing.assert_array_equal(logits_with(OUTSIDE)[0], plain)
  np.testing.assert_array_equal(logits_with(inside)[0], plain)
  np.testing.assert_array_equal(logits_with({'llama.logit_scale': 0.0})[0], plain)


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
def test_metadata_that_change_a_result_are_refused(logits_with, key, value):
  with pytest.raises(ValueError, match=key) as error:
    logits_with({key: value})
  assert 'x.gguf' in str(error.value) and '\n' not in str(error.value)


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
  hf, key = gguf_files.GEMMA3, 'gemma3.attention.sliding_window_pattern'
  values = gguf_files.metadata(hf) | ({} if pattern is None else {key: pattern})
  path = gguf_files.write(tmp_path / 'x.gguf', values, gguf_files.tensors(hf, tiny.tensors(hf)))
  if full is None:  # llama.cpp reads only a number here, and would compute with its default
    with pytest.raises(ValueError, match=key):
      sj.load_pretrained(path)
    return
  config = sj.load_pretrained(path).config
  specs = config.attention_specs[:7]
  assert [i for i, spec in enumerate(specs, 1) if not spec.mask.window] == full
  assert all(spec.position.base == (1e4 if spec.mask.window else 1e6) for spec in specs)


def test_a_part_of_a_split_model_says_how_to_merge(logits_with, tmp_path):
  later = gguf_files.write(
    tmp_path / 'x-00002-of-00003.gguf',
    {'general.architecture': 'llama', 'split.no': 1, 'split.count': 3},
    {'x': np.ones(4, 'f4')},
  )
  for load in (lambda: logits_with({'split.count': 3}), lambda: sj.load_pretrained(later)):
    with pytest.raises(ValueError, match='split.count.*llama-gguf-split --merge'):
      load()


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
  hf = gguf_files.LLAMA
  arrays = gguf_files.tensors(hf, tiny.tensors(hf))
  for name in ('blk.1.ffn_up.weight', 'token_embd.weight'):
    path = gguf_files.write(
      tmp_path / 'x.gguf',
      gguf_files.metadata(hf),
      {other: x for other, x in arrays.items() if other != name},
    )
    with pytest.raises(ValueError, match=f'x.gguf.*{name}'):
      sj.load_pretrained(path)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
  path = tmp_path / 'x.gguf'
  path.write_text(f'version https://git-lfs.github.com/spec/v1\noid sha256:{"0" * 64}\nsize 98\n')
  for read in (sj.load_pretrained, TextTokenizer.from_path):
    with pytest.raises(ValueError, match='x.gguf.*git lfs pull'):
      read(path)


def test_damaged_files_are_refused(tmp_path):
  good = quantised(tmp_path / 'x.gguf').read_bytes()
  bad = tmp_path / 'bad.gguf'
  for data in (
    b'',
    good[:10],
    good[:400],
    good[:-8],
    b'PK\x03\x04' * 30,
    b'GGUF\x01\0\0\0' + b'\0' * 64,
  ):
    bad.write_bytes(data)
    with pytest.raises(ValueError, match='bad.gguf'):
      sj.load_pretrained(bad)
  with pytest.raises(ValueError, match='no_such.gguf'):
    sj.load_pretrained(tmp_path / 'no_such.gguf')


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
  one = hub.Packaged(('some-model',), 'owner/one')
  two = hub.Packaged(
    ('part-1', 'part-2'),
    'owner/two',
    'two.gguf',
    '2e99758548972a8e8822ad47fa1017ff72f06f3ff6a016851f45c398732bc50c',
  )
  monkeypatch.setattr(hub, 'PACKAGED', {'Model-One': one, 'Model-Two': two})
  asked = []
  monkeypatch.setattr(hub, '_downloaded', lambda name, *_: asked.append(name) or name)
  assert hub.resolve('Model-One') == ('owner/one', 'Model-One')
  install('some-model', 'weights.gguf', b'one')
  install('part-1', 'two.gguf.part0', b'this is ')
  assert hub.resolve('Model-Two') == ('owner/two', 'Model-Two') and len(asked) == 2
  install('part-2', 'two.gguf.part1', b'a test')
  path, name = hub.resolve('model-one')
  assert path.read_bytes() == b'one' and name == 'Model-One'
  path, name = hub.resolve('Model-Two')
  assert path.read_bytes() == b'this is a test' and name == 'Model-Two'
  assert hub.resolve('Model-Two@main') == ('owner/two', 'Model-Two@main')
  path.unlink()
  monkeypatch.setitem(hub.PACKAGED, 'Model-Two', two._replace(sha256='0' * 64))
  with pytest.raises(ValueError, match='part-1'):
    hub.resolve('Model-Two')
  assert not path.exists()
