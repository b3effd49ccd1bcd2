"""Text to token ids: a `Tokenizer` is the choice in a config, an `Encoder` does the work.

`Tokenizer.resolve` makes the encoder, for which it may read a file or train on the corpus. A cache
keeps the encoder that made its ids, so that nothing has to be resolved to open it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sink_jax.component import Component
from sink_jax.data.sources import DocumentSource
from sink_jax.data.tokenizer_json import panics_refused, parsed, special_tokens
from sink_jax.io.files import read_text_limited, write_atomically
from sink_jax.io.hashing import sha256
from sink_jax.io.paths import expanded

if TYPE_CHECKING:
  import tokenizers

EOS_TEXT, PAD_TEXT = '<|endoftext|>', '<|padding|>'
_EOS_NAMES = (EOS_TEXT, '</s>', '<|end_of_text|>', '<eos>', '[EOS]', '<|end▁of▁sentence|>')
_BOS_NAMES = ('<s>', '<|begin_of_text|>', '<bos>', '[BOS]', '<|startoftext|>',
              '<|begin▁of▁sentence|>')
_PAD_NAMES = ('<pad>', PAD_TEXT, '[PAD]', '<|finetune_right_pad_id|>')
_log = logging.getLogger('sink_jax')


class Encoder:
  """Text to ids in [0, vocab_size), and back.

  The text never produces `eos_id`, `bos_id` or `pad_id`: a document that spells a special token,
  which would end it in the middle, is encoded letter by letter.
  """
  vocab_size: int
  eos_id: int
  bos_id: int  # equals eos_id where the tokenizer has no token of its own for it
  pad_id: int
  special_tokens: dict[str, int]  # by their names, which the template of a conversation may hold

  def encode(self, text: str) -> np.ndarray:
    """The ids of a text (T,), int32, without BOS and EOS."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text (T,), int32, without BOS and EOS."""
    raise NotImplementedError

  def decode(self, ids: Iterable[int]) -> str:
    """The text of the ids, special tokens spelled out."""
    raise NotImplementedError

  def fingerprint(self) -> str:
    """A string that differs between encoders that make different ids."""
    raise NotImplementedError

  def save(self, folder: str | os.PathLike) -> None:
    """Writes what `load_encoder` needs besides the ids of the special tokens."""


class ByteEncoder(Encoder):
  """UTF-8 bytes: 0 = end of text (and BOS), 1 = padding, 2 + byte."""
  vocab_size, eos_id, bos_id, pad_id = 258, 0, 0, 1

  def __init__(self) -> None:
    self.special_tokens = {EOS_TEXT: 0, PAD_TEXT: 1}

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    # A surrogate without its other half has no UTF-8, and becomes a question mark.
    return [np.frombuffer(t.encode('utf-8', 'replace'), np.uint8).astype(np.int32) + 2
            for t in texts]

  def decode(self, ids: Iterable[int]) -> str:
    special = {0: EOS_TEXT.encode(), 1: PAD_TEXT.encode()}
    # Ids past the vocabulary (a model may pad it) show as the replacement character: no UTF-8 has
    # the byte 0xff.
    parts = [special.get(i) or (bytes([i - 2]) if i < 258 else b'\xff') for i in _as_list(ids)]
    return b''.join(parts).decode('utf-8', 'replace')

  def fingerprint(self) -> str:
    return 'bytes'


class FileEncoder(Encoder):
  """The encoder of a Hugging Face `tokenizer.json`, given as its text."""

  def __init__(self, serialized: str, eos_id: int, bos_id: int, pad_id: int):
    self._serialized = serialized
    self._tokenizer, vocabulary = parsed(serialized)
    self._tokenizer.encode_special_tokens = True  # '<s>' in a document is three letters
    self.special_tokens = special_tokens(self._tokenizer)
    self.vocab_size = max(vocabulary.values()) + 1
    self.eos_id, self.bos_id, self.pad_id = eos_id, bos_id, pad_id
    self._special = sorted({eos_id, bos_id, pad_id})
    names = [name for name, id_ in vocabulary.items() if id_ in self._special]
    if not set(self._special) <= set(vocabulary.values()):
      raise ValueError(f'the tokenizer has no token for one of the ids {self._special}.')
    # Matches, without any letter, behind the first letter of a special token's name.
    self._inside = re.compile('|'.join(f'(?<={re.escape(n[0])})(?={re.escape(n[1:])})'
                                       for n in names if len(n) > 1) or '(?!)')

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    with panics_refused('the tokenizer cannot encode a text'):
      encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    ids = [np.asarray(e.ids, np.int32) for e in encoded]
    return [self._encode_apart(text) if np.isin(i, self._special).any() else i
            for text, i in zip(texts, ids, strict=True)]

  def _encode_apart(self, text: str) -> np.ndarray:
    """The ids of a text that spells a special token."""
    # Unigram and word-level models list their special tokens among the ordinary
    # words, so the name has to be broken up to be read as letters.
    with panics_refused('the tokenizer cannot encode a text'):
      pieces = self._tokenizer.encode_batch_fast(self._inside.split(text),
                                                 add_special_tokens=False)
    return np.concatenate([np.asarray(p.ids, np.int32) for p in pieces])

  def decode(self, ids: Iterable[int]) -> str:
    with panics_refused('the tokenizer cannot decode these ids'):
      return self._tokenizer.decode([i for i in _as_list(ids) if i < self.vocab_size],
                                    skip_special_tokens=False)

  def fingerprint(self) -> str:
    ids = f'{self.eos_id},{self.bos_id},{self.pad_id}'
    return hashlib.sha256((self._serialized + ids).encode()).hexdigest()[:32]

  def save(self, folder: str | os.PathLike) -> None:
    write_atomically(pathlib.Path(folder, 'tokenizer.json'), self._serialized)


