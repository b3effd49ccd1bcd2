"""Where text comes from: a source yields documents, each with a domain and a name.

`Stdlib` and `InstalledPackages`, which read the running Python, have files of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sink_jax.component import Component
from sink_jax.data import text_lines
from sink_jax.io.paths import expanded

# The name of a file of a corpus, relative to its folder, and its path.
File = tuple[str, pathlib.Path]


class Part(NamedTuple):
  """A piece of a conversation, which is tokenized apart from its neighbours."""
  text: str | None  # None: the end of a text, the EOS of the tokenizer
  turn: int  # the message that it is of, from 0
  is_answer: bool  # whether it is an answer, or what ends one
  is_template: bool  # whether the template wrote it; else the message did


class Document(NamedTuple):
  """One text of a corpus, with what decides how it is split and mixed."""
  text: str
  domain: str
  name: str  # documents of one name fall into the same split
  position: int = 0  # bytes of the source up to the end of this document
  parts: tuple[Part, ...] = ()  # of a conversation, whose `text` they make up


def conversation(parts: tuple[Part, ...], domain: str, name: str, position: int) -> Document:
  """The document of a conversation."""
  return Document(''.join(part.text or '' for part in parts), domain, name, position, parts)


@dataclasses.dataclass(frozen=True)
class Source(Component):
  """A document corpus or a synthetic task: `from_string(Source, 'Stdlib()')` takes either."""


@dataclasses.dataclass(frozen=True)
class DocumentSource(Source):
  """A corpus: an ordered stream of documents, which is the same whenever it is read.

  A subclass has `documents`, or `documents_from` where it can begin in the middle. A subclass is a
  choice of configs once its module is imported; `prepare` imports them all.
  """

  abstract = True

  @property
  def answers_only(self) -> bool:
    """Whether the loss counts the answers of conversations alone, and not every token."""
    return False

  @property
  def drops_long(self) -> bool:
    """Whether conversations that no chunk can hold whole are left out."""
    return False

  def documents(self) -> Iterator[Document]:
    """All documents, in their order."""
    return self.documents_from(0)

  def documents_from(self, start: int) -> Iterator[Document]:
    """All but the first `start` documents; what a build that was stopped continues with."""
    return itertools.islice(self.documents(), start, None)

  def held_out(self, name: str, fraction: float) -> bool:
    """Whether the documents of this name are for validation, as this fraction of all is."""
    return held_out(name, fraction)

  def size(self) -> int:
    """The bytes that `Document.position` grows to; 0 where that is not known."""
    return 0

  def fingerprint(self) -> str:
    """A cheap string that changes when the corpus does.

    It is a part of the key of a cache, and is made of names, sizes and times of change: reading a
    corpus whenever a run starts would take hours.
    """
    raise NotImplementedError


def held_out(name: str, fraction: float) -> bool:
  """Whether a stable hash of the name is in this fraction of all hashes.

  So a document stays on its side when others are added, and a larger fraction holds out the same
  documents and more.
  """
  # 'replace': the name of a file that is not UTF-8 has surrogates in Python, which cannot be
  # encoded.
  digest = hashlib.blake2b(name.encode('utf-8', 'replace'), digest_size=8).digest()
  return int.from_bytes(digest, 'big') < fraction * 2**64


@dataclasses.dataclass(frozen=True)
class TextFolder(DocumentSource):
  """Text files in UTF-8, a document each; the first sub-folder is the domain, else 'text'."""
  path: str = ''
  pattern: str = '**/*.txt'

  def documents_from(self, start: int) -> Iterator[Document]:
    files = self._files()
    # Every file is a document, so those that are done need not be opened.
    position = total_size(files[:start])
    for name, file in files[start:]:
      position += file.stat().st_size
      try:
        text = file.read_bytes().decode('utf-8')
      except UnicodeDecodeError as error:
        raise ValueError(f'{file}: not valid UTF-8 at byte {error.start}; convert it '
                         '(iconv -t UTF-8), or exclude it by TextFolder(pattern=...).') from None
      yield Document(text, folder_domain(name), name, position)

  def size(self) -> int:
    return total_size(self._files())

  def fingerprint(self) -> str:
    return files_fingerprint(self._files())

  def _files(self) -> list[File]:
    root = existing_path(self.path, "TextFolder(path='...')")
    if not root.is_dir():
      raise ValueError(f'{root} is not a folder; TextFolder(path=...) takes the folder '
                       'of the files.')
    files = _listing(root, root.glob(self.pattern))
    if not files:
      raise ValueError(f'{root} has no files like {self.pattern!r}; see TextFolder(pattern=...).')
    return files


@dataclasses.dataclass(frozen=True)
class Jsonl(DocumentSource):
  """JSON objects, one in each line, in .jsonl, .jsonl.gz or .jsonl.zst: one file or a folder.

  `field` names the field with the text. The domain is in `domain_field` (dots reach into nested
  objects: 'meta.pile_set_name'); without it, it is the first sub-folder, else 'text'.
  """
  path: str = ''
  field: str = 'text'
  domain_field: str = ''

  def documents_from(self, start: int) -> Iterator[Document]:
    before = 0
    for name, file in jsonl_files(self.path, "Jsonl(path='...')"):
      for number, (line, position) in enumerate(text_lines.lines(file), 1):
        # Lines that were done before are decompressed and counted, but not parsed.
        if line.strip():
          start -= 1
          if start < 0:
            yield self._document(line, name, number, file, before + position)
      before += file.stat().st_size

  def size(self) -> int:
    return total_size(jsonl_files(self.path, "Jsonl(path='...')"))

  def fingerprint(self) -> str:
    return files_fingerprint(jsonl_files(self.path, "Jsonl(path='...')"))

  def _document(self, line: bytes, name: str, number: int, file: pathlib.Path,
                position: int) -> Document:
    where = f'{file}, line {number}'
    record = text_lines.json_value(line, where)
    text = _string_at(record, self.field, where, 'field')
    domain = (_string_at(record, self.domain_field, where, 'domain_field')
              if self.domain_field else folder_domain(name))
    return Document(text_lines.whole_characters(text), domain, f'{name}:{number}', position)


@dataclasses.dataclass(frozen=True)
class Tfds(DocumentSource):
  """A TensorFlow Datasets corpus prepared as ArrayRecord; TensorFlow is never imported.

  `name` is 'dataset' or 'dataset/config', either with ':version'; an empty `data_dir` is the
  default of TFDS; `field` is the feature that holds the text. All documents are of the domain
  'text'.
  """
  name: str = ''
  data_dir: str = ''
  split: str = 'train'
  field: str = 'text'

  def documents_from(self, start: int) -> Iterator[Document]:
    builder = self._builder()
    try:
      records = builder.as_data_source(split=self.split)
    except ValueError as error:
      raise ValueError(f'{self!r}: {error}') from None
    size = self.size()
    for index in range(start, len(records)):
      record = records[index]
      text = record.get(self.field)
      if not isinstance(text, (bytes, str)):
        raise ValueError(f'{self!r}: {self.field!r} is not a text feature; '
                         f'the features are: {", ".join(record)}.')
      text = text.decode('utf-8', 'replace') if isinstance(text, bytes) else text
      yield Document(text, 'text', f'{self.split}:{index}', size * (index + 1) // len(records))

  def size(self) -> int:
    try:
      return int(self._builder().info.splits[self.split].num_bytes)
    except (KeyError, ValueError):  # a part of a split: its bytes are not known
      return 0

  def fingerprint(self) -> str:
    info = self._builder().info
    return digest_of([info.full_name] + [(name, split.num_examples, split.num_bytes)
                                       for name, split in sorted(info.splits.items())])

  def _builder(self) -> Any:  # a decorator of TFDS hides the arguments of as_data_source
    if not self.name:
      raise ValueError("Tfds(name='') needs the name of a dataset.")
    # Imported here, since it takes seconds and most runs do not need it.
    from tensorflow_datasets.core import constants, read_only_builder, registered
    folder = self.data_dir or constants.DATA_DIR
    remedy = ('prepare it once with python -m sink_jax.data.build_tfds '
              f'--name={self.name} --data_dir={folder}')
    try:
      # From its files only: tfds.builder would start a download for a known name.
      builder = read_only_builder.builder_from_files(self.name, data_dir=folder)
    except registered.DatasetNotFoundError:
      raise ValueError(f'{self!r}: no prepared dataset in {folder}; {remedy}.') from None
    file_format = builder.info.file_format
    if file_format is None or file_format.value != 'array_record':
      raise ValueError(f'{self!r} is stored as {getattr(file_format, "value", None)}, which '
                       f'needs TensorFlow to read; {remedy} (in a fresh data_dir).')
    return builder


@dataclasses.dataclass(frozen=True)
class PackedDataset(DocumentSource):
  """A folder written by `python -m sink_jax.data.build`, to train where the text is not.

  It only names the folder; `prepare.packed_folder` finds it, and copies one on gs:// to this host
  first, once for all its processes.
  """
  path: str = ''

  def documents(self) -> Iterator[Document]:
    raise ValueError(f'{self!r} holds chunks, not documents: name the source that it was built '
                     'of.')


def existing_path(path: str, option: str) -> pathlib.Path:
  """The path of a corpus on this machine.

  Args:
    option: where the path was given, such as "Jsonl(path='...')", for the error message.

  Raises:
    ValueError: it is empty, in an object store, or does not exist.
  """
  if not path:
    raise ValueError(f'{option} needs the path of the corpus.')
  if '://' in path:
    raise ValueError(f'{option}: {path} is not on a file system; copy it to this machine first '
                     '(gcloud storage cp), or mount the bucket (gcsfuse).')
  root = expanded(path)
  if not root.exists():
    raise ValueError(f'{root} does not exist; check {option}.')
  return root


def jsonl_files(path: str, option: str) -> list[File]:
  """The files of a corpus of JSON lines: one file, or all of a folder; see `existing_path`.

  Raises:
    ValueError: there are none.
  """
  root = existing_path(path, option)
  if root.is_file():
    return [(root.name, root)]
  suffixes = ('.jsonl', '.jsonl.gz', '.jsonl.zst')
  files = _listing(root, (f for f in root.rglob('*') if f.name.endswith(suffixes)))
  if not files:
    raise ValueError(f'{root} has no files ending in {", ".join(suffixes)}.')
  return files


def _listing(root: pathlib.Path, files: Iterable[pathlib.Path]) -> list[File]:
  return sorted((f.relative_to(root).as_posix(), f) for f in files if f.is_file())


def total_size(files: Iterable[File]) -> int:
  """Bytes of all files together."""
  return sum(file.stat().st_size for _, file in files)


def folder_domain(name: str) -> str:
  """The first sub-folder of a file's name in its corpus; 'text' without one."""
  return name.split('/')[0] if '/' in name else 'text'


def _string_at(record: Any, dotted: str, where: str, option: str) -> str:
  value = record
  for key in dotted.split('.'):
    value = value.get(key) if isinstance(value, dict) else None
  if not isinstance(value, str):
    fields = ', '.join(record) if isinstance(record, dict) else 'none (not an object)'
    raise ValueError(f'{where}: no string in the field {dotted!r}; its fields are: {fields}. '
                     f'Set Jsonl({option}=...).')
  return value


def files_fingerprint(files: Iterable[File]) -> str:
  """A digest of the names, sizes and times of change of files."""
  stats = [(name, os.stat(file)) for name, file in files]
  return digest_of([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def digest_of(items: Sequence[Any]) -> str:
  """32 hexadecimal digits of a list whose `repr` is the same in every process."""
  return hashlib.sha256(repr(items).encode()).hexdigest()[:32]
