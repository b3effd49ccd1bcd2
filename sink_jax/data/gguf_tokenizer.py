"""The tokenizer that the metadata of a GGUF file define, with the rules of llama.cpp.

Two models are read: byte-level BPE ('gpt2'), and sentencepiece's BPE ('llama'), in which the score
of a token is the rank of the merges that make it. Chat templates are not rendered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_PREFIX = 'tokenizer.ggml.'
_READ = (
  'model',
  'pre',
  'tokens',
  'scores',
  'token_type',
  'merges',
  'bos_token_id',
  'eos_token_id',
  'eot_token_id',
  'unknown_token_id',
  'add_bos_token',
  'add_space_prefix',
)
# Keys that change no ids of a text; other keys that end with _token_id only name a token, too.
_UNREAD = ('add_sep_token', 'add_eos_token', 'token_type_count')
_NO_TOKEN = 2**32 - 1  # an id of -1, as llama.cpp stores it
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of token_type
# The words of LLaMA 3 and Qwen 2, which differ in how many digits are one.
_WORD = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_QWEN2 = [pre_tokenizers.Split(Regex(_WORD % 1), 'isolated'), _BYTES]
# How llama.cpp cuts a text into words, by the name that the file gives.
_WORDS = {
  'gpt-2': [_GPT2],
  # Every digit is a separate word; the other words are those of GPT-2.
  'smollm': [pre_tokenizers.Digits(individual_digits=True), _GPT2],
  'llama-bpe': [pre_tokenizers.Split(Regex(_WORD % 3), 'isolated'), _BYTES],
  'qwen2': _QWEN2,
  'deepseek-r1-qwen': _QWEN2,
}


def gguf_tokenizer(
  metadata: Mapping[str, Any],
) -> tuple[Tokenizer, int | None, bool, tuple[int, ...]]:
  """The tokenizer of a GGUF file, its BOS, whether texts begin with it, and ids that end a text.

  Raises:
    ValueError: a key is missing, or has a value that is not supported; names the key.
    Exception: the library `tokenizers` refuses a value.
  """
  values = _values(metadata)
  tokens, model = _needed(values, 'tokens'), _needed(values, 'model')
  makers = {'gpt2': _byte_level, 'llama': _sentencepiece}
  if len(set(tokens)) < len(tokens):
    raise _refused('tokens', f'{len(tokens)} tokens', 'two of them are equal')
  if model not in makers:
    raise _refused('model', model, f'supported: {", ".join(makers)}')
  types = np.asarray(values.get('token_type', [1] * len(tokens)))
  for key in values.keys() & {'token_type', 'scores'}:
    if len(values[key]) != len(tokens):
      raise _refused(key, f'{len(values[key])} values', f'there are {len(tokens)} tokens')
  for key, value in values.items():
    if key.endswith('_token_id') and not 0 <= value < len(tokens):
      raise _refused(key, value, f'there are {len(tokens)} tokens')
  tokenizer, adds_bos = makers[model](values, tokens, types)
  added = lambda number: [
    AddedToken(tokens[i], special=number != _USER_DEFINED, normalized=False)
    for i in np.flatnonzero(types == number)
  ]
  tokenizer.add_special_tokens(added(_CONTROL))
  tokenizer.add_special_tokens(added(_UNKNOWN))
  tokenizer.add_tokens(added(_USER_DEFINED))
  bos, adds_bos = values.get('bos_token_id'), values.get('add_bos_token', adds_bos)
  if adds_bos and bos is None:
    raise _refused('add_bos_token', True, f'{_PREFIX}bos_token_id is missing')
  ends = [values[key] for key in ('eos_token_id', 'eot_token_id') if key in values]
  return tokenizer, bos, adds_bos, tuple(dict.fromkeys(ends))


def _values(metadata: Mapping[str, Any]) -> dict[str, Any]:
  """The metadata that define the tokenizer, without the prefix of their keys."""
  given = {
    key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)
  }
  values = {}
  for key, value in given.items():
    names_a_token = key.endswith('_token_id')
    off = key == 'remove_extra_whitespaces' and not value
    if not (names_a_token or off or key in _READ or key in _UNREAD):
      raise _refused(key, value, 'it could change the ids of a text')
    if key in _READ and not (names_a_token and value == _NO_TOKEN):
      values[key] = value
  return values


def _refused(key: str, value: Any, reason: str) -> ValueError:
  return ValueError(f'{_PREFIX}{key} = {str(value)[:50]!r} is not supported: {reason}')


def _needed(values: dict[str, Any], key: str) -> Any:
  if key not in values:
    raise ValueError(f'there is no {_PREFIX}{key}: convert the model again with a newer llama.cpp')
  return values[key]


def _byte_level(
  values: dict[str, Any], tokens: list[str], types: np.ndarray
) -> tuple[Tokenizer, bool]:
  """(byte-level BPE, whether it puts a BOS before a text unless the file says otherwise)."""
  pre = _needed(values, 'pre')
  if pre not in _WORDS:
    raise _refused('pre', pre, f'supported: {", ".join(_WORDS)}')
  if values.get('add_space_prefix'):
    raise _refused('add_space_prefix', True, 'byte-level BPE has none')
  llama3 = pre == 'llama-bpe'
  tokenizer = Tokenizer(
    models.BPE(
      vocab={t: i for i, t in enumerate(tokens)},
      ignore_merges=llama3,
      merges=[tuple(merge.split(' ')) for merge in _needed(values, 'merges')],
    )
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_WORDS[pre])
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer, llama3


def _sentencepiece(
  values: dict[str, Any], tokens: list[str], types: np.ndarray
) -> tuple[Tokenizer, bool]:
  """As `_byte_level`: BPE over characters, which falls back to bytes."""
  if (pre := values.get('pre', 'default')) != 'default':
    raise _refused('pre', pre, "a model of the type 'llama' has none")
  scores, ids = _needed(values, 'scores'), {token: i for i, token in enumerate(tokens)}
  # All pairs of tokens whose text is a token: first those that make the token of highest score.
  pairs = []
  for i in np.flatnonzero(types == 1):
    for cut in range(1, len(tokens[i])):
      left, right = tokens[i][:cut], tokens[i][cut:]
      if left in ids and right in ids:
        pairs.append((-scores[i], cut, ids[left], left, right))
  merges = [(left, right) for *_, left, right in sorted(pairs)]
  unknown = values.get('unknown_token_id')
  tokenizer = Tokenizer(
    models.BPE(
      vocab=ids,
      merges=merges,
      unk_token=None if unknown is None else tokens[unknown],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  prefix = bool(values.get('add_space_prefix', True))
  tokenizer.normalizer = normalizers.Sequence(
    [normalizers.Prepend('▁')] * prefix + [normalizers.Replace(' ', '▁')]
  )
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    + [decoders.Strip(' ', 1, 0)] * prefix
  )
  return tokenizer, True
