"""The tokenizer of a published model, or of a run trained with sink_jax, as probes need it.

Unlike an `Encoder`, which makes the ids of training data, it knows the tokens that a model expects
before a text.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sink_jax.data.tokenizer import Encoder
from sink_jax.data.tokenizer_json import cut, panics_refused
from sink_jax.io.files import read_text_limited

if TYPE_CHECKING:
  import tokenizers

_REMEDY = 'download the model again'
_log = logging.getLogger('sink_jax')
Ids = Sequence[int] | np.ndarray
BOS = ('none', 'tokenizer', 'force')


class TextTokenizer:
  """Text to ids, and the tokens that a tokenizer puts before every text.

  The text never produces a special token: a document that spells '<s>' is read letter by letter, as
  in training. What a post-processor adds at the end (EOS, [SEP]) is dropped, since a probe is the
  beginning of a document.

  Attributes:
    vocab_size: the largest id + 1.
    bos_id: None where the tokenizer has no BOS.
    prefix: the ids that are put before every text; none, or one BOS, in all models of the paper.
    name: the name of the file, for messages and protocols.
    bos_in_texts: whether the BOS is an ordinary token, which the text may hold as well.
    eos_ids: the ids that end a text, of which a model may have several; () where none is known.
  """

  def __init__(self, encode: Callable[[str], Ids], decode: Callable[[list[int]], str],
               *, vocab_size: int, bos_id: int | None, prefix: Sequence[int], name: str,
               bos_in_texts: bool = False, eos_ids: Sequence[int] = ()):
    self._encode, self._decode = encode, decode
    self.vocab_size, self.bos_id, self.name = vocab_size, bos_id, name
    self.bos_in_texts, self.eos_ids = bos_in_texts, tuple(eos_ids)
    self.prefix = tuple(int(i) for i in prefix)

  @classmethod
  def from_folder(cls, folder: str | os.PathLike, limit: int | None = None) -> TextTokenizer:
    """Reads the tokenizer of a Hugging Face checkpoint folder.

    It is made of tokenizer.json, or of vocab.json and merges.txt (the older layout of GPT-2 and
    OPT). The BOS is `bos_token` of tokenizer_config.json or special_tokens_map.json, else what the
    post-processor puts first, else `bos_token_id` of config.json. `add_bos_token` of
    tokenizer_config.json outranks the post-processor, as in the LLaMA-like fast tokenizers of
    transformers 4, with which the models were published; transformers 5 ignores it.

    Args:
      limit: the tokens that the model has. A tokenizer with more is cut to them, and that is
        logged: some had tokens added after the training, which the model has no embeddings for.

    Raises:
      ValueError: no tokenizer, one in another format, or a damaged file; with the remedy.
    """
    folder = Path(folder)
    settings = {**_object(folder / 'special_tokens_map.json'),
                **_object(folder / 'tokenizer_config.json')}
    file, tokenizer = _read(folder, settings)
    with panics_refused(f'{file} cannot encode a text: {_REMEDY}'):
      # The file may prescribe a length to which texts are cut or padded. Ids may have gaps, so the
      # largest one counts, and not their number.
      tokenizer.no_truncation()
      tokenizer.no_padding()
      vocab_size = max(tokenizer.get_vocab().values()) + 1
      prefix = _prefix(tokenizer)  # before special tokens are taken for letters
    if limit is not None and vocab_size > limit:
      tokenizer = _cut(file, tokenizer, prefix, limit)
      vocab_size = max(tokenizer.get_vocab().values()) + 1
    tokenizer.encode_special_tokens = True
    bos_id = _bos_id(folder, file, tokenizer, settings, prefix)
    added = settings.get('add_bos_token')
    if added is True:
      if bos_id is None:
        raise ValueError(f'{folder / "tokenizer_config.json"}: add_bos_token is true, but there is '
                         'no bos_token: name one there, or set add_bos_token to false.')
      prefix = [bos_id]
    elif added is False:
      prefix = [i for i in prefix if i != bos_id]
    # An export of a run names no bos_token where the run's first token is an ordinary one.
    ordinary = (bos_id is not None and _content(settings.get('bos_token')) is None
                and not _is_special(tokenizer, bos_id))
    return cls(*_functions(file, tokenizer), vocab_size=vocab_size, bos_id=bos_id, prefix=prefix,
               name=str(file), bos_in_texts=ordinary,
               eos_ids=_eos_ids(folder, tokenizer, settings))

  @classmethod
  def from_gguf(cls, path: str | os.PathLike, limit: int | None = None) -> TextTokenizer:
    """Reads the tokenizer of a GGUF file; see `from_folder` for `limit`.

    Raises:
      ValueError: the file is damaged, or its metadata define no tokenizer that is supported.
    """
    from sink_jax.data.gguf_tokenizer import gguf_tokenizer  # folders need no GGUF
    from sink_jax.io.gguf import GgufFile
    made, file = gguf_tokenizer(GgufFile(path)), Path(path)
    prefix = [made.bos_id] if made.add_bos and made.bos_id is not None else []
    tokenizer = made.tokenizer
    if limit is not None and max(tokenizer.get_vocab().values()) >= limit:
      tokenizer = _cut(file, tokenizer, prefix, limit)
    tokenizer.encode_special_tokens = True
    return cls(*_functions(file, tokenizer), vocab_size=max(tokenizer.get_vocab().values()) + 1,
               bos_id=made.bos_id, prefix=prefix, name=str(file), eos_ids=made.eos_ids)

  @classmethod
  def from_encoder(cls, encoder: Encoder, bos: bool = False,
                   first_token: int | None = None) -> TextTokenizer:
    """The tokenizer of a training run.

    Args:
      bos: whether its documents began with BOS.
      first_token: the token that every sequence of its training began with, in place of a BOS.
    """
    bos_id = encoder.bos_id if first_token is None else first_token
    return cls(encoder.encode, encoder.decode, vocab_size=encoder.vocab_size, bos_id=bos_id,
               prefix=[bos_id] if bos or first_token is not None else [],
               name='the tokenizer of the run',
               bos_in_texts=bos_id not in (encoder.bos_id, encoder.eos_id, encoder.pad_id),
               eos_ids=[encoder.eos_id])

  def encode(self, text: str, special: bool = False) -> np.ndarray:
    """The ids of a text (T,), int32.

    Args:
      special: whether the tokens that the tokenizer puts before a text are among them.
    """
    return self.with_prefix(self._encode(text), 'tokenizer' if special else 'none')

  def with_prefix(self, ids: Ids, bos: str) -> np.ndarray:
    """The ids of a text with the tokens before it (T,), int32; they are not put there twice.

    Args:
      bos: 'none', 'tokenizer' (`prefix`) or 'force' (one BOS).

    Raises:
      ValueError: 'force', and there is no BOS.
    """
    if bos == 'force' and self.bos_id is None:
      raise ValueError(f'--bos=force: {self.name} has no BOS.')
    first = {'none': (), 'tokenizer': self.prefix, 'force': (self.bos_id,)}[bos]
    text = np.asarray(ids, np.int32)
    if tuple(text[:len(first)]) == first:
      return text
    return np.concatenate([first, text]).astype(np.int32)

  def tokens(self, texts: str | Sequence[str], length: int | None = None, bos: str = 'tokenizer'
             ) -> list[np.ndarray] | np.ndarray:
    """The ids that a model reads of each text, int32; see `sink_jax.tokenize`."""
    texts = [texts] if isinstance(texts, str) else list(texts)
    if bos not in BOS:
      raise ValueError(f'bos = {bos!r}: choose {", ".join(BOS)}.')
    if not texts or not all(isinstance(text, str) for text in texts):
      raise ValueError('texts must be a string, or a list of one string or more.')
    rows = [self.with_prefix(self._encode(text), bos) for text in texts]
    if length is None:
      return rows
    if length < 1:
      raise ValueError(f'length = {length} must be at least 1.')
    for i, row in enumerate(rows):
      if len(row) < length:
        raise ValueError(f'texts[{i}] has {len(row)} tokens, fewer than length = {length}: take a '
                         'smaller length, or a longer text.')
    return np.stack([row[:length] for row in rows])

  def decode(self, ids: Ids) -> str:
    """The text of the ids, special tokens spelled out."""
    return self._decode(np.asarray(ids).ravel().tolist())

  def check_vocabulary(self, vocab_size: int) -> None:
    """Raises a ValueError where the tokenizer has ids that the model does not."""
    if self.vocab_size > vocab_size:
      raise ValueError(f'{self.name} has ids up to {self.vocab_size - 1}, but the model only has '
                       f'{vocab_size} tokens: use the tokenizer that belongs to the model.')


def _functions(file: Path, tokenizer: tokenizers.Tokenizer,
               ) -> tuple[Callable[[str], Ids], Callable[[list[int]], str]]:
  """Text to ids and back, with the name of the file in errors."""
  def encode(text: str) -> list[int]:
    with panics_refused(f'{file} cannot encode this text'):
      return tokenizer.encode(text, add_special_tokens=False).ids

  def decode(ids: list[int]) -> str:
    with panics_refused(f'{file} cannot decode these ids'):
      return tokenizer.decode(ids, skip_special_tokens=False)

  return encode, decode


def _read(folder: Path, settings: dict[str, Any]) -> tuple[Path, tokenizers.Tokenizer]:
  """The file and the tokenizer of the first layout that the folder has."""
  import tokenizers
  file, vocab, merges = (folder / n for n in ('tokenizer.json', 'vocab.json', 'merges.txt'))
  if file.exists():
    with panics_refused(f'{file} is damaged or not a tokenizer: {_REMEDY}'):
      return file, tokenizers.Tokenizer.from_str(read_text_limited(file))
  if vocab.exists() and merges.exists():
    with panics_refused(f'{vocab} is damaged or not a tokenizer: {_REMEDY}'):
      return vocab, _byte_level(vocab, merges, settings)
  raise ValueError(_unread(folder))


def _unread(folder: Path) -> str:
  """Why a folder has no tokenizer that can be read: what kind of file it has, and the remedy."""
  files = sorted((*folder.glob('*.model'), *folder.glob('*.tiktoken')))
  if not files:
    return f'{folder} has no tokenizer.json, nor vocab.json and merges.txt: {_REMEDY}.'
  file = files[0]
  kind = 'tiktoken' if file.suffix == '.tiktoken' or _is_tiktoken(file) else 'sentencepiece'
  convert = ('from transformers import AutoTokenizer as T; '
             f"T.from_pretrained('{folder}').save_pretrained('{folder}')")
  if file.suffix == '.tiktoken':  # of which transformers cannot know the pattern of words
    convert = ('from transformers.integrations.tiktoken import convert_tiktoken_to_fast as c; '
               f"c(ENCODING, '{folder}')")
  encoding = (", with the model's tiktoken.Encoding, or its name, as ENCODING"
              if file.suffix == '.tiktoken' else '')
  return (f'{file} is a {kind} model, and there is no tokenizer.json beside it. Convert it once, '
          f'where transformers and {kind} are installed{encoding}: python -c "{convert}"')


def _is_tiktoken(file: Path) -> bool:
  """Whether a file is lines of a token in base64 and its rank; sentencepiece has no such lines."""
  if not file.is_file():
    return False
  with open(file, 'rb') as lines:
    return bool(re.match(rb'[A-Za-z0-9+/]+={0,2} \d+\r?\n', lines.read(1000)))


def _cut(file: Path, tokenizer: tokenizers.Tokenizer, prefix: list[int],
         limit: int) -> tokenizers.Tokenizer:
  """The tokenizer with the ids that the model has.

  Raises:
    ValueError: it needs the others, or one of them is in the prefix, which precedes every text.
  """
  largest = max(tokenizer.get_vocab().values())
  about = f'{file} has ids up to {largest}, but the model only has {limit} tokens'
  remedy = 'use the tokenizer that belongs to the model'
  if beyond := [id_ for id_ in prefix if id_ >= limit]:
    raise ValueError(f'{about}, and {beyond[0]} comes before every text: {remedy}.')
  try:
    left = cut(tokenizer, limit)
  except ValueError as error:
    raise ValueError(f'{about}, and cannot be cut to them, as {error}: {remedy}.') from None
  _log.warning('%s: it is cut to them', about)
  return left


def _byte_level(vocab: Path, merges: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
  """GPT-2's tokenizer. Whether it adds a BOS is left to add_bos_token, as in OPT."""
  import tokenizers
  for file in (vocab, merges):
    read_text_limited(file)  # refuses a device, which the library would read without end
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=bool(settings.get('add_prefix_space')))
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  names = {'<|endoftext|>'}  # which GPT-2's files do not name
  for kind in ('bos', 'eos', 'unk', 'pad'):
    if (name := _content(settings.get(f'{kind}_token'))) is not None:
      names.add(name)
  tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False)
                                for name in sorted(names)
                                if tokenizer.token_to_id(name) is not None])
  return tokenizer


