"""Readers of config strings and downloaded files return a value or refuse what others wrote.

With --full each test reads 10,000 inputs.
"""

import json
import shutil
import struct
import typing

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import sink_jax as sj
from sink_jax.component import from_string, registry
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.pretrained.files import INDEX, Checkpoint
from sink_jax.pretrained.gguf import GgufCheckpoint
from tests.pretrained import gguf_files, tiny

hostile = settings.get_profile('hostile')
REFUSALS = (ValueError, OSError)
# Few characters, so that hypothesis does not make a table of all: odd ones, and halves of surrogate
# pairs.
TEXT = st.text(
  'aZ09 _.,:;=()[]{}\'"\\/-+*#%\n\t\0\x7féſ中\u202e\ud800\udfff\U0001f600', max_size=12
)
NUMBERS = st.sampled_from(
  [
    0,
    -1,
    1,
    255,
    2**31,
    2**32,
    2**63,
    2**64,
    10**400,
    0.5,
    1e-320,
    1e308,
    float('inf'),
    float('nan'),
  ]
)
STRINGS = st.sampled_from(
  [
    '../outside',
    '/etc/passwd',
    '/dev/zero',
    '~nobody/x',
    '',
    'a\0b',
    '9' * 5000,
    '9**9**9',
    'lambda: 0',
    "__import__('os').system('false')",
    '().__class__.__bases__',
    '(' * 10_000,
    '<s>',
    'NaN',
  ]
)
VALUES = st.recursive(
  NUMBERS | STRINGS | TEXT | st.none() | st.booleans() | st.integers() | st.floats(),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
  max_leaves=5,
)
BYTES = st.binary(max_size=9) | st.sampled_from(
  [
    b'\xed\xa0\x80',
    b'"',
    b'{',
    b'}',
    b'NaN',
    b'1e999',
    b'null',
    b'\\ud800',
    b'[' * 100_000,
    b'A' * 5000,
  ]
)


@st.composite
def changed_bytes(draw, data):
  """Replaces, drops or adds some bytes at up to three positions; may also cut off the end."""
  for _ in range(draw(st.integers(1, 3))):
    begin = draw(st.integers(0, len(data)))
    data = data[:begin] + draw(BYTES) + data[begin + draw(st.integers(0, 16)) :]
  return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


@st.composite
def changed_json(draw, data):
  """A JSON text with up to three values replaced, or with some bytes changed."""
  if draw(st.integers(0, 3)) == 0:
    return draw(changed_bytes(data))
  value = json.loads(data)
  for _ in range(draw(st.integers(1, 3))):
    owner, key = draw(st.sampled_from(list(places(value))))
    owner[key] = draw(VALUES)
  return json.dumps(value).encode()


def places(value):
  """(container, key) of every value inside a JSON value."""
  if isinstance(value, dict | list) and value:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
      yield value, key
      yield from places(value[key])


def ends(read):
  """Calls a reader. If it refuses, the error must have a message."""
  try:
    read()
  except REFUSALS as error:
    assert str(error).strip()


def read_tokenizer(tokenizer):
  tokenizer.decode(tokenizer.encode('Hello <s> world\n é \U0001f600'))


FAMILIES = list(typing.get_type_hints(sj.AttentionSpec).values())
CLASSES = [(base, cls) for base in FAMILIES for cls in registry(base).values()]


@hostile
@given(chosen=st.sampled_from(CLASSES), value=VALUES.map(repr) | TEXT | STRINGS, data=st.data())
def test_config_strings(chosen, value, data):
  base, cls = chosen
  fields = list(cls.__dataclass_fields__) or ['nothing']
  text = data.draw(
    st.sampled_from([f'{cls.__name__}({data.draw(st.sampled_from(fields))}={value})', value])
    | changed_bytes(repr(cls()).encode()).map(lambda x: x.decode('utf-8', 'surrogateescape'))
  )

  def read():
    component = from_string(base, text)
    assert from_string(base, repr(component)) == component

  ends(read)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A small model in three files of safetensors, with its tokenizer, and one in a GGUF file."""
  folder, hf = tmp_path_factory.mktemp('model'), gguf_files.LLAMA
  tiny.write(folder, files=3)
  gguf_files.write(
    folder / 'model.gguf', gguf_files.metadata(hf), gguf_files.tensors(hf, tiny.tensors(hf))
  )
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
  tokenizer.train_from_iterator(
    ['hello world, how are you? ' * 9],
    trainers.BpeTrainer(
      vocab_size=280, special_tokens=['<s>', '<|endoftext|>'], show_progress=False
    ),
  )
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text('{"bos_token": "<s>", "add_bos_token": true}')
  return folder


@pytest.fixture(scope='module')
def scratch(tmp_path_factory):
  return tmp_path_factory.mktemp('scratch')


@hostile
@given(data=st.data())
def test_tokenizer_json(folder, scratch, data):
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (scratch / name).write_bytes(data.draw(changed_json((folder / name).read_bytes())))
  ends(lambda: read_tokenizer(TextTokenizer.from_path(scratch)))


@hostile
@given(data=st.data())
def test_safetensors(folder, scratch, data):
  shutil.copytree(folder, scratch / 'copy', dirs_exist_ok=True)
  name = data.draw(
    st.sampled_from(
      [INDEX, 'config.json', *sorted(path.name for path in folder.glob('*.safetensors'))]
    )
  )
  content = (folder / name).read_bytes()
  if name.endswith('.json'):
    content = data.draw(changed_json(content))
  else:  # length of the header, JSON header, or numbers
    end = 8 + struct.unpack('<Q', content[:8])[0]
    header = data.draw(changed_json(content[8:end]))
    length = data.draw(st.sampled_from([len(header), len(header), 0, 2**31, 2**63]))
    content = (
      struct.pack('<Q', length) + header + content[end : data.draw(st.integers(end, len(content)))]
    )
  (scratch / 'copy' / name).write_bytes(content)

  def read():
    checkpoint = Checkpoint(scratch / 'copy')
    for tensor in checkpoint.entries:
      checkpoint.read(tensor)

  ends(read)


@hostile
@given(data=st.data())
def test_gguf(folder, scratch, data):
  gguf, path = (folder / 'model.gguf').read_bytes(), scratch / 'model.gguf'
  header = gguf.index(b'output_norm') + 64  # most changes affect the metadata and headers
  path.write_bytes(data.draw(changed_bytes(gguf[:header])) + gguf[header:])

  def read():
    checkpoint = GgufCheckpoint(path)
    for tensor in checkpoint.entries:
      checkpoint.read(tensor)

  ends(read)
  ends(lambda: read_tokenizer(TextTokenizer.from_path(path)))
