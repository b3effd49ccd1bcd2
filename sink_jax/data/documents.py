"""Where text comes from: a source yields documents, each with a domain and a name."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import sys
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

from sink_jax.data import stdlib_modules, text_lines
from sink_jax.data.source import Source
from sink_jax.io.paths import expanded


class Document(NamedTuple):
  text: str
  domain: str
  name: str  # documents of one name fall into the same split
  position: int = 0  # bytes of the source up to the end of this document


@dataclasses.dataclass(frozen=True)
class DocumentSource(Source):
  """A corpus: an ordered, repeatable stream of documents.

  A subclass has `documents`, or `documents_from` where it can begin in the middle.
  """

  abstract = True

  def documents(self) -> Iterator[Document]:
    return self.documents_from(0)

  def documents_from(self, start: int) -> Iterator[Document]:
    """All but the first `start` documents."""
    return itertools.islice(self.documents(), start, None)

  def held_out(self, name: str, fraction: float) -> bool:
    """Whether the documents of this name are for validation, of which there is a fraction."""
    return held_out(name, fraction)

  def size(self) -> int:
    """Bytes that `Document.position` grows to; 0 where that is not known."""
    return 0

  def fingerprint(self) -> str:
    """A cheap string that changes when the corpus does; it does not read the text."""
    raise NotImplementedError


def held_out(name: str, fraction: float) -> bool:
  """Whether a stable hash of the name is in this fraction of all hashes."""
  digest = hashlib.blake2b(name.encode('utf-8', 'replace'), digest_size=8).digest()
  return int.from_bytes(digest, 'big') < fraction * 2**64


@dataclasses.dataclass(frozen=True)
class Stdlib(DocumentSource):
  """The running Python's standard library, without its tests: text that is always there.

  Two domains. 'code': each module's source. 'docs': the docstrings of each module
  and of each of its top-level definitions (with the methods inside), a document
  each. Both carry the module as their name, so that they are held out together.
  `max_files` > 0 takes that many modules only. `split`: 'content' holds out groups of modules
  that are near copies of each other, so that 2 % of the held-out windows of 64 characters are
  also trained on. With 'name', as older runs split, 15 to 20 % are.
  """
  domains: str = 'code,docs'
  max_files: int = 0
  split: str = 'name'

  def __post_init__(self):
    unknown = set(self._domains()) - {'code', 'docs'}
    if unknown or not self.domains:
      raise ValueError(f"Stdlib(domains={self.domains!r}): choose 'code', 'docs' or 'code,docs'.")
    if self.max_files < 0:
      raise ValueError(f'Stdlib(max_files={self.max_files}) must be 0 (all) or more.')
    if self.split not in ('name', 'content'):
      raise ValueError(f"Stdlib(split={self.split!r}): choose 'content', or 'name' for the split "
                       'of older runs.')

  def __repr__(self):
    # Caches of older runs are found by this text.
    split = '' if self.split == 'name' else f', split={self.split!r}'
    return f'Stdlib(domains={self.domains!r}, max_files={self.max_files}{split})'

  def documents(self):
    position = 0
    for name, path in self._modules():
      position += path.stat().st_size
      text = stdlib_modules.read(path)
      if 'code' in self._domains():
        yield Document(text, 'code', name, position)
      if 'docs' in self._domains():
        for docstrings in stdlib_modules.docstrings(text):
          yield Document(docstrings, 'docs', name, position)

  def held_out(self, name, fraction):
    if self.split == 'name':
      return super().held_out(name, fraction)
    return name in stdlib_modules.held_out(_stdlib_root(), self.max_files, fraction)

  def size(self):
    return _total_size(self._modules())

  def fingerprint(self):
    return _digest([sys.version] + [(name, path.stat().st_size) for name, path in self._modules()])

  def _domains(self):
    return self.domains.split(',')

  def _modules(self):
    modules = stdlib_modules.modules(_stdlib_root(), self.max_files)
    if not modules:
      raise ValueError(f'{_stdlib_root()} holds no .py files (a zipped or stripped Python?); '
                       "use another source, such as TextFolder(path='...').")
    return modules


def _stdlib_root():
  return pathlib.Path(sysconfig.get_paths()['stdlib'])


@dataclasses.dataclass(frozen=True)
class TextFolder(DocumentSource):
  """UTF-8 text files, a document each; the first sub-folder is the domain, else 'text'."""
  path: str = ''
  pattern: str = '**/*.txt'

  def documents_from(self, start):
    files = self._files()
    position = _total_size(files[:start])
    for name, file in files[start:]:
      position += file.stat().st_size
      try:
        text = file.read_bytes().decode('utf-8')
      except UnicodeDecodeError as error:
        raise ValueError(f'{file}: not valid UTF-8 at byte {error.start}; convert it '
                         '(iconv -t UTF-8), or exclude it by TextFolder(pattern=...).') from None
      yield Document(text, _folder_domain(name), name, position)

  def size(self):
    return _total_size(self._files())

  def fingerprint(self):
    return _files_fingerprint(self._files())

  def _files(self):
    root = existing_path(self.path, "TextFolder(path='...')")
    if not root.is_dir():
      raise ValueError(f'{root} is not a folder; TextFolder(path=...) takes the folder '
                       'of the files.')
    found = _listing(root, root.glob(self.pattern))
    if not found:
      raise ValueError(f'{root} has no files like {self.pattern!r}; see TextFolder(pattern=...).')
    return found


@dataclasses.dataclass(frozen=True)
class Jsonl(DocumentSource):
  """One JSON object a line, in .jsonl, .jsonl.gz or .jsonl.zst: one file or a folder.

  `field` holds the text. The domain is `domain_field` (dots reach into nested
  objects: 'meta.pile_set_name'), else the first sub-folder, else 'text'.
  """
  path: str = ''
  field: str = 'text'
  domain_field: str = ''

  def documents_from(self, start):
    before = 0
    for name, file in self._files():
      for number, (line, position) in enumerate(text_lines.lines(file), 1):
        if line.strip():
          start -= 1
          if start < 0:
            yield self._document(line, name, number, file, before + position)
      before += file.stat().st_size

  def size(self):
    return _total_size(self._files())

  def fingerprint(self):
    return _files_fingerprint(self._files())

  def _document(self, line, name, number, file, position):
    where = f'{file}, line {number}'
    try:
      record = json.loads(line)
    except UnicodeDecodeError as error:
      raise ValueError(f'{where}: not UTF-8 at byte {error.start}: iconv -t UTF-8.') from None
    except (ValueError, RecursionError) as error:  # among them JSONDecodeError
      raise ValueError(f'{where}: not a JSON object ({error}); a last line that fails means a '
                       'truncated file: copy it again, or remove the line.') from None
    text = _string_at(record, self.field, where, 'field')
    domain = (_string_at(record, self.domain_field, where, 'domain_field')
              if self.domain_field else _folder_domain(name))
    try:
      text.encode()
    except UnicodeEncodeError:  # JSON escapes can spell half a surrogate pair
      text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    return Document(text, domain, f'{name}:{number}', position)

  def _files(self):
    root = existing_path(self.path, "Jsonl(path='...')")
    if root.is_file():
      return [(root.name, root)]
    suffixes = ('.jsonl', '.jsonl.gz', '.jsonl.zst')
    found = _listing(root, (f for f in root.rglob('*') if f.name.endswith(suffixes)))
    if not found:
      raise ValueError(f'{root} has no files ending in {", ".join(suffixes)}.')
    return found


@dataclasses.dataclass(frozen=True)
class Tfds(DocumentSource):
  """A TensorFlow Datasets corpus prepared as ArrayRecord; TensorFlow is never imported.

  `name` is 'dataset', 'dataset/config' or with ':version'; an empty `data_dir` is
  the TFDS default; `field` is the text feature. One domain: 'text'.
  """
  name: str = ''
  data_dir: str = ''
  split: str = 'train'
  field: str = 'text'

  def documents_from(self, start):
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

  def size(self):
    try:
      return int(self._builder().info.splits[self.split].num_bytes)
    except (KeyError, ValueError):  # a part of a split: its bytes are not known
      return 0

  def fingerprint(self):
    info = self._builder().info
    return _digest([info.full_name] + [(name, split.num_examples, split.num_bytes)
                                       for name, split in sorted(info.splits.items())])

  def _builder(self):
    if not self.name:
      raise ValueError("Tfds(name='') needs the name of a dataset.")
    import tensorflow_datasets as tfds
    folder = self.data_dir or tfds.core.constants.DATA_DIR
    remedy = ('prepare it once with python -m sink_jax.data.build_tfds '
              f'--name={self.name} --data_dir={folder}')
    try:
      # From its files only: tfds.builder would start a download for a known name.
      builder = tfds.core.read_only_builder.builder_from_files(self.name, data_dir=folder)
    except tfds.core.registered.DatasetNotFoundError:
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

  def documents(self):
    raise ValueError(f'{self!r} holds chunks, not documents; give build the original source.')


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


def _listing(root, files):
  return sorted((f.relative_to(root).as_posix(), f) for f in files if f.is_file())


def _total_size(files):
  return sum(file.stat().st_size for _, file in files)


def _folder_domain(name):
  return name.split('/')[0] if '/' in name else 'text'


def _string_at(record, dotted, where, option):
  value = record
  for key in dotted.split('.'):
    value = value.get(key) if isinstance(value, dict) else None
  if not isinstance(value, str):
    fields = ', '.join(record) if isinstance(record, dict) else 'none (not an object)'
    raise ValueError(f'{where}: no string in the field {dotted!r}; its fields are: {fields}. '
                     f'Set Jsonl({option}=...).')
  return value


def _files_fingerprint(files):
  stats = [(name, os.stat(file)) for name, file in files]
  return _digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def _digest(items):
  return hashlib.sha256(repr(items).encode()).hexdigest()[:32]