def _prefix(tokenizer: tokenizers.Tokenizer) -> list[int]:
  """The ids that the post-processor puts before a text."""
  encoding = tokenizer.encode('a')
  # 1 for a token that the post-processor has added, 0 for one of the text.
  added = encoding.special_tokens_mask
  return encoding.ids[:added.index(0) if 0 in added else len(added)]


def _bos_id(folder: Path, file: Path, tokenizer: tokenizers.Tokenizer, settings: dict[str, Any],
            prefix: list[int]) -> int | None:
  name = _content(settings.get('bos_token'))
  if name is not None:
    bos_id = tokenizer.token_to_id(name)
    if bos_id is None:
      raise ValueError(f'{file} has no token {name!r}, which tokenizer_config.json calls the '
                       'bos_token: the two files belong to different models, or the model has no '
                       'such token and it was cut.')
    return bos_id
  if prefix or settings.get('bos_token', 0) is None:  # null, not missing: there is no BOS
    return prefix[0] if prefix else None
  # The last resort: a config may name a BOS that its tokenizer never adds.
  bos_id = _object(folder / 'config.json').get('bos_token_id')
  known = type(bos_id) is int and 0 <= bos_id < 2**32 and tokenizer.id_to_token(bos_id) is not None
  return bos_id if known else None


