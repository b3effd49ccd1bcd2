"""The tokenizer that the metadata of a GGUF file define, with the rules of llama.cpp.

Two models are read: byte-level BPE ('gpt2'), and sentencepiece's BPE ('llama'), in which the score
of a token is the rank of the merges that make it. Chat templates are not rendered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sink_jax.io.gguf import GgufFile

_PREFIX = 'tokenizer.ggml.'
# Keys that change no ids of a text: names of tokens that nothing here asks for, and templates.
_UNREAD = ('seperator_token_id', 'separator_token_id', 'cls_token_id', 'mask_token_id',
           'eom_token_id', 'add_sep_token', 'add_eos_token', 'token_type_count')
_READ = ('model', 'pre', 'tokens', 'scores', 'token_type', 'merges', 'bos_token_id', 'eos_token_id',
         'eot_token_id', 'unknown_token_id', 'padding_token_id', 'add_bos_token',
         'add_space_prefix')
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of token_type
_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
           r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# How llama.cpp cuts a text into words, by the name that the file gives.
_WORDS = {
    'gpt-2': [_GPT2],
    # Every digit is a word of its own; the other words are those of GPT-2.
    'smollm': [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    'llama-bpe': [pre_tokenizers.Split(Regex(_LLAMA3), 'isolated'),
                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]}


class GgufTokenizer(NamedTuple):
  """A tokenizer, its BOS, whether texts begin with it, and the ids that end a text."""

  model: Tokenizer
  bos_id: int | None
  add_bos: bool
  eos_ids: tuple[int, ...]


def gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
  """Makes the tokenizer of a GGUF file.

  Raises:
    ValueError: the metadata do not define one, or one that is not supported; names the key.
    Exception: the library `tokenizers` refuses it.
  """
  values = _Values(file)
  tokens = values.get('tokens', list)
  types = values.get('token_type', np.ndarray, np.ones(len(tokens), int))
  if len(set(tokens)) < len(tokens):
    raise _refused('tokens', f'{len(tokens)} tokens', 'two of them are equal')
  if len(types) != len(tokens):
    raise _refused('token_type', f'{len(types)} types', f'there are {len(tokens)} tokens')
  makers = {'gpt2': _byte_level, 'llama': _sentencepiece}
  if (kind := values.get('model', str)) not in makers:
    raise _refused('model', kind, 'supported: gpt2, llama')
  tokenizer, adds_bos = makers[kind](values, tokens, types)
  for kind in (_CONTROL, _UNKNOWN):
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False)
                                  for i in np.flatnonzero(types == kind)])
  tokenizer.add_tokens([AddedToken(tokens[i], special=False, normalized=False)
                        for i in np.flatnonzero(types == _USER_DEFINED)])
  bos, *ends = (values.token_id(key, len(tokens)) for key in ('bos', 'eos', 'eot'))
  add_bos = values.get('add_bos_token', bool, adds_bos)
  if add_bos and bos is None:
    raise _refused('add_bos_token', True, f'{_PREFIX}bos_token_id is missing')
  return GgufTokenizer(tokenizer, bos, add_bos,
                       tuple(dict.fromkeys(i for i in ends if i is not None)))


def _refused(key: str, value: Any, reason: str) -> ValueError:
  return ValueError(f'{_PREFIX}{key} = {str(value)[:50]!r} is not supported: {reason}.')


class _Values:
  """The metadata about the tokenizer, checked where they are read."""

  def __init__(self, file: GgufFile):
    self.values = {key.removeprefix(_PREFIX): value for key, value in file.metadata.items()
                   if key.startswith(_PREFIX)}
    for key in self.values.keys() - {*_READ, *_UNREAD}:
      raise _refused(key, self.values[key], 'it could change the ids of a text')

  def get(self, key: str, kind: type, *default: Any) -> Any:
    """The value of a key, of this type; an error where it is missing and there is no default."""
    if key not in self.values:
      if default:
        return default[0]
      raise ValueError(f'{_PREFIX}{key} is missing, without which there is no tokenizer.')
    if not isinstance(self.values[key], kind):
      raise _refused(key, self.values[key], f'it must be of the type {kind.__name__}')
    return self.values[key]

  def token_id(self, name: str, count: int) -> int | None:
    i = self.get(f'{name}_token_id', int, None)
    if i is not None and not 0 <= i < count:
      raise _refused(f'{name}_token_id', i, f'there are {count} tokens')
    return i


def _byte_level(values: _Values, tokens: list[str], types: np.ndarray) -> tuple[Tokenizer, bool]:
  """(byte-level BPE, whether it puts a BOS before a text unless the file says otherwise)."""
  if (pre := values.get('pre', str)) not in _WORDS:
    raise _refused('pre', pre, f'supported: {", ".join(_WORDS)}')
  if values.get('add_space_prefix', bool, False):
    raise _refused('add_space_prefix', True, 'byte-level BPE has none')
  merges = [tuple(merge.split(' ')) for merge in values.get('merges', list)]
  llama3 = pre == 'llama-bpe'
  tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges,
                                   ignore_merges=llama3))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_WORDS[pre])
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer, llama3


def _sentencepiece(values: _Values, tokens: list[str], types: np.ndarray) -> tuple[Tokenizer, bool]:
  """As `_byte_level`: BPE over characters, which falls back to bytes."""
  scores = values.get('scores', np.ndarray)
  if len(scores) != len(tokens):
    raise _refused('scores', f'{len(scores)} scores', f'there are {len(tokens)} tokens')
  if (pre := values.get('pre', str, 'default')) != 'default':
    raise _refused('pre', pre, "a model of the type 'llama' has none")
  unknown = values.token_id('unknown', len(tokens))
  ids = {token: i for i, token in enumerate(tokens)}
  # All pairs of tokens whose text is a token: first those that make the token of highest score.
  merges = []
  for i in np.flatnonzero(types == 1):
    for cut in range(1, len(tokens[i])):
      left, right = tokens[i][:cut], tokens[i][cut:]
      if left in ids and right in ids:
        merges.append((-scores[i], cut, ids[left], left, right))
  tokenizer = Tokenizer(models.BPE(
      vocab=ids, merges=[(left, right) for *_, left, right in sorted(merges)],
      unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True))
  prefix = values.get('add_space_prefix', bool, True)
  tokenizer.normalizer = normalizers.Sequence(
      [normalizers.Prepend('▁')] * prefix + [normalizers.Replace(' ', '▁')])
  tokenizer.decoder = decoders.Sequence(
      [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
      + [decoders.Strip(' ', 1, 0)] * prefix)
  return tokenizer, True
