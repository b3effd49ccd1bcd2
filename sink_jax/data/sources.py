"""Where text comes from: a source yields documents, each with a domain and a name."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from fsspec.compression import compr
from fsspec.utils import infer_compression

from sink_jax.component import Component
from sink_jax.io.files import WrongContent, check_downloaded, check_start, decoded
from sink_jax.io.paths import expanded

JSONL = ('.jsonl', '.jsonl.gz', '.jsonl.zst')  # what names of files of JsonLines end with
# The name of a file of a corpus, relative to its folder, and its path.
File = tuple[str, pathlib.Path]


class Part(NamedTuple):
  """A piece of a conversation, which is tokenized separately from its neighbours."""

  text: str
  is_answer: bool  # an answer, or what ends one
  is_template: bool  # written by the template, in which '{eos}' is the EOS; else by the message


class Document(NamedTuple):
  """One text of a corpus, with what decides how it is split and mixed."""

  text: str
  domain: str
  name: str  # documents of one name fall into the same split
  parts: tuple[Part, ...] = ()  # of a conversation, whose `text` they make up


class Source(Component):
  """A document corpus or a synthetic task: `from_string(Source, 'Stdlib()')` takes either."""


class DocumentSource(Source):
  """A corpus: an ordered stream of documents, which is the same whenever it is read."""

  abstract = True
  # Without an annotation it is not a field.
  answers_only = False  # whether the loss counts only the answers of conversations

  def documents(self, start: int = 0) -> Iterator[Document]:
    """All documents in their order, except the first `start`, which a stopped build has done."""
    raise NotImplementedError

  def held_out(self, name: str, fraction: float) -> bool:
    """True if the documents of this name are for validation: a stable hash of the name decides.

    A document stays on its side when others are added, and a larger fraction holds out the same
    documents and more.
    """
    # 'replace': the name of a file that is not UTF-8 has surrogates, which cannot be encoded.
    digest = hashlib.blake2b(name.encode('utf-8', 'replace'), digest_size=8).digest()
    return int.from_bytes(digest, 'big') < fraction * 2**64

  def fingerprint(self) -> str:
    """A cheap string that changes with the corpus: from names, sizes and modification times."""
    raise NotImplementedError


class TextFolder(DocumentSource):
  """Text files in UTF-8, a document each; the first sub-folder is the domain, else 'text'.

  `pattern` may also name compressed files, such as '**/*.txt.gz'. A byte order mark at the
  start of a file is not part of its text.
  """

  path: str = ''
  pattern: str = '**/*.txt'

  def documents(self, start: int = 0) -> Iterator[Document]:
    for name, file in self._files()[start:]:
      with _opened(file) as content:
        data = content.read()
      yield Document(decoded(data, file), _folder_domain(name), name)

  def fingerprint(self) -> str:
    return files_fingerprint(self._files())

  def _files(self) -> list[File]:
    root = existing_path(self.path, 'TextFolder')
    files = listing(root, root.glob(self.pattern))
    if not files:
      raise ValueError(
        f'{self.path} is not a folder with files like {self.pattern!r}; see '
        'TextFolder(pattern=...).'
      )
    return files


class JsonLines(DocumentSource):
  """A document for each line of .jsonl, .jsonl.gz or .jsonl.zst: one file, or all of a folder."""

  abstract = True
  path: str = ''

  def documents(self, start: int = 0) -> Iterator[Document]:
    read = self._reader()
    for (name, file), number, line in itertools.islice(self._lines(), start, None):
      try:
        document = read(json.loads(line), _folder_domain(name), f'{name}:{number}')
      except (ValueError, RecursionError) as error:
        raise ValueError(f'{file}, line {number}: {error}') from None
      yield document

  def fingerprint(self) -> str:
    return files_fingerprint(self._files())

  def _reader(self) -> Callable[[Any, str, str], Document]:
    """Makes a document of (value of a line, sub-folder, name); a ValueError says what is wrong."""
    raise NotImplementedError

  def _files(self) -> list[File]:
    root = existing_path(self.path, type(self).__name__)
    if root.is_file():
      return [(root.name, root)]
    files = listing(root, (f for f in root.rglob('*') if f.name.endswith(JSONL)))
    if not files:
      raise ValueError(f'{root} has no files ending in {", ".join(JSONL)}.')
    return files

  def _lines(self) -> Iterator[tuple[File, int, bytes]]:
    """(file, line number from 1, line) of all lines that are not blank."""
    for file in self._files():
      with _opened(file[1]) as lines:
        for number, line in enumerate(lines, 1):
          if number == 1:
            check_start(line, file[1])
          if line.strip():
            yield file, number, line


class Jsonl(JsonLines):
  """JSON objects, one in each line, in .jsonl, .jsonl.gz or .jsonl.zst: one file or a folder.

  `field` names the field with the text. The domain is in `domain_field` (dots reach into nested
  objects: 'meta.pile_set_name'); without it, it is the first sub-folder, else 'text'.
  """

  field: str = 'text'
  domain_field: str = ''

  def _reader(self) -> Callable[[Any, str, str], Document]:
    return lambda record, folder, name: Document(
      _string_at(record, self.field),
      _string_at(record, self.domain_field) if self.domain_field else folder,
      name,
    )


class Tfds(DocumentSource):
  """A dataset of TensorFlow Datasets, which is downloaded and prepared as ArrayRecord if needed.

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
    except (ValueError, NotImplementedError) as error:  # no such split; stored as TFRecord
      raise ValueError(f'{self!r}: {" ".join(str(error).split())}') from None
    return _documents_of(self, records, start)

  def fingerprint(self) -> str:
    info = self._builder().info
    return digest_of(
      [info.full_name]
      + [(name, split.num_examples, split.num_bytes) for name, split in sorted(info.splits.items())]
    )

  def _builder(self) -> Any:  # a decorator of TFDS hides the arguments of as_data_source
    # Imported here, since it takes seconds and most runs do not need it.
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import constants, read_only_builder

    folder = expanded(self.data_dir or constants.DATA_DIR)
    try:
      builder = read_only_builder.builder_from_files(self.name, data_dir=folder)
    except ValueError:  # not there
      try:
        builder = tfds.builder(
          self.name, data_dir=folder, file_format='array_record', try_gcs=False
        )
        builder.download_and_prepare()
      except (ImportError, ValueError, RuntimeError, AssertionError) as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]  # it may be as long as a page
        raise ValueError(
          f'{self!r} cannot be prepared here ({reason}): prepare it where '
          'TensorFlow is installed, or take the text as HubDataset or '
          'Jsonl.'
        ) from None
    return builder


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
    return _documents_of(self, self._records(), start)

  def fingerprint(self) -> str:
    return files_fingerprint(
      (file['filename'], file['filename']) for file in self._records().cache_files
    )

  def _records(self) -> Any:
    try:
      datasets = importlib.import_module('datasets')
    except ImportError:
      raise ValueError(
        f'{self!r} needs the package datasets: pip install "sink_jax[hub]".'
      ) from None
    try:
      records = datasets.load_dataset(self.path, self.name or None, split=self.split)
      return records.select_columns(self.field)
    except (ValueError, OSError) as error:  # which may pass
      raise ValueError(f'{self!r}: {" ".join(str(error).split())[:300]}') from error


