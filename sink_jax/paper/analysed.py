"""The files of analyses, NAME.json as `sink_jax.cli.analyses` writes them, read back."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import sink_jax
from sink_jax.io.files import read_text_limited
from sink_jax.io.paths import AnyPath, files_below, is_local, to_path
from sink_jax.paper.analysis_fields import FIELDS, check_result
from sink_jax.pretrained.hub import Published, known_model
from sink_jax.report.jsontext import from_json

_REMEDY = ('name the folders or files that python -m sink_jax.analyses NAME '
           '--checkpoint=... --out=... wrote')
# Bounds on what a stranger's files can make a report read and show.
_LARGEST = 1 << 25  # bytes of a file; thirty models with maps take a tenth
_FILES, _RESULTS = 10_000, 1_000
_SHOWN = 10  # names in a line
_NAME, _MESSAGE = 100, 200  # characters


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of an analysis of one model.

  published: the model, where it is one of the paper's. content: as `analysis_fields` checks it.
  """

  analysis: str
  file: str
  date: datetime.datetime
  model: str
  published: Published | None
  content: Mapping[str, Any]

  @property
  def paper_model(self) -> Published:
    """The model of a result that a row or a figure of the paper may show."""
    assert self.published is not None, f'{self.model} is none of the paper\'s models'
    return self.published


@dataclasses.dataclass(frozen=True)
class Failed:
  """A model whose analysis failed."""

  analysis: str
  file: str
  model: str
  published: Published | None
  error: str


class AnalysisModule(Protocol):
  """The module of an analysis, as far as this room needs it."""

  def draw(self, results: list[dict[str, Any]], path: IO[bytes]) -> None: ...

  def rows(self, results: list[dict[str, Any]]) -> list[list[str]]: ...


class Analysis(Protocol):
  """An analysis of `sink_jax.analyses.registry`, a room above this one."""

  @property
  def module(self) -> AnalysisModule: ...


@dataclasses.dataclass(frozen=True)
class Analysed:
  """Results of files.

  files: {name: how it was made}; lines: about the rest; analyses: what draws them, by name.
  """

  results: tuple[Result, ...] = ()
  failed: tuple[Failed, ...] = ()
  files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  lines: tuple[str, ...] = ()
  analyses: Mapping[str, Analysis] = dataclasses.field(default_factory=dict)


def read_analyses(places: Iterable[str], analyses: Mapping[str, Analysis]) -> Analysed:
  """The results in files, and in all .json files in or below folders.

  A file or a result that cannot be used spares the others, and is named in `lines`.

  Args:
    analyses: all there are, by name: `sink_jax.analyses.registry.ANALYSES`.

  Raises:
    ValueError: a place is neither file nor folder, or a folder holds no .json file.
  """
  results: list[Result] = []
  failed: list[Failed] = []
  files, about = {}, {}
  for path, name in _files_of(places):
    try:
      if is_local(path) and not path.is_file():  # a pipe would wait for its other end
        raise ValueError('not a file')
      record = from_json(read_text_limited(path, _LARGEST))
      if not isinstance(record, dict) or record.get('analysis') not in analyses:
        about.setdefault('not of an analysis', []).append(name)
        continue
      analysis = record['analysis']
      contents, failures = _list_of(record, 'results'), _list_of(record, 'failed')
    except (ValueError, TypeError, OSError) as error:
      about.setdefault('damaged', []).append(f'{name} ({_reason(error, path)})')
      continue
    # From here on a fault in one result spares the others of its file.
    files[name] = _made(record)
    if (version := files[name]['versions'].get('sink_jax')) != sink_jax.__version__:
      about.setdefault('version', []).append(f'{name} ({version or "unknown"})')
    # Its results cannot be checked, and no table or figure would show them.
    if analysis not in FIELDS:
      about.setdefault('elsewhere', []).append(name)
      continue
    for content in contents:
      model = printable(content.get('model') or 'a model without a name', _NAME)
      try:
        check_result(analysis, content)
      except ValueError as error:
        about.setdefault('left out', []).append(f'{model} in {name} ({error})')
        continue
      results.append(Result(analysis, name, _date(record), model, _published(content), content))
    for item in failures:
      model = printable(item.get('model'), _NAME)
      failed.append(Failed(analysis, name, model, known_model(model),
                           printable(item.get('error'), _MESSAGE)))
  about['failed'] = [f'{failure.model} in {failure.file} ({failure.error})' for failure in failed]
  about['others'] = [f'{result.model} ({result.file})' for result in results
                     if not result.published]
  return Analysed(tuple(results), tuple(failed), files, tuple(_lines(about)), analyses)


