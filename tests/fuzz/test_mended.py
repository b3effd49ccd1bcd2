"""What the hostile inputs found once, one test for each."""

import gzip
import json
import os

import pytest
import zstandard

from sink_jax.attention.normalizer import Normalizer
from sink_jax.component import from_string
from sink_jax.data import text_lines
from sink_jax.data.sources import Jsonl
from sink_jax.data.tokenizer import HuggingFace, load_encoder
from sink_jax.io.files import read_text_limited
from sink_jax.models.sizes import sized
from sink_jax.pretrained import keys
from sink_jax.pretrained.files import Checkpoint
from sink_jax.train.config import from_dict
from tests.pretrained import tiny
from tests.train import runs


def test_an_integer_beyond_all_floats():
  with pytest.raises(ValueError, match='too large'):
    from_string(Normalizer, f'PNorm(p={10**400})')


@pytest.mark.parametrize('key, value', [('layers', '2'), ('size', []), ('d_model', [8]),
                                        ('vocab_size', [1])])
def test_a_value_of_the_wrong_type_in_the_model(key, value):
  config = runs.config()
  config['model'][key] = value
  with pytest.raises(ValueError, match='wrong type|must be a whole number|Unknown model size'):
    from_dict(config).model_config(64)


def test_a_line_that_is_nothing_but_brackets(tmp_path):
  (tmp_path / 'a.jsonl').write_text('[' * 10**5)
  with pytest.raises(ValueError, match='line 1: not a JSON object'):
    list(Jsonl(path=str(tmp_path)).documents())


@pytest.mark.parametrize('suffix', ['.jsonl', '.jsonl.gz', '.jsonl.zst'])
def test_a_line_without_end(tmp_path, suffix, monkeypatch):
  monkeypatch.setattr(text_lines, 'LONGEST', 1000)
  data = b'{"text": "a"}\n' + b'a' * 1001
  pack = {'.jsonl': bytes, '.jsonl.gz': gzip.compress,
          '.jsonl.zst': zstandard.ZstdCompressor().compress}[suffix]
  path = tmp_path / f'a{suffix}'
  path.write_bytes(pack(data))
  with pytest.raises(ValueError, match='line 2 is longer'):
    list(text_lines.lines(path))


def test_a_small_file_that_becomes_a_large_one(tmp_path, monkeypatch):
  monkeypatch.setattr(text_lines, '_UNSUSPICIOUS', 1 << 20)
  monkeypatch.setattr(text_lines, 'LONGEST', 1 << 20)
  path = tmp_path / 'a.zst'
  path.write_bytes(zstandard.ZstdCompressor().compress((b'a' * (1 << 16) + b'\n') * 512))
  with pytest.raises(ValueError, match='hardly holds text'):
    list(text_lines.lines(path))


@pytest.mark.parametrize('suffix, pack', [
    ('.gz', gzip.compress), ('.zst', zstandard.ZstdCompressor().compress)])
def test_lines_that_repeat_are_text(tmp_path, suffix, pack):
  path = tmp_path / f'a{suffix}'
  path.write_bytes(pack(b'{"text": "the same answer"}\n' * 20000))
  assert sum(1 for _ in text_lines.lines(path)) == 20000


def test_lines_and_where_they_end(tmp_path):
  data = b'one\n\ntwo'
  for suffix, pack in (('', bytes), ('.gz', gzip.compress),
                       ('.zst', lambda x: 2 * zstandard.ZstdCompressor().compress(x + b'\n'))):
    path = tmp_path / f'a{suffix}'
    path.write_bytes(pack(data))
    found = list(text_lines.lines(path))
    assert [line.rstrip() for line, _ in found][:3] == [b'one', b'', b'two']
    assert found[-1][1] == path.stat().st_size


def test_a_vocabulary_without_the_special_tokens(tmp_path):
  (tmp_path / 'tokenizer.json').write_text(
      '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
  for ids in ((0, 0, 7), (-1, 0, 0), (10**30, 0, 0)):
    with pytest.raises(ValueError, match='no token for one of the ids'):
      load_encoder(tmp_path, *ids)
  for text in ('', '[]', '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'):
    (tmp_path / 'tokenizer.json').write_text(text)
    with pytest.raises(ValueError, match='tokenizer.json is damaged'):
      load_encoder(tmp_path, 0, 0, 0)


def test_the_home_of_nobody():
  with pytest.raises(ValueError, match='HuggingFace'):
    HuggingFace(path='~nobody-of-this-name/x').fingerprint()


def test_a_file_without_end():
  with pytest.raises(ValueError, match='not a file'):
    read_text_limited('/dev/zero')
  with pytest.raises(ValueError, match='not a file'):
    list(text_lines.lines(text_lines.pathlib.Path('/dev/zero')))


def test_a_file_that_is_too_large(tmp_path):
  (tmp_path / 'a').write_text('abc')
  assert read_text_limited(tmp_path / 'a', 3) == 'abc'
  with pytest.raises(ValueError, match='at most 2 bytes'):
    read_text_limited(tmp_path / 'a', 2)


@pytest.mark.parametrize('key', ['num_hidden_layers', 'n_layer', 'num_experts'])
def test_more_layers_or_experts_than_any_model_has(key):
  assert keys.size({key: 2**12}, key) == 2**12
  with pytest.raises(ValueError, match=key):
    keys.size({key: 2**12 + 1}, key)


@pytest.mark.parametrize('file', ['x' * 300, 'device.safetensors'])
def test_an_index_that_names_no_file(tmp_path, file):
  tiny.write(tmp_path, files=3)
  os.symlink('/dev/zero', tmp_path / 'device.safetensors')
  path = tmp_path / 'model.safetensors.index.json'
  index = json.loads(path.read_text())
  index['weight_map']['x'] = file
  path.write_text(json.dumps(index))
  with pytest.raises(ValueError, match='is missing|is not a file'):
    Checkpoint(tmp_path)


def test_a_flood_of_empty_lines_is_refused_early(tmp_path, monkeypatch):
  monkeypatch.setattr(text_lines, '_MANY', 1 << 10)
  path = tmp_path / 'a.jsonl.gz'
  path.write_bytes(gzip.compress(b'\n' * 2000))
  with pytest.raises(ValueError, match='nearly all of its first 1024 lines are empty'):
    list(text_lines.lines(path))


def test_a_head_wider_than_any_is_refused_before_its_rotations_are_tabulated():
  with pytest.raises(ValueError, match='a head of 33554432 dimensions .*d_model'):
    sized('tiny', vocab_size=64, d_model=2**27)