def _as_list(ids: Iterable[int]) -> list[int]:
  return np.asarray(ids).ravel().tolist()


def load_encoder(folder: str | os.PathLike, eos_id: int, bos_id: int, pad_id: int) -> Encoder:
  """The encoder that was saved into a chunk cache; that of bytes where there is no file.

  Raises:
    ValueError: the file is damaged; names the remedy.
  """
  path = pathlib.Path(folder, 'tokenizer.json')
  if not path.exists():
    return ByteEncoder()
  try:
    return FileEncoder(read_text_limited(path), eos_id, bos_id, pad_id)
  except ValueError as error:
    raise ValueError(f'{path} is damaged ({error}): delete {folder} and build it again.') from None


@dataclasses.dataclass(frozen=True)
class Tokenizer(Component):
  """How text becomes ids."""

  def resolve(self, source: DocumentSource, valid_fraction: float, root: pathlib.Path) -> Encoder:
    """Makes the encoder.

    Args:
      source, valid_fraction: the corpus, on whose training documents it is trained if it must be.
      root: the folder of caches, where a trained tokenizer is kept.

    Raises:
      ValueError: the tokenizer's file is missing, damaged, or lacks a token.
    """
    raise NotImplementedError

  def fingerprint(self) -> str:
    """What the config string leaves open: the content of a file, or the version of a library."""
    return ''


@dataclasses.dataclass(frozen=True)
class Bytes(Tokenizer):
  """UTF-8 bytes, vocabulary 258; 0 ends a document and 1 pads, as in GPT-NeoX."""

  vocab_size: ClassVar[int] = ByteEncoder.vocab_size

  def resolve(self, source: DocumentSource, valid_fraction: float, root: pathlib.Path) -> Encoder:
    return ByteEncoder()


@dataclasses.dataclass(frozen=True)
class HuggingFace(Tokenizer):
  """Any `tokenizer.json`, the folder of a published model or a run that holds it, or a GGUF file.

  `eos` and `bos` are strings of tokens; '' takes the one that has a usual name.
  """
  path: str = ''
  eos: str = ''
  bos: str = ''

  def resolve(self, source: DocumentSource, valid_fraction: float, root: pathlib.Path) -> Encoder:
    return self.encoder()

  def encoder(self) -> Encoder:
    """What `resolve` returns, whatever the documents are."""
    serialized = self._read()
    try:
      tokenizer, _ = parsed(serialized)
    except ValueError as error:
      raise ValueError(f'{self._file()}: {error}') from None
    special = special_tokens(tokenizer)
    eos_id = self._find(tokenizer, special, 'eos', _EOS_NAMES)
    bos_id = self._find(tokenizer, special, 'bos', _BOS_NAMES, eos_id)
    pad_id = next((special[n] for n in _PAD_NAMES if n in special), eos_id)
    return FileEncoder(serialized, eos_id, bos_id, pad_id)

  def fingerprint(self) -> str:
    return hashlib.sha256(self._read().encode()).hexdigest()[:32]

  def _file(self) -> pathlib.Path:
    if not self.path:
      raise ValueError("HuggingFace(path='') needs the path of a tokenizer.json.")
    try:
      path = expanded(self.path)
    except ValueError as error:  # the ~ of an unknown user
      raise ValueError(f'HuggingFace(path={self.path!r}): {error}') from None
    if not path.is_dir():
      return path
    of_run = path / 'tokenizer' / 'tokenizer.json'
    return of_run if of_run.exists() else path / 'tokenizer.json'

  def _read(self) -> str:
    file = self._file()
    if file.suffix == '.gguf':
      from sink_jax.data.gguf_tokenizer import gguf_tokenizer  # others need no GGUF
      from sink_jax.io.gguf import GgufFile
      return gguf_tokenizer(GgufFile(file)).tokenizer.to_str()
    try:
      return read_text_limited(file)
    except FileNotFoundError:
      raise ValueError(f'{file} does not exist; set HuggingFace(path=...) to a tokenizer.json '
                       'or the folder that holds it.') from None
    except ValueError as error:  # among them UnicodeDecodeError
      raise ValueError(f'{file}: not a tokenizer.json ({error}).') from None

  def _find(self, tokenizer: tokenizers.Tokenizer, special: dict[str, int], option: str,
            names: Iterable[str], default: int | None = None) -> int:
    """The id of the special token of an option, 'eos' or 'bos'."""
    wanted = getattr(self, option)
    if wanted:
      id_ = tokenizer.token_to_id(wanted)
    else:
      id_ = next((special[n] for n in names if n in special), default)
    if id_ is None:
      reason = f'no token {wanted!r}' if wanted else f'no {option.upper()} token found'
      raise ValueError(f'{self._file()}: {reason}; set HuggingFace({option}=...). '
                       f'Its special tokens: {", ".join(special) or "none"}.')
    return id_