def printable(value: object, most: int) -> str:
  """A text of a file in one line of printable characters, cut to at most so many."""
  # The text may be as large as its file, so it is cut first; to four times the length, as it loses
  # blanks and what cannot be printed.
  words = ' '.join(''.join(c if c.isprintable() else ' ' for c in str(value)[:4 * most]).split())
  return words if len(words) <= most else words[:most - 3] + '...'


def listed(names: Sequence[str]) -> str:
  """The first names, and how many more there are."""
  more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
  return ', '.join(names[:_SHOWN]) + more


def _files_of(places: Iterable[str]) -> list[tuple[AnyPath, str]]:
  """(path, name to show) of every file, each once, however many of the places hold it."""
  files = {}
  for place in places:
    root, typed = to_path(place), Path(place)
    # A path that was typed relative says where a file lies; any other is cut to its last part.
    relative = is_local(root) and not typed.expanduser().is_absolute()
    if root.is_dir():
      paths = _json_files(root)
      if not paths:
        raise ValueError(f'--analyses={place} holds no .json file: {_REMEDY}.')
    elif root.is_file():
      root, typed, paths = root.parent, typed.parent, [root]
    else:
      raise ValueError(f'--analyses={place} is neither a file nor a folder: {_REMEDY}.')
    # The limit holds before any file is read.
    if len(files) + len(paths) > _FILES:
      raise ValueError(f'--analyses={place} holds more than {_FILES:,} .json files: {_REMEDY}.')
    shown = typed if relative else Path(root.name)  # no absolute path goes into a report
    for path in paths:
      # Two places may hold one file, as a folder and a folder in it do.
      real = path.resolve() if is_local(path) else path
      files.setdefault(real, (path, (shown / path.relative_to(root)).as_posix()))
  return [(path, printable(name, 2 * _NAME)) for path, name in files.values()]


def _json_files(root: AnyPath) -> list[AnyPath]:
  """In or below a folder, without following links to folders."""
  if is_local(root):
    return sorted(path for path in root.rglob('*.json') if not path.is_dir())
  return [path for path in files_below(root) if path.name.endswith('.json')]


def _list_of(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
  items = record.get(key)
  if not isinstance(items, list) or len(items) > _RESULTS or not all(
      isinstance(item, dict) for item in items):
    raise ValueError(f'{key} is no list of at most {_RESULTS:,} objects')
  return items


def _made(record: Mapping[str, Any]) -> dict[str, Any]:
  """How a file was made, as text that can be shown."""
  versions = record.get('versions')
  versions = versions if isinstance(versions, dict) else {}
  words = lambda key: printable(record.get(key) or 'unknown', 5 * _MESSAGE)
  return {'analysis': record['analysis'], **{key: words(key) for key in (
      'date', 'command', 'code', 'hardware')}, 'versions': {
          key: printable(versions[key], _NAME) for key in ('sink_jax', 'jax') if key in versions}}


def _date(record: Mapping[str, Any]) -> datetime.datetime:
  """When a file was written; the earliest possible time where it does not say."""
  try:
    date = datetime.datetime.fromisoformat(record.get('date', ''))
  except (TypeError, ValueError):
    date = datetime.datetime.min
  # Dates with and without a time zone cannot be compared, and the newest result is asked for; those
  # without are taken for UTC.
  return date.replace(tzinfo=date.tzinfo or datetime.timezone.utc)


def _published(content: Mapping[str, Any]) -> Published | None:
  """The paper's model; None for a run of sink_jax, which has a step, and for an unknown model."""
  checkpoint, name = content['checkpoint'], content.get('model')
  if checkpoint.get('step') is not None or not isinstance(name, str):
    return None
  if name == checkpoint.get('revision'):  # the folder of a snapshot is called by its revision
    name = (checkpoint.get('folder') or '').removeprefix('models--').replace('--', '/', 1)
  return known_model(name)


def _reason(error: Exception, path: AnyPath) -> str:
  """Why a file cannot be read, without its path, which the line has."""
  words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
  return printable(words.removeprefix(f'{path} is '), _MESSAGE)


def _lines(about: Mapping[str, Sequence[str]]) -> list[str]:
  """A line for each kind of thing that no table or figure shows."""
  words = {
      'not of an analysis': 'Not of an analysis',
      'damaged': 'Damaged, and left out',
      'version': f'Read, but written by another version than {sink_jax.__version__}',
      'elsewhere': 'Of analyses that no table or figure of this page is about',
      'left out': 'Results that cannot be used',
      'failed': 'Models that failed in their analysis'}
  lines = [f'{text}: {listed(about[kind])}.' for kind, text in words.items() if about.get(kind)]
  others = about['others']
  if others:
    verb = 'model is none' if len(others) == 1 else 'models are none'
    lines.append(f'{len(others)} {verb} of the paper\'s: {listed(others)}.')
  return lines
