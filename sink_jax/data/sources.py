"""Where text comes from: a source yields documents, each with a domain and a name."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sink_jax.component import Component
from sink_jax.io.paths import expanded

# The name of a file of a corpus, relative to its folder, and its path.
File = tuple[str, pathlib.Path]


class Part(NamedTuple):
  """A piece of a conversation, which is tokenized separately from its neighbours."""
  text: str | None  # None: the EOS of the tokenizer
  is_answer: bool  # an answer, or what ends one
  is_template: bool  # written by the template; else by the message


class Document(NamedTuple):
  """One text of a corpus, with what decides how it is split and mixed."""
  text: str
  domain: str
  name: str  # documents of one name fall into the same split
  parts: tuple[Part, ...] = ()  # of a conversation, whose `text` they make up


@dataclasses.dataclass(frozen=True)
class Source(Component):
  """A document corpus or a synthetic task: `from_string(Source, 'Stdlib()')` takes either."""


@dataclasses.dataclass(frozen=True)
class DocumentSource(Source):
  """A corpus: an ordered stream of documents, which is the same whenever it is read."""

  abstract = True

  @property
  def answers_only(self) -> bool:
    """Whether the loss counts only the answers of conversations."""
    return False

  @property
  def drops_long(self) -> bool:
    """Whether conversations that are longer than a row are left out."""
    return False

  def documents(self, start: int = 0) -> Iterator[Document]:
    """All documents in their order, but for the first `start`, which a stopped build has done."""
    raise NotImplementedError

  def held_out(self, name: str, fraction: float) -> bool:
    """Whether the documents of this name are for validation: a stable hash of it decides.

    A document stays on its side when others are added, and a larger fraction holds out the same
    documents and more.
    """
    # 'replace': the name of a file that is not UTF-8 has surrogates, which cannot be encoded.
    digest = hashlib.blake2b(name.encode('utf-8', 'replace'), digest_size=8).digest()
    return int.from_bytes(digest, 'big') < fraction * 2**64

  def fingerprint(self) -> str:
    """A cheap string that changes when the corpus does: of names, sizes and times of change."""
    raise NotImplementedError

  def remarks(self) -> list[str]:
    """What a person should know about the documents, a line each."""
    return []


@dataclasses.dataclass(frozen=True)
class TextFolder(DocumentSource):
  """Text files in UTF-8, a document each; the first sub-folder is the domain, else 'text'."""
  path: str = ''
  pattern: str = '**/*.txt'

  def documents(self, start: int = 0) -> Iterator[Document]:
    for name, file in self._files()[start:]:
      try:
        text = file.read_bytes().decode('utf-8')
      except UnicodeDecodeError as error:
        raise ValueError(f'{file}: not UTF-8 at byte {error.start}; convert it (iconv -t UTF-8), or '
                         'exclude it by TextFolder(pattern=...).') from None
      yield Document(text, _folder_domain(name), name)

  def fingerprint(self) -> str:
    return files_fingerprint(self._files())

  def remarks(self) -> list[str]:
    others = sum(f.is_file() for f in self._root().rglob('*')) - len(self._files())
    return [f'{self.path}: {others} files are not like {self.pattern!r} and are left out; '
            "TextFolder(pattern='**/*.md') would read others."] if others else []

  def _root(self) -> pathlib.Path:
    return existing_path(self.path, 'TextFolder')

  def _files(self) -> list[File]:
    files = _listing(self._root(), self._root().glob(self.pattern))
    if not files:
      raise ValueError(f'{self.path} is not a folder with files like {self.pattern!r}; see '
                       'TextFolder(pattern=...).')
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

  def documents(self, start: int = 0) -> Iterator[Document]:
    for file, number, line in itertools.islice(json_lines(self.path, 'Jsonl'), start, None):
      where, record = f'{file[1]}, line {number}', parsed(line, file[1], number)
      domain = (_string_at(record, self.domain_field, where) if self.domain_field
                else _folder_domain(file[0]))
      text = whole_characters(_string_at(record, self.field, where))
      yield Document(text, domain, f'{file[0]}:{number}')

  def fingerprint(self) -> str:
    return files_fingerprint(jsonl_files(self.path, 'Jsonl'))


@dataclasses.dataclass(frozen=True)
class Tfds(DocumentSource):
  """A dataset of TensorFlow Datasets, which is downloaded and prepared as ArrayRecord if it must be.

  `name` is 'dataset' or 'dataset/config', either with ':version'; an empty `data_dir` is the
  default of TFDS; `field` is the feature that holds the text. All documents are of the domain
  'text'. Reading does not import TensorFlow; the code of some datasets does when it prepares them.
  """
  name: str = ''
  data_dir: str = ''
  split: str = 'train'
  field: str = 'text'

  def documents(self, start: int = 0) -> Iterator[Document]:
    try:
      records = self._builder().as_data_source(split=self.split)
    except ValueError as error:
      raise ValueError(f'{self!r}: {error}') from None
    for index in range(start, len(records)):
      text = records[index].get(self.field)
      if not isinstance(text, (bytes, str)):
        raise ValueError(f'{self!r}: {self.field!r} is not a text feature; '
                         f'the features are: {", ".join(records[index])}.')
      text = text.decode('utf-8', 'replace') if isinstance(text, bytes) else text
      yield Document(text, 'text', f'{self.split}:{index}')

  def fingerprint(self) -> str:
    info = self._builder().info
    return digest_of([info.full_name] + [(name, split.num_examples, split.num_bytes)
                                         for name, split in sorted(info.splits.items())])

  def _builder(self) -> Any:  # a decorator of TFDS hides the arguments of as_data_source
    # Imported here, since it takes seconds and most runs do not need it.
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import constants, read_only_builder
    folder = expanded(self.data_dir or constants.DATA_DIR)
    try:
      builder = read_only_builder.builder_from_files(self.name, data_dir=folder)
    except ValueError:  # not there
      try:
        builder = tfds.builder(self.name, data_dir=folder, file_format='array_record', try_gcs=False)
        builder.download_and_prepare()
      except (ImportError, ValueError, RuntimeError, AssertionError) as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]  # of a page, at times
        raise ValueError(f'{self!r} cannot be prepared here ({reason}): prepare it where TensorFlow is '
                         'installed, or take the text as HubDataset or Jsonl.') from None
    file_format = builder.info.file_format
    if file_format is None or file_format.value != 'array_record':
      raise ValueError(f'{self!r} is stored as {file_format and file_format.value}, which needs '
                       'TensorFlow to read: set another Tfds(data_dir=...).')
    return builder


@dataclasses.dataclass(frozen=True)
class HubDataset(DocumentSource):
  """A dataset of the Hugging Face hub, or a folder of its files, by the package `datasets`.

  `path` and `name` are those of `datasets.load_dataset`, such as 'roneneldan/TinyStories' and '';
  `field` is the column that holds the text. All documents are of the domain 'text'.
  """
  path: str = ''
  name: str = ''
  split: str = 'train'
  field: str = 'text'

  def documents(self, start: int = 0) -> Iterator[Document]:
    records = self._records()
    if self.field not in records.column_names:
      raise ValueError(f'{self!r}: no column {self.field!r}; the columns are: '
                       f'{", ".join(records.column_names)}.')
    for index in range(start, len(records)):
      yield Document(whole_characters(records[index][self.field]), 'text', f'{self.split}:{index}')

  def fingerprint(self) -> str:
    return files_fingerprint((file['filename'], file['filename'])
                             for file in self._records().cache_files)

  def _records(self) -> Any:
    try:
      datasets = importlib.import_module('datasets')
    except ImportError:
      raise ValueError(f'{self!r} needs the package datasets: pip install "sink_jax[hub]".') from None
    try:
      return datasets.load_dataset(self.path, self.name or None, split=self.split)
    except (ValueError, OSError) as error:
      raise ValueError(f'{self!r}: {" ".join(str(error).split())[:300]}') from None


@dataclasses.dataclass(frozen=True)
class PackedDataset(DocumentSource):
  """A folder that `python -m sink_jax data_build` wrote, on a disk or gs://, to train from in place.

  Its manifest says which tokenizer, context, BOS and EOS it has.
  """
  path: str = ''

  def documents(self, start: int = 0) -> Iterator[Document]:
    raise ValueError(f'{self!r} holds rows of tokens, not documents: name the source that it was '
                     'built from.')


def existing_path(path: str, source: str) -> pathlib.Path:
  """The path of a corpus on this machine.

  Raises:
    ValueError: it is empty, in an object store, or does not exist; names the source.
  """
  if '://' in path:
    raise ValueError(f"{source}(path={path!r}) is not on a disk: copy the text here, or build where "
                     'it is (python -m sink_jax data_build) and train with PackedDataset.')
  root = expanded(path)
  if not path or not root.exists():
    raise ValueError(f"{source}(path={path!r}) does not exist: set --config.data.source="
                     f"\"{source}(path='...')\"; BUILD.md says where the paper's corpora come from.")
  return root


def jsonl_files(path: str, source: str) -> list[File]:
  """The files of a corpus of JSON lines: one file, or all of a folder; see `existing_path`."""
  root = existing_path(path, source)
  if root.is_file():
    return [(root.name, root)]
  suffixes = ('.jsonl', '.jsonl.gz', '.jsonl.zst')
  files = _listing(root, (f for f in root.rglob('*') if f.name.endswith(suffixes)))
  if not files:
    raise ValueError(f'{root} has no files ending in {", ".join(suffixes)}.')
  return files


def json_lines(path: str, source: str) -> Iterator[tuple[File, int, bytes]]:
  """Yields (file, line number from 1, line) of all lines of a corpus that are not blank.

  Raises:
    ValueError: there are no files, or a compressed one is damaged or ends early.
  """
  for file in jsonl_files(path, source):
    with _opened(file[1]) as lines:
      try:
        for number, line in enumerate(lines, 1):
          if line.strip():
            yield file, number, line
      except Exception as error:  # of gzip, zlib, zstd or the disk
        raise ValueError(f'{file[1]}: damaged or truncated ({error}); copy it again.') from None


def parsed(line: bytes, file: pathlib.Path, number: int) -> Any:
  """The value of a line of JSON; a ValueError names the file and the line."""
  try:
    return json.loads(line)
  except (ValueError, RecursionError) as error:  # among them JSONDecodeError, UnicodeDecodeError
    raise ValueError(f'{file}, line {number}: not JSON in UTF-8 ({error}); if it is the last line, the '
                     'file is truncated: copy it again.') from None


def whole_characters(text: str) -> str:
  """The text with a replacement character for half a surrogate pair, which JSON escapes can spell."""
  try:
    text.encode()
    return text
  except UnicodeEncodeError:
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def files_fingerprint(files: Iterable[tuple[str, str | pathlib.Path]]) -> str:
  """A digest of the names, sizes and times of change of files."""
  stats = [(name, os.stat(file)) for name, file in files]
  return digest_of([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def digest_of(items: Sequence[Any]) -> str:
  """32 hexadecimal digits of a list whose `repr` is the same in every process."""
  return hashlib.sha256(repr(items).encode()).hexdigest()[:32]


def _opened(path: pathlib.Path) -> Any:
  if path.suffix == '.zst':
    from backports import zstd  # other files do not need it
    return zstd.open(path)
  return gzip.open(path) if path.suffix == '.gz' else open(path, 'rb')


def _listing(root: pathlib.Path, files: Iterable[pathlib.Path]) -> list[File]:
  return sorted((f.relative_to(root).as_posix(), f) for f in files if f.is_file())


def _folder_domain(name: str) -> str:
  """The first sub-folder of a file's name in its corpus; 'text' without one."""
  return name.split('/')[0] if '/' in name else 'text'


def _string_at(record: Any, dotted: str, where: str) -> str:
  value = record
  for key in dotted.split('.'):
    value = value.get(key) if isinstance(value, dict) else None
  if not isinstance(value, str):
    fields = ', '.join(record) if isinstance(record, dict) else 'none (not an object)'
    raise ValueError(f'{where}: no text in {dotted!r}; its fields are: {fields}. Set Jsonl(field=...) or '
                     'Jsonl(domain_field=...).')
  return value
