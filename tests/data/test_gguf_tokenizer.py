"""Tokenizers of GGUF files: their ids follow the rules of llama.cpp."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from sink_jax.data.tokenizer import TextTokenizer
from tests.data.test_tokenizer import WORDS, byte_level
from tests.pretrained import gguf_files

TEXTS = [
  'The 1st of 1984 years: 12345.678!',
  'a  b   c\n\n\t tabs  ',
  'naïve café 中文 😀👩‍👧 ok',
  "def f(x):\n    return x**2  # don't",
  '',
  ' ',
  '\n',
  'aaaaaaaaaaaaaaaaaaaaa',
]


PLAIN = {key.rpartition('.')[2]: value for key, value in gguf_files.TOKENIZER.items()}


def read_gguf(path, **values):
  """The tokenizer of a GGUF file with these metadata."""
  metadata = {f'tokenizer.ggml.{key}': value for key, value in values.items()}
  metadata['general.architecture'] = 'llama'
  return TextTokenizer.from_path(gguf_files.write(path, metadata, {}))


# The regex of tokenizer.json of Qwen2.5-0.5B.
_QWEN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


@pytest.mark.parametrize(
  'pre, words',
  [
    ('gpt-2', [WORDS]),
    ('smollm', [pre_tokenizers.Digits(individual_digits=True), WORDS]),
    (
      'qwen2',
      [
        pre_tokenizers.Split(tokenizers.Regex(_QWEN), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ],
    ),
  ],
)
def test_byte_level_tokenizers_keep_their_ids(tmp_path, pre, words):
  whole = byte_level(texts=TEXTS, words=words)
  model = json.loads(whole.to_str())['model']
  tokens = sorted(model['vocab'], key=model['vocab'].get)
  made = read_gguf(
    tmp_path / 'x.gguf',
    model='gpt2',
    pre=pre,
    tokens=tokens,
    token_type=[3, 3] + [1] * (len(tokens) - 2),
    merges=[' '.join(merge) for merge in model['merges']],
    bos_token_id=0,
    eos_token_id=1,
    add_bos_token=True,
  )
  assert (made.bos_id, made.prefix, made.eos_ids) == (0, (0,), (1,))
  for text in TEXTS:
    ids = made.encode(text)
    assert ids == whole.encode(text).ids
    assert made.decode(ids) == text


@pytest.mark.parametrize(
  'pre, ids',
  [('gpt-2', [16]), ('llama-bpe', [16]), ('smollm', [11, 12]), ('deepseek-r1-qwen', [11, 12])],
)
def test_digits_are_merged_only_within_a_word(tmp_path, pre, ids):
  values = PLAIN | {'pre': pre}
  for key, more in (('tokens', ['01']), ('token_type', [1]), ('merges', ['0 1'])):
    values[key] = values[key] + more
  assert read_gguf(tmp_path / 'x.gguf', **values).encode('01') == ids


def by_score(text, tokens, scores, prefix):
  """llama.cpp's rule for sentencepiece: merge the pair of the highest score, leftmost first."""
  ids = {token: i for i, token in enumerate(tokens)}
  parts = list(('▁' * prefix + text).replace(' ', '▁')) if text else []
  while True:
    pairs = [
      (-scores[ids[a + b]], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ids
    ]
    if not pairs:
      break
    _, i = min(pairs)
    parts[i : i + 2] = [parts[i] + parts[i + 1]]
  as_bytes = lambda part: [ids[f'<0x{byte:02X}>'] for byte in part.encode()]
  spelled = [[ids[part]] if part in ids else as_bytes(part) for part in parts]
  return sum(spelled, [])


@pytest.mark.parametrize('prefix', [True, False])
def test_sentencepiece_merges_by_score(tmp_path, prefix):
  random, as_bytes = np.random.default_rng(0), set('中😀')  # two letters without a token
  pieces = {
    text[i : i + n].replace(' ', '▁')
    for text in TEXTS[:4]
    for n in (2, 3, 4)
    for i in range(len(text) - n + 1)
  }
  words = sorted(piece for piece in pieces if not set(piece) & as_bytes)
  letters = sorted(set(''.join(TEXTS).replace(' ', '▁')) - as_bytes)
  tokens = ['<unk>', '<s>', '</s>', *(f'<0x{i:02X}>' for i in range(256)), *words, *letters]
  types = [2, 3, 3] + [6] * 256 + [1] * len(words + letters)

  # Longer tokens consist of shorter ones that training merged earlier, so they have lower scores.
  of_words = [
    -len(word) * 1000 - random.integers(1000) - i / len(words) for i, word in enumerate(words)
  ]
  scores = np.array([0] * 259 + of_words + [-1e4] * len(letters), 'f4')
  made = read_gguf(
    tmp_path / 'x.gguf',
    model='llama',
    tokens=tokens,
    token_type=types,
    scores=scores.tolist(),
    bos_token_id=1,
    eos_token_id=2,
    unknown_token_id=0,
    add_space_prefix=prefix,
  )
  assert made.prefix == (1,)  # the default if the file does not say
  for text in TEXTS:
    ids = made.encode(text)
    assert ids == by_score(text, tokens, scores, prefix), text
    assert made.decode(ids) == text


_NO_ID = 2**32 - 1


@pytest.mark.parametrize(
  'values, bos_id',
  [
    (
      {f'{part}_token_id': _NO_ID for part in ('bos', 'eot', 'unknown', 'padding', 'fim_pre')},
      None,
    ),
    (
      {f'{part}_token_id': 3 for part in ('fim_suf', 'fim_pad')}
      | {f'{part}_token_id': 99 for part in ('prefix', 'suffix', 'middle', 'image', 'eom')}
      | {key: False for key in ('remove_extra_whitespaces', 'add_eos_token', 'add_sep_token')},
      0,
    ),
  ],
)
def test_keys_that_change_no_ids_are_ignored(tmp_path, values, bos_id):
  made = read_gguf(tmp_path / 'x.gguf', **PLAIN | values)
  assert made.encode('abc 01ab') == [14, 15, 11, 12, 13]
  assert (made.bos_id, made.prefix, made.eos_ids) == (bos_id, (), (1,))
