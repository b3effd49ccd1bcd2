"""The files of analyses, NAME.json as `sink_jax.cli.analyses` writes them, read back."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import sink_jax
from sink_jax.io.files import read_text_limited
from sink_jax.io.paths import AnyPath, files_named, is_local, to_path
from sink_jax.paper.open_protocol import EXPECTED, Result, check_result, printable, results_of
from sink_jax.pretrained.hub import Published, known_model
from sink_jax.report.jsontext import from_json

_REMEDY = ('name the folders or files that python -m sink_jax analyses NAME '
           '--checkpoint=... --out=... wrote')
# Bounds on what a stranger's files can make a report read and show.
_LARGEST = 1 << 25  # bytes of a file; thirty models with maps take a tenth
_FILES, _RESULTS = 10_000, 1_000
_SHOWN = 10  # names in a line
NOT_RUN = 'not run'
_NAME, _MESSAGE = 100, 200  # characters
# What no table or figure shows is named in a line of its kind.
_LINES = {
    'not of an analysis': 'Not of an analysis',
    'damaged': 'Damaged, and left out',
    'version': f'Read, but written by another version than {sink_jax.__version__}',
    'elsewhere': 'Of analyses that no table or figure of this page is about',
    'left out': 'Results that cannot be used',
    'failed': 'Models that failed in their analysis',
    'others': "{} none of the paper's"}


class AnalysisModule(Protocol):
  """The module of an analysis of `sink_jax.analyses.registry`, a room above this one."""

  def draw(self, results: list[dict[str, Any]], path: IO[bytes]) -> None: ...

  def rows(self, results: list[dict[str, Any]]) -> list[list[str]]: ...


@dataclasses.dataclass(frozen=True)
class Analysed:
  """Results of files.

  failed: {(analysis, model of the paper): why}; files: {name: how it was made}; lines: about the
  rest; modules: what draws an analysis, by its name.
  """

  results: list[Result] = dataclasses.field(default_factory=list)
  failed: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
  files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  lines: list[str] = dataclasses.field(default_factory=list)
  modules: Mapping[str, AnalysisModule] = dataclasses.field(default_factory=dict)

  def of(self, analysis: str, models: Collection[str] | None) -> list[Result]:
    """The results of an analysis of these models; None: of all."""
    return [result for result in self.results if result.analysis == analysis
            and (models is None or result.model.name in models)]

  def absent(self, analysis: str, models: Iterable[str], shown: Sequence[Result]) -> dict[str, str]:
    """Why each of these models has none among the results that are shown."""
    there = {result.model.name for result in shown}
    return {model: self.failed.get((analysis, model), NOT_RUN) for model in models
            if model not in there}


def read_analyses(places: Iterable[str], modules: Mapping[str, AnalysisModule]) -> Analysed:
  """The results in files, and in all .json files in or below folders.

  A file or a result that cannot be used spares the others, and is named in `lines`.

  Args:
    modules: of all analyses there are, by name.

  Raises:
    ValueError: a place is neither file nor folder, or a folder holds no .json file.
  """
  found = Analysed(modules=modules)
  about: dict[str, list[str]] = {kind: [] for kind in _LINES}
  for path, name in _files_of(places):
    try:
      if is_local(path) and not path.is_file():  # a pipe would wait for its other end
        raise ValueError('not a file')
      record = from_json(read_text_limited(path, _LARGEST))
      if not isinstance(record, dict) or record.get('analysis') not in modules:
        about['not of an analysis'].append(name)
        continue
      contents, failures = _list_of(record, 'results'), _list_of(record, 'failed')
    except (ValueError, TypeError, OSError) as error:
      words = isinstance(error, OSError) and error.strerror or str(error)
      reason = printable(words.removeprefix(f'{path} is '), _MESSAGE)  # the line has the path
      about['damaged'].append(f'{name} ({reason})')
      continue
    # From here on a fault in one result spares the others of its file.
    analysis, made = record['analysis'], _made(record)
    found.files[name] = made
    if (version := made['versions'].get('sink_jax')) != sink_jax.__version__:
      about['version'].append(f'{name} ({version or "unknown"})')
    # Its results cannot be checked, and no table or figure would show them.
    if analysis not in EXPECTED:
      about['elsewhere'].append(name)
      continue
    for content in contents:
      model = printable(content.get('model') or 'a model without a name', _NAME)
      try:
        check_result(analysis, content)
      except ValueError as error:
        about['left out'].append(f'{model} in {name} ({error})')
        continue
      if published := _published(content):
        date = _time(made['date'])
        found.results.extend(results_of(analysis, name, date, published, content))
      else:
        about['others'].append(f'{model} ({name})')
    for item in failures:
      model, error = printable(item.get('model'), _NAME), printable(item.get('error'), _MESSAGE)
      about['failed'].append(f'{model} in {name} ({error})')
      if published := known_model(model):
        found.failed.setdefault((analysis, published.name), f'failed: {error} ({name})')
  others = len(about['others'])
  models = f'{others} model is' if others == 1 else f'{others} models are'
  found.lines.extend(f'{_LINES[kind].format(models)}: {listed(names)}.'
                     for kind, names in about.items() if names)
  return found


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
      paths = [path for path in files_named(root, ['*.json'])
               if not (is_local(path) and path.is_dir())]
    elif root.is_file() and root.suffix != '.json':
      raise ValueError(f'--analyses={place} is no .json file: {_REMEDY}.')
    elif root.is_file():
      root, typed, paths = root.parent, typed.parent, [root]
    else:
      raise ValueError(f'--analyses={place} is neither a file nor a folder: {_REMEDY}.')
    if not paths:
      raise ValueError(f'--analyses={place} holds no .json file: {_REMEDY}.')
    # The limit holds before any file is read.
    if len(files) + len(paths) > _FILES:
      raise ValueError(f'--analyses={place} holds more than {_FILES:,} .json files: {_REMEDY}.')
    shown = typed if relative else Path(root.name)  # no absolute path goes into a report
    for path in paths:
      # Two places may hold one file, as a folder and a folder in it do.
      real = path.resolve() if is_local(path) else path
      files.setdefault(real, (path, (shown / path.relative_to(root)).as_posix()))
  return [(path, printable(name, 2 * _NAME)) for path, name in files.values()]


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
  made = {key: printable(record.get(key) or 'unknown', 5 * _MESSAGE)
          for key in ('date', 'command', 'code', 'hardware')}
  return {'analysis': record['analysis'], **made, 'versions': {
      key: printable(versions[key], _NAME) for key in ('sink_jax', 'jax') if key in versions}}


def _time(words: str) -> float:
  """When a file was written, in seconds; the earliest possible time where it does not say."""
  try:
    date = datetime.datetime.fromisoformat(words)
  except ValueError:
    date = datetime.datetime.min
  # Those without a time zone, which cannot be compared with others, are taken for UTC.
  return date.replace(tzinfo=date.tzinfo or datetime.timezone.utc).timestamp()


def _published(content: Mapping[str, Any]) -> Published | None:
  """The paper's model; None for a run of sink_jax, which has a step, and for an unknown model."""
  checkpoint, name = content['checkpoint'], content.get('model')
  if checkpoint.get('step') is not None or not isinstance(name, str):
    return None
  if name == checkpoint.get('revision'):  # the folder of a snapshot is called by its revision
    name = (checkpoint.get('folder') or '').removeprefix('models--').replace('--', '/', 1)
  return known_model(name)