def _stored(path: pathlib.Path) -> str | None:
  """The text of a tokenizer that was trained before; None where it is not whole."""
  try:
    digest = read_text_limited(_digest_of(path)).split()[:1]
    if digest == [sha256(path)]:
      return read_text_limited(path)
  except (OSError, ValueError):
    return None
  _log.warning('%s is damaged: it is trained again', path)
  return None


def _digest_of(path: pathlib.Path) -> pathlib.Path:
  return path.with_suffix('.sha256')  # as sha256sum -c reads it


@dataclasses.dataclass(frozen=True)
class TrainedBpe(Tokenizer):
  """Byte-level BPE, trained on the training documents of the corpus.

  Id 0 is the end of a text, 1 is padding. Training reads the first `characters` of the documents;
  of each one, text for validation included, where all are held out and chunks are split instead.
  A small corpus may support fewer merges than `vocab_size` asks for, and then has fewer ids.
  """
  vocab_size: int = 4096
  characters: int = 100_000_000

  def __post_init__(self) -> None:
    if self.vocab_size < 258:
      raise ValueError(f'TrainedBpe(vocab_size={self.vocab_size}) must be at least 258: '
                       '256 bytes, end of text and padding. For bytes alone use Bytes().')
    if self.characters < 1:
      raise ValueError(f'TrainedBpe(characters={self.characters}) must be at least 1.')

  def resolve(self, source: DocumentSource, valid_fraction: float, root: pathlib.Path) -> Encoder:
    parts = (repr(self), self.fingerprint(), repr(source), source.fingerprint(), valid_fraction)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    cached = pathlib.Path(root, 'tokenizers', f'bpe{self.vocab_size}-{key}.json')
    serialized = _stored(cached)
    if serialized is None:
      serialized = self._train(source, valid_fraction)
      cached.parent.mkdir(parents=True, exist_ok=True)
      digest = hashlib.sha256(serialized.encode()).hexdigest()
      # A kill between the two leaves a tokenizer without its digest, which is trained again.
      write_atomically(cached, serialized)
      write_atomically(_digest_of(cached), f'{digest}  {cached.name}\n')
    return FileEncoder(serialized, eos_id=0, bos_id=0, pad_id=1)

  def fingerprint(self) -> str:
    import tokenizers
    return tokenizers.__version__

  def _train(self, source: DocumentSource, valid_fraction: float) -> str:
    from tokenizers import Tokenizer as Model, decoders, models, pre_tokenizers, trainers
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    # Special tokens get the first ids, in this order: 0 and 1. All 256 bytes are in the alphabet,
    # so that any text can be encoded, whatever the training text holds.
    trainer = trainers.BpeTrainer(
        vocab_size=self.vocab_size, special_tokens=[EOS_TEXT, PAD_TEXT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    model.train_from_iterator(self._texts(source, valid_fraction), trainer=trainer)
    return model.to_str()

  def _texts(self, source: DocumentSource, valid_fraction: float) -> Iterator[str]:
    # Held-out documents must not leave their words in the vocabulary, unless there are no others.
    left = self.characters
    for document in source.documents():
      if left > 0 and not source.held_out(document.name, valid_fraction):
        yield document.text[:left]
        left -= len(document.text)
      if left <= 0:
        return
    if left == self.characters:  # all documents are held out: the corpus is split by chunks
      yield from (document.text[:left] for document in source.documents())