def _eos_ids(folder: Path, tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]) -> list[int]:
  """The `eos_token` of the tokenizer, and the `eos_token_id` that transformers generates with.

  The latter is a number or a list of them: a chat model ends an answer with a token of its own.
  """
  name = _content(settings.get('eos_token'))
  ids = [] if name is None else [tokenizer.token_to_id(name)]
  for file in ('generation_config.json', 'config.json'):
    given = _object(folder / file).get('eos_token_id')
    if given is not None:
      ids += given if isinstance(given, list) else [given]
      break
  # A file is from elsewhere: what is no id of this tokenizer ends no text.
  return list(dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < 2**32
                            and tokenizer.id_to_token(i) is not None))


def _is_special(tokenizer: tokenizers.Tokenizer, id_: int) -> bool:
  token = tokenizer.get_added_tokens_decoder().get(id_)
  return token is not None and token.special


def _content(token: Any) -> str | None:
  """The string of a special token, which some files wrap into an object."""
  token = token.get('content') if isinstance(token, dict) else token
  return token if isinstance(token, str) else None


def _object(path: Path) -> dict[str, Any]:
  """A JSON object; {} where there is no file.

  Raises:
    ValueError: the file is damaged.
  """
  if not path.exists():
    return {}
  try:
    value = json.loads(read_text_limited(path))
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f'{path} is damaged ({error}): {_REMEDY}.') from None
  if not isinstance(value, dict):
    raise ValueError(f'{path} must hold a JSON object, not {type(value).__name__}: {_REMEDY}.')
  return value
