"""The tokenizer that the metadata of a GGUF file define, with the rules of llama.cpp.

Two models are read: byte-level BPE ('gpt2'), and sentencepiece's BPE ('llama'), in which the score
of a token is the rank of the merges that make it. Chat templates are not rendered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from sink_jax.data.tokenizer_json import panics_refused
from sink_jax.io.gguf import GgufFile

if TYPE_CHECKING:
  from tokenizers import Tokenizer
  from tokenizers.pre_tokenizers import PreTokenizer

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


@dataclasses.dataclass(frozen=True)
class GgufTokenizer:
  """A tokenizer, its BOS, whether texts begin with it, and the ids that end a text."""

  tokenizer: Tokenizer
  bos_id: int | None
  add_bos: bool
  eos_ids: tuple[int, ...]


def gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
  """Makes the tokenizer of a GGUF file.

  Raises:
    ValueError: the metadata do not define one, or one that is not supported; names the file and
      the key.
  """
  values = _Values(file)
  values.check_known()
  tokens, types = values.tokens()
  kind = values.get('model', str)
  if kind not in ('gpt2', 'llama'):
    raise values.refused('model', kind, 'supported: gpt2, llama')
  with panics_refused(f'{file.path}: the metadata {_PREFIX}* define no tokenizer'):
    make = _byte_level if kind == 'gpt2' else _sentencepiece
    tokenizer, adds_bos = make(values, tokens, types)
    _add_tokens(tokenizer, tokens, types)
    tokenizer.encode('a')
  ids = [values.token_id(key, len(tokens)) for key in ('bos', 'eos', 'eot')]
  add_bos = values.get('add_bos_token', bool, adds_bos)
  if add_bos and ids[0] is None:
    raise values.refused('add_bos_token', True, f'{_PREFIX}bos_token_id is missing')
  return GgufTokenizer(tokenizer, ids[0], add_bos,
                       tuple(dict.fromkeys(i for i in ids[1:] if i is not None)))


class _Values:
  """The metadata about the tokenizer, checked where they are read."""

  def __init__(self, file: GgufFile):
    self.path, self.values = file.path, {
        key.removeprefix(_PREFIX): value for key, value in file.metadata.items()
        if key.startswith(_PREFIX)}

  def check_known(self) -> None:
    for key in self.values:
      if key not in (*_READ, *_UNREAD):
        raise self.refused(key, self.values[key], 'it could change the ids of a text')

  def refused(self, key: str, value: Any, reason: str) -> ValueError:
    return ValueError(f'{self.path}: {_PREFIX}{key} = {str(value)[:50]!r} is not supported: '
                      f'{reason}.')

  def get(self, key: str, kind: type, *default: Any) -> Any:
    """The value of a key, of this type; an error where it is missing and there is no default."""
    if key not in self.values:
      if default:
        return default[0]
      raise ValueError(f'{self.path} has no {_PREFIX}{key}, without which there is no tokenizer.')
    if not isinstance(self.values[key], kind):
      raise self.refused(key, self.values[key], f'it must be of the type {kind.__name__}')
    return self.values[key]

  def tokens(self) -> tuple[list[str], np.ndarray]:
    """The tokens in the order of their ids, and the type of each."""
    tokens = self.get('tokens', list)
    types = self.get('token_type', np.ndarray, np.ones(len(tokens), int))
    if len(set(tokens)) < len(tokens):
      raise self.refused('tokens', f'{len(tokens)} tokens', 'two of them are equal')
    if len(types) != len(tokens):
      raise self.refused('token_type', f'{len(types)} types', f'there are {len(tokens)} tokens')
    return tokens, types

  def token_id(self, name: str, count: int) -> int | None:
    id_ = self.get(f'{name}_token_id', int, None)
    if id_ is not None and not 0 <= id_ < count:
      raise self.refused(f'{name}_token_id', id_, f'there are {count} tokens')
    return id_


def _pre_tokenizers(pre: str) -> list[PreTokenizer] | None:
  """How llama.cpp cuts a text into words, by the name that the file gives; None if unknown."""
  from tokenizers import Regex
  from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
  gpt2 = ByteLevel(add_prefix_space=False)
  known: dict[str, Callable[[], list[PreTokenizer]]] = {
      'gpt-2': lambda: [gpt2],
      # Every digit is a word of its own; the other words are those of GPT-2.
      'smollm': lambda: [Digits(individual_digits=True), gpt2],
      'llama-bpe': lambda: [Split(Regex(_LLAMA3), 'isolated'),
                            ByteLevel(add_prefix_space=False, use_regex=False)]}
  return known[pre]() if pre in known else None


def _byte_level(values: _Values, tokens: list[str], types: np.ndarray) -> tuple[Tokenizer, bool]:
  """(byte-level BPE, whether it puts a BOS before a text unless the file says otherwise)."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers
  pre = values.get('pre', str)
  cutting = _pre_tokenizers(pre)
  if cutting is None:
    raise values.refused('pre', pre, 'supported: gpt-2, smollm, llama-bpe')
  if values.get('add_space_prefix', bool, False):
    raise values.refused('add_space_prefix', True, 'byte-level BPE has none')
  merges = [tuple(merge.split(' ')) for merge in values.get('merges', list)]
  llama3 = pre == 'llama-bpe'
  tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges,
                                   ignore_merges=llama3))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cutting)
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer, llama3


def _sentencepiece(values: _Values, tokens: list[str], types: np.ndarray
                   ) -> tuple[Tokenizer, bool]:
  """As `_byte_level`: BPE over characters, which falls back to bytes."""
  from tokenizers import Tokenizer, decoders, models, normalizers
  scores = values.get('scores', np.ndarray)
  if len(scores) != len(tokens):
    raise values.refused('scores', f'{len(scores)} scores', f'there are {len(tokens)} tokens')
  if values.get('pre', str, 'default') != 'default':
    raise values.refused('pre', values.get('pre', str), "a model of the type 'llama' has none")
  unknown = values.token_id('unknown', len(tokens))
  tokenizer = Tokenizer(models.BPE(
      vocab={t: i for i, t in enumerate(tokens)}, merges=_merges(tokens, scores, types),
      unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True))
  prefix = values.get('add_space_prefix', bool, True)
  tokenizer.normalizer = normalizers.Sequence(
      [normalizers.Prepend('▁')] * prefix + [normalizers.Replace(' ', '▁')])
  tokenizer.decoder = decoders.Sequence(
      [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
      + [decoders.Strip(' ', 1, 0)] * prefix)
  return tokenizer, True


def _merges(tokens: list[str], scores: np.ndarray, types: np.ndarray) -> list[tuple[str, str]]:
  """All pairs of tokens whose text is a token: first those that make the token of highest score."""
  ids, merges = {token: i for i, token in enumerate(tokens)}, []
  for i in np.flatnonzero(types == 1):
    token = tokens[i]
    for cut in range(1, len(token)):
      if (left := token[:cut]) in ids and (right := token[cut:]) in ids:
        merges.append((-scores[i], len(left), ids[left], left, right))
  return [(left, right) for *_, left, right in sorted(merges)]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: np.ndarray) -> None:
  """Makes the tokens that are found in a text as a whole, before it is cut into words."""
  from tokenizers import AddedToken
  for kind in (_CONTROL, _UNKNOWN):
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False)
                                  for i in np.flatnonzero(types == kind)])
  tokenizer.add_tokens([AddedToken(tokens[i], special=False, normalized=False)
                        for i in np.flatnonzero(types == _USER_DEFINED)])
