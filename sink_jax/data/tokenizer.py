"""Text to token ids and back, for training data and for published models.

`TextTokenizer` does both. A `Tokenizer` is the choice in a config, which opens a `TextTokenizer`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from sink_jax.arguments import check_known
from sink_jax.component import Component
from sink_jax.data.sources import DocumentSource
from sink_jax.io.files import check_downloaded, read_text_limited, refused, write_atomically
from sink_jax.io.paths import AnyPath, to_path

BOS = ('none', 'tokenizer', 'force')  # see TextTokenizer.before
EOS_TEXT, PAD_TEXT = '<|endoftext|>', '<|padding|>'
_USUAL_NAMES = {
  'eos': (EOS_TEXT, '</s>', '<|end_of_text|>', '<eos>', '[EOS]', '<|end▁of▁sentence|>'),
  'bos': ('<s>', '<|begin_of_text|>', '<bos>', '[BOS]', '<|startoftext|>', '<|begin▁of▁sentence|>'),
  'pad': ('<pad>', PAD_TEXT, '[PAD]', '<|finetune_right_pad_id|>'),
}
_REMEDY = 'download the model again; in a run, train again with the same --workdir'
Ids = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TextTokenizer:
  """Text to ids and back.

  Unless `special=True` asks for them, a text never produces the ids of special tokens: a document
  that spells '</s>', which would end it in the middle, is read letter by letter. Tokens that a
  tokenizer.json adds at the end of a text (EOS, [SEP]) are left out, since a probe is the
  beginning of a document.

  Attributes:
    model: the tokenizer of the library `tokenizers`.
    name: the file, for messages and records.
    bos_id: None if there is no BOS.
    eos_ids: the ids that end a text, of which a chat model has several; () if none is known.
    pad_id: None if no token is for padding.
    prefix: the ids before every text; none, or one BOS, in all models of the paper.
  """

  model: tokenizers.Tokenizer = dataclasses.field(repr=False)
  name: str
  bos_id: int | None = None
  eos_ids: tuple[int, ...] = ()
  pad_id: int | None = None
  prefix: tuple[int, ...] = ()

  @classmethod
  def from_path(cls, path: str | os.PathLike) -> TextTokenizer:
    """Reads the tokenizer of a published model or of a run.

    The BOS is `bos_token` of tokenizer_config.json or special_tokens_map.json, else what the
    post-processor puts first, else `bos_token_id` of config.json. `add_bos_token` of
    tokenizer_config.json outranks the post-processor, as in the LLaMA-like fast tokenizers of
    transformers 4, with which the models were published; true without a `bos_token` adds nothing.

    Args:
      path: a folder with tokenizer.json, or with vocab.json and merges.txt (GPT-2, OPT); the
        workdir of a run, which has such a folder; a tokenizer.json; or a GGUF file.

    Raises:
      ValueError: there is no tokenizer, one in another format, or a damaged file; with the remedy.
    """
    path = to_path(path)
    if path.suffix.casefold() == '.gguf':
      return _read_gguf(path)
    if (path / 'tokenizer' / 'tokenizer.json').exists():
      path = path / 'tokenizer'
    folder, file = (path, path / 'tokenizer.json') if path.is_dir() else (path.parent, path)
    settings = _object(folder, 'special_tokens_map') | _object(folder, 'tokenizer_config')
    config = _object(folder, 'config')
    model, prefix = _read(folder, file, settings)
    bos_id, eos_id, pad_id = (
      _named(model, settings.get(f'{role}_token')) for role in ('bos', 'eos', 'pad')
    )
    bos_name = settings.get('bos_token')
    if bos_name and bos_id is None:
      raise ValueError(
        f'{file} has no token {bos_name!r}, the bos_token of tokenizer_config.json: {_REMEDY}.'
      )
    if not bos_name:
      # null, not missing: there is no BOS
      others = prefix if prefix or 'bos_token' in settings else [config.get('bos_token_id')]
      bos_id = next(iter(_known(model, others)), None)
    # The ids with which transformers ends a text: a chat model ends an answer with a special token.
    generation = _object(folder, 'generation_config').get('eos_token_id')
    ends = config.get('eos_token_id') if generation is None else generation
    eos_ids = _known(model, [eos_id, *(ends if isinstance(ends, list) else [ends])])
    read = cls(model, str(file), bos_id, eos_ids, pad_id)
    if 'digest' in settings and settings['digest'] != read.digest:
      raise ValueError(f'{file} is damaged, since its digest differs: {_REMEDY}.')
    adds_bos = settings.get('add_bos_token')
    if adds_bos and bos_name:
      prefix = read.before('force')
    elif adds_bos is not None and not adds_bos:
      prefix = tuple(i for i in prefix if i != bos_id)
    return dataclasses.replace(read, prefix=prefix)

  def beginning_with(self, token: int) -> TextTokenizer:
    """The tokenizer with this token before every text, which is then the BOS."""
    return dataclasses.replace(self, bos_id=token, prefix=(token,))

  @functools.cached_property
  def vocab_size(self) -> int:
    """The largest id + 1: ids may have gaps."""
    return max(self.model.get_vocab().values()) + 1

  @property
  def eos_id(self) -> int:
    """The id that ends a document."""
    if not self.eos_ids:
      raise ValueError(
        f'{self.name} names no token that ends a text: set eos_token in tokenizer_config.json.'
      )
    return self.eos_ids[0]

  @property
  def bos_in_texts(self) -> bool:
    """True if the BOS is an ordinary token, which a text may hold too: as in some runs."""
    return self.bos_id is not None and self.bos_id not in self.special_tokens.values()

  @functools.cached_property
  def special_tokens(self) -> dict[str, int]:
    """Ids of special tokens by their names, which the template of a conversation may hold."""
    tokens = sorted(self.model.get_added_tokens_decoder().items())
    return {token.content: i for i, token in tokens if token.special}

  @functools.cached_property
  def digest(self) -> str:
    """Differs between tokenizers that make different ids of a text."""
    return hashlib.sha256(self._json(()).encode()).hexdigest()[:32]

  def encode(self, text: str, *, special: bool = False) -> list[int]:
    """The ids of a text, without those before it; a ValueError if a part has no token.

    special: whether names of special tokens in the text are these tokens, or, by default, text.
    """
    return self.encode_batch([text], special=special)[0]

  def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
    """As `encode`, of several texts at once, by all cores."""
    texts = list(map(_encodable, texts))
    if special:
      return self._ids(texts, special=True)
    reads = self._ids(texts)
    reserved = {
      i: name
      for name, i in self.special_tokens.items()
      if i in (self.bos_id, self.pad_id, *self.eos_ids)
    }
    # Unigram and word-level models list such tokens among the words: names are broken up.
    inside = '|'.join(
      f'(?<={re.escape(name[0])})(?={re.escape(name[1:])})' for name in reserved.values()
    )
    for n, text in enumerate(texts):
      if not reserved.keys().isdisjoint(reads[n]):
        reads[n] = list(itertools.chain(*self._ids(re.split(inside, text))))
    return reads

  def _ids(self, texts: list[str], special: bool = False) -> list[list[int]]:
    # True: '<s>' in a text is three letters. It is set in every call, since pickling forgets it.
    self.model.encode_special_tokens = not special
    with refused(f'{self.name} cannot encode this text'):
      return [e.ids for e in self.model.encode_batch_fast(texts, add_special_tokens=False)]

  def decode(self, ids: Ids) -> str:
    """The text of the ids, special tokens spelled out."""
    with refused(f'{self.name} cannot decode these ids'):
      return self.model.decode(np.asarray(ids).ravel().tolist(), skip_special_tokens=False)

  def before(self, bos: str) -> tuple[int, ...]:
    """The ids before a text where bos is 'none', 'tokenizer' (`prefix`) or 'force' (one BOS).

    Raises:
      ValueError: `bos` is another word, or is 'force' without a BOS.
    """
    check_known(bos, BOS, 'bos =')
    if bos == 'force' and self.bos_id is None:
      raise ValueError(
        f'bos = {bos!r}: {self.name} names no BOS: set bos_token in tokenizer_config.json.'
      )
    return {'none': (), 'tokenizer': self.prefix, 'force': (self.bos_id,)}[bos]

  def with_prefix(self, ids: Ids, bos: str) -> np.ndarray:
    """The ids of `before`, unless the text begins with them, and the ids of a text, (T,) int32."""
    first, text = self.before(bos), np.asarray(ids, np.int32)
    if tuple(text[: len(first)]) == first:
      return text
    return np.concatenate([first, text]).astype(np.int32)

  def tokens(
    self,
    texts: str | Sequence[str],
    length: int | None = None,
    bos: str = 'tokenizer',
    special: bool = False,
  ) -> list[np.ndarray] | np.ndarray:
    """The ids that a model reads of each text, int32; see `sink_jax.tokenize`."""
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts or not all(isinstance(text, str) for text in texts):
      raise ValueError('texts must be a string, or a list of one string or more.')
    rows = [self.with_prefix(ids, bos) for ids in self.encode_batch(texts, special=special)]
    if length is None:
      return rows
    shortest = min(range(len(rows)), key=lambda i: len(rows[i]))
    if not 1 <= length <= len(rows[shortest]):
      raise ValueError(
        f'length = {length} must be between 1 and the {len(rows[shortest])} tokens '
        f'of texts[{shortest}]: take another length, or a longer text.'
      )
    return np.stack([row[:length] for row in rows])

  def save(self, folder: str | os.PathLike, **settings: Any) -> None:
    """Writes tokenizer.json and tokenizer_config.json, for transformers and for `from_path`.

    Other programs read the name of a special token inside a text as that token, unlike this one.

    Args:
      settings: more entries of tokenizer_config.json, such as model_max_length; `from_path`
        refuses a tokenizer.json that does not fit the entry digest.
    """
    folder, text = to_path(folder), self._json(self.prefix)
    ids = {
      'eos_token': (*self.eos_ids, None)[0],
      'pad_token': self.pad_id,
      # transformers cuts what is named here out of every text that holds it.
      'bos_token': None if self.bos_in_texts else self.bos_id,
    }
    settings |= {name: self.model.id_to_token(i) for name, i in ids.items() if i is not None}
    settings['tokenizer_class'] = 'PreTrainedTokenizerFast'
    settings['clean_up_tokenization_spaces'] = False
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / 'tokenizer.json', text)
    write_atomically(folder / 'tokenizer_config.json', json.dumps(settings, indent=2))

  def _json(self, prefix: tuple[int, ...]) -> str:
    """A tokenizer.json that puts the prefix before every text, and nothing behind it."""
    if beyond := [i for i in prefix if self.model.id_to_token(i) is None]:
      raise ValueError(f'the tokenizer has no token {beyond[0]}, which the run begins with.')
    # The name of a token could be read as a part of the template.
    first = [
      {'id': f'first{n}', 'ids': [i], 'tokens': [self.model.id_to_token(i)]}
      for n, i in enumerate(prefix)
    ]
    begin = ' '.join([*(entry['id'] for entry in first), '$A'])
    self.model.post_processor = processors.TemplateProcessing(
      single=begin, pair=f'{begin} $B', special_tokens=first
    )
    return self.model.to_str()


def _read_gguf(path: AnyPath) -> TextTokenizer:
  # Not at the top, since gguf costs a tenth of a second.
  from sink_jax.data.gguf_tokenizer import gguf_tokenizer
  from sink_jax.io.gguf import GgufFile

  metadata = GgufFile(path).metadata
  with refused(f'{path}: the metadata define no tokenizer'):
    model, bos_id, adds_bos, eos_ids = gguf_tokenizer(metadata)
    model.encode('a')
  read = TextTokenizer(model, str(path), bos_id, eos_ids)
  return dataclasses.replace(read, prefix=read.before('force')) if adds_bos else read


def _read(
  folder: AnyPath, file: AnyPath, settings: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, tuple[int, ...]]:
  """The tokenizer, and the ids that its post-processor puts before a text."""
  vocabulary, merges = folder / 'vocab.json', folder / 'merges.txt'
  old = not file.exists() and vocabulary.exists()
  if not old and not file.exists():
    raise ValueError(
      f'{file} does not exist: {_REMEDY}; convert a sentencepiece or tiktoken model '
      f"by AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') of "
      'transformers.'
    )
  with refused(f'{vocabulary if old else file} is damaged or not a tokenizer: {_REMEDY}'):
    if old:
      check_downloaded(vocabulary)
      check_downloaded(merges)
      text = tokenizers.ByteLevelBPETokenizer.from_file(
        str(vocabulary), str(merges), add_prefix_space=bool(settings.get('add_prefix_space'))
      ).to_str()
    else:
      text = read_text_limited(file)
    model = tokenizers.Tokenizer.from_str(text)
    if old:
      _named(model, EOS_TEXT)  # GPT-2's files do not say that it is special
    model.no_truncation()  # a file may prescribe a length to which texts are cut or padded
    model.no_padding()
    encoding = model.encode('a')
    max(model.get_vocab().values())
  added = encoding.special_tokens_mask  # 1 for a token of the post-processor, 0 for one of the text
  return model, tuple(encoding.ids[: added.index(0) if 0 in added else len(added)])


def _known(model: tokenizers.Tokenizer, ids: Iterable[Any]) -> tuple[int, ...]:
  """Those that are ids of this tokenizer: a file may have been made for another."""
  numbers = dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < 2**32)
  return tuple(i for i in numbers if model.id_to_token(i) is not None)


def _named(model: tokenizers.Tokenizer, name: Any) -> int | None:
  """The id of a token of the vocabulary by its name, which is then a special one."""
  name = name.get('content') if isinstance(name, dict) else name  # some files wrap it
  i = model.token_to_id(name) if isinstance(name, str) else None
  if i is not None:
    token = model.get_added_tokens_decoder().get(i)
    if token is None or not token.special:
      model.add_special_tokens([name])
  return i


def _object(folder: AnyPath, name: str) -> dict[str, Any]:
  """The JSON object of a file; {} if the file is missing."""
  path = folder / f'{name}.json'
  with refused(f'{path} is damaged or not a JSON object: {_REMEDY}'):
    return dict(json.loads(read_text_limited(path))) if path.exists() else {}


class Tokenizer(Component):
  """A choice of the way in which text becomes ids."""

  def open(
    self, source: DocumentSource | None = None, valid_fraction: float = 0.0
  ) -> TextTokenizer:
    """Makes the tokenizer, with BOS, EOS and padding, and nothing before a text.

    Args:
      source, valid_fraction: a corpus; a tokenizer that needs training reads its training
        documents.

    Raises:
      ValueError: the tokenizer's file is missing, damaged, or lacks a token.
    """
    raise NotImplementedError

  def fingerprint(self) -> str:
    """The part that the config string leaves open: a content, or the version of a library."""
    return ''


class Bytes(Tokenizer):
  """UTF-8 bytes, vocabulary 258: 0 ends a document (and is the BOS), 1 pads, 2 + byte."""

  vocab_size: ClassVar[int] = 258

  def open(self, source=None, valid_fraction=0.0) -> TextTokenizer:
    # In byte-level BPE the printable bytes stand for themselves, the others, in order, for 256, ...
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = [byte for byte in range(256) if chr(byte) not in letters]
    ids = {c: 2 + (ord(c) if ord(c) < 256 else others[ord(c) - 256]) for c in letters}
    vocabulary = {EOS_TEXT: 0, PAD_TEXT: 1} | ids
    model = _byte_level(models.BPE(vocab=vocabulary, merges=[]), use_regex=False)
    model.add_special_tokens([EOS_TEXT, PAD_TEXT])
    return TextTokenizer(model, repr(self), bos_id=0, eos_ids=(0,), pad_id=1)


class HuggingFace(Tokenizer):
  """A `tokenizer.json`, the folder of a published model, the workdir of a run, or a GGUF file.

  tokenizer_config.json names EOS, BOS and padding; otherwise tokens with a usual name are taken.
  """

  path: str = ''

  def open(self, source=None, valid_fraction=0.0) -> TextTokenizer:
    read = TextTokenizer.from_path(self.path)
    special = read.special_tokens
    ids = {'eos': next(iter(read.eos_ids), None), 'bos': read.bos_id, 'pad': read.pad_id}
    for role, names in _USUAL_NAMES.items():
      if ids[role] is None:
        ids[role] = next((special[name] for name in names if name in special), ids['eos'])
    if ids['eos'] is None:
      raise ValueError(
        f'{read.name} names no EOS: set eos_token in tokenizer_config.json; special '
        f'are: {", ".join(special)}.'
      )
    return dataclasses.replace(
      read, eos_ids=(ids['eos'],), bos_id=ids['bos'], pad_id=ids['pad'], prefix=()
    )

  def fingerprint(self) -> str:
    opened = self.open()
    return f'{opened.digest}-{opened.eos_id}-{opened.bos_id}-{opened.pad_id}'


class TrainedBpe(Tokenizer):
  """Byte-level BPE, trained on the training documents of the corpus.

  Id 0 is the end of a text, 1 is padding. Training reads the first `characters` of the documents,
  and held-out documents only if there are no others, since their words must not be in the
  vocabulary. A small corpus may support fewer merges than `vocab_size` asks for, and then has
  fewer ids.
  """

  vocab_size: int = 4096
  characters: int = 100_000_000

  def __post_init__(self) -> None:
    if self.vocab_size < 258:
      raise ValueError(
        f'{self!r}: vocab_size must be at least 258: 256 bytes, end of text, padding.'
      )

  def open(self, source=None, valid_fraction=0.0) -> TextTokenizer:
    if source is None:
      raise ValueError(f'{self!r} is trained on a corpus, and there is none.')
    model = _byte_level(models.BPE())
    # Special tokens get the first ids, in this order. All 256 bytes are in the alphabet, so that
    # any text can be encoded after any training text.
    trainer = trainers.BpeTrainer(
      vocab_size=self.vocab_size,
      special_tokens=[EOS_TEXT, PAD_TEXT],
      show_progress=False,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(self._texts(source, valid_fraction), trainer=trainer)
    return TextTokenizer(model, repr(self), bos_id=0, eos_ids=(0,), pad_id=1)

  def fingerprint(self) -> str:
    return tokenizers.__version__

  def _texts(self, source: DocumentSource, valid_fraction: float) -> Iterator[str]:
    training = (d for d in source.documents() if not source.held_out(d.name, valid_fraction))
    first, left = next(training, None), self.characters
    for document in itertools.chain([first], training) if first else source.documents():
      if left <= 0:
        return
      yield _encodable(document.text[:left])
      left -= len(document.text)


def _encodable(text: str) -> str:
  """The text with a question mark for half a surrogate pair, which JSON escapes can spell."""
  return text.encode('utf-8', 'replace').decode()


def _byte_level(model: models.BPE, use_regex: bool = True) -> tokenizers.Tokenizer:
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer
