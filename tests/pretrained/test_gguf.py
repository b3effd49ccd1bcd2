"""GGUF files: every tensor type, both architectures, names, and damaged files."""

import gguf
import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.position import Llama3Rope
from sink_jax.io.gguf import TYPES, GgufFile
from sink_jax.pretrained import hub
from tests.pretrained import gguf_files, tiny


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
  path = gguf_files.write(tmp_path / 'x.gguf', {'general.architecture': 'llama'}, arrays,
                          {'x': name})
  file = GgufFile(path)
  assert file.tensors['x'].shape == x.shape and file.tensors['x'].type == name
  found = file.read('x')
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, gguf.quants.dequantize(data, kind))
  if not name.endswith('_K'):
    assert np.abs(found - x).max() < 0.3  # 4-bit numbers of size up to 4


BIASED = gguf_files.LLAMA | {'attention_bias': True, 'mlp_bias': True}
SCALED = {'gemma3.rope.scaling.type': 'linear', 'gemma3.rope.scaling.factor': 8.0}


@pytest.mark.parametrize('hf, values, tolerance, rounding', [
    (BIASED, {}, 1e-5, 0), (BIASED | {'tie_word_embeddings': True}, {}, 1e-5, 0),
    # The seventh layer begins a second period. The file stores 1 + w, rounded.
    (gguf_files.GEMMA3, {}, 1e-4, 3e-7),
    (gguf_files.GEMMA3 | {'rope_scaling': {'rope_type': 'linear', 'factor': 8}}, SCALED, 1e-4, 3e-7)])
def test_a_file_equals_its_safetensors(tmp_path, hf, values, tolerance, rounding):
  arrays = tiny.write(tmp_path / 'hf', hf)
  path = gguf_files.write(tmp_path / 'x.gguf', gguf_files.metadata(hf) | values,
                          gguf_files.tensors(hf, arrays))
  ours, theirs = sj.load_pretrained(path), sj.load_pretrained(tmp_path / 'hf')
  assert (ours.name, ours.bos) == ('x', 'none') and ours.config.tied == theirs.config.tied
  assert ours.config.pattern == theirs.config.pattern
  tokens = np.arange(10)[None] % 16
  # The file stores eps and the base in float32.
  np.testing.assert_allclose(ours.logits(tokens), theirs.logits(tokens), rtol=tolerance, atol=tolerance / 10)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 0, rounding), ours.params, theirs.params)
  np.testing.assert_array_equal(sj.tokenize(ours, 'abc 01')[0], [14, 15, 11, 12])


def test_llama3_scaling_is_found_in_its_factors(tmp_path):
  size, rope = 64, Llama3Rope(base=5e5, factor=32, low_frequency_factor=1, high_frequency_factor=4,
                              original_length=8192)
  hf = gguf_files.LLAMA | {'rope_theta': 5e5, 'hidden_size': 4 * size}
  inverse = 5e5 ** (-np.arange(0, size, 2) / size)
  wavelengths = 2 * np.pi / inverse
  share = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
  factors = 1 / ((1 - share) / 32 + share)  # llama.cpp divides frequencies by these
  arrays = gguf_files.tensors(hf, tiny.tensors(hf)) | {'rope_freqs.weight': factors.astype('f4')}
  path = gguf_files.write(tmp_path / 'x.gguf', gguf_files.metadata(hf), arrays)
  assert sj.load_pretrained(path).config.attention.position == rope
  arrays['rope_freqs.weight'] = (factors ** 1.1).astype('f4')
  with pytest.raises(ValueError, match='rope_freqs.weight'):
    sj.load_pretrained(gguf_files.write(tmp_path / 'y.gguf', gguf_files.metadata(hf), arrays))


def quantised(path, values={}):
  hf = gguf_files.LLAMA | {'intermediate_size': 64}
  arrays = gguf_files.tensors(hf, tiny.tensors(hf))
  types = {name: 'Q4_0' for name, x in arrays.items() if x.ndim == 2}
  return gguf_files.write(path, gguf_files.metadata(hf) | values, arrays, types)


def test_names_say_that_weights_are_quantised(tmp_path):
  mixture = {'general.file_type': 15}
  for file, values, name in (('x.gguf', {}, 'x (Q4_0)'), ('y.gguf', mixture, 'y (Q4_K_M)'),
                             ('z.q4_0.gguf', {}, 'z.q4_0')):
    assert sj.load_pretrained(quantised(tmp_path / file, values)).name == name


@pytest.mark.parametrize('values, factor', [
    ({}, 1.0), ({'factor': 4.0}, 4.0), ({'type': 'linear'}, 1.0), ({'type': 'none', 'factor': 4.0}, 1.0)])
def test_linear_scaling_is_the_default_as_in_llama_cpp(tmp_path, values, factor):
  hf = gguf_files.LLAMA
  metadata = gguf_files.metadata(hf) | {f'llama.rope.scaling.{key}': value for key, value in values.items()}
  path = gguf_files.write(tmp_path / 'x.gguf', metadata, gguf_files.tensors(hf, tiny.tensors(hf)))
  assert sj.load_pretrained(path).config.attention.position.factor == factor


@pytest.mark.parametrize('key, value', [
    ('llama.embedding_length', None), ('llama.attention.head_count', 0),
    ('llama.attention.head_count_kv', [2, 1, 2]), ('llama.expert_count', 8),
    ('llama.rope.scaling.type', 'yarn'), ('llama.rope.dimension_count', 4),
    ('llama.attention.value_length', 4), ('split.count', 2), ('general.type', 'adapter'),
    ('general.architecture', 'bert')])
def test_metadata_that_change_a_result_are_refused(tmp_path, key, value):
  hf = gguf_files.LLAMA
  values = {k: v for k, v in (gguf_files.metadata(hf) | {key: value}).items() if v is not None}
  path = gguf_files.write(tmp_path / 'x.gguf', values, gguf_files.tensors(hf, tiny.tensors(hf)))
  with pytest.raises(ValueError, match=key) as error:
    sj.load_pretrained(path)
  assert str(path) in str(error.value) and '\n' not in str(error.value)


def test_tensors_are_named_as_in_the_file(tmp_path):
  hf = gguf_files.LLAMA
  arrays = gguf_files.tensors(hf, tiny.tensors(hf))
  for name in ('blk.1.ffn_up.weight', 'token_embd.weight'):
    path = gguf_files.write(tmp_path / 'x.gguf', gguf_files.metadata(hf),
                            {other: x for other, x in arrays.items() if other != name})
    with pytest.raises(ValueError, match=f'x.gguf.*{name}'):
      sj.load_pretrained(path)


def test_damaged_files_are_refused(tmp_path):
  good = quantised(tmp_path / 'x.gguf').read_bytes()
  bad = tmp_path / 'bad.gguf'
  for data in (b'', good[:10], good[:400], good[:-8], b'PK\x03\x04' * 30, b'GGUF\x01\0\0\0' + b'\0' * 64):
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
  two = hub.Packaged(('part-1', 'part-2'), 'owner/two', 'two.gguf',
                          '2e99758548972a8e8822ad47fa1017ff72f06f3ff6a016851f45c398732bc50c')
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