class PackedDataset(DocumentSource):
  """A folder that `python -m sink_jax data_build` wrote, on a disk or gs://, read in place.

  Its manifest says which tokenizer, context, BOS and EOS it has.
  """

  path: str = ''

  def documents(self, start: int = 0) -> Iterator[Document]:
    raise ValueError(
      f'{self!r} holds rows of tokens, not documents: name the source that it was built from.'
    )


def existing_path(path: str, source: str) -> pathlib.Path:
  """The path of a corpus on this machine.

  Raises:
    ValueError: it is empty, in an object store, or does not exist; names the source.
  """
  root = expanded(path)
  if not path or not root.exists():
    raise ValueError(
      f'{source}(path={path!r}) is not on a disk of this machine: set '
      f'--config.data.source="{source}(path=\'...\')", or train with PackedDataset '
      'and build where the text is (python -m sink_jax data_build); '
      "docs/experiments.md says where the paper's corpora come from."
    )
  return root


def files_fingerprint(files: Iterable[tuple[str, str | pathlib.Path]]) -> str:
  """A digest of the names, sizes and modification times of files."""
  stats = [(name, os.stat(file)) for name, file in files]
  return digest_of([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def digest_of(items: Sequence[Any]) -> str:
  """32 hexadecimal digits of a list whose `repr` is the same in every process."""
  return hashlib.sha256(repr(items).encode()).hexdigest()[:32]


def listing(root: pathlib.Path, files: Iterable[pathlib.Path]) -> list[File]:
  """The files that exist, with their names relative to a folder, sorted by name."""
  return sorted((f.relative_to(root).as_posix(), f) for f in files if f.is_file())


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[BinaryIO]:
  """The content of a file, decompressed if its name ends with .gz or .zst; damage is named."""
  try:
    check_downloaded(file)
    with file.open('rb') as stored:
      decompress = compr[infer_compression(file.name)]  # pyright: ignore[reportArgumentType]
      yield decompress(stored, mode='rb')
  except WrongContent:
    raise
  except Exception as error:  # of gzip, zlib, zstd or the disk
    raise ValueError(f'{file}: damaged or truncated ({error}); copy it again.') from None


def _folder_domain(name: str) -> str:
  """The first sub-folder of a file's name in its corpus; 'text' without one."""
  return name.split('/')[0] if '/' in name else 'text'


def _documents_of(
  source: Tfds | HubDataset, records: Sequence[Any], start: int
) -> Iterator[Document]:
  for index in range(start, len(records)):
    text = records[index].get(source.field)
    text = text.decode('utf-8', 'replace') if isinstance(text, bytes) else text
    if not isinstance(text, str):
      raise ValueError(
        f'{source!r}: no text in {source.field!r} of record {index}; its fields '
        f'are: {", ".join(records[index])}.'
      )
    yield Document(text, 'text', f'{source.split}:{index}')


def _string_at(record: Any, dotted: str) -> str:
  value = record
  for key in dotted.split('.'):
    value = value.get(key) if isinstance(value, dict) else None
  if not isinstance(value, str):
    fields = ', '.join(record) if isinstance(record, dict) else 'none (not an object)'
    raise ValueError(
      f'no text in {dotted!r}; its fields are: {fields}. Set Jsonl(field=...) or '
      'Jsonl(domain_field=...).'
    )
  return value
