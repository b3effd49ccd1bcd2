"""A comparison of runs: what is said of the runs on the same data, as text, as pages and as files.

`compare` writes index.html, report.md, report.json and PNGs; the JSON is the `Comparison` itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple

from sink_jax.evaluate.plots import HeadMaps, head_maps
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.terminal import number, text_table
from sink_jax.pretrained.load import load_run
from sink_jax.report import images
from sink_jax.report.jsontext import UNWRITTEN, to_json
from sink_jax.report.markup import bold, code, joined, line
from sink_jax.report.model_page import add_model
from sink_jax.report.parts import Parts
from sink_jax.report.probe_record import EMERGENCE_LEVEL, ProbeRecord
from sink_jax.report.records import RunRecord, baseline_of, differing_settings, made_by
from sink_jax.report.sentences import VERDICTS, overview, sentences, verdict
from sink_jax.train.checkpoint import CheckpointError

_WIDTH = 100  # columns of a terminal
_TITLES = {'BigramBackcopy': 'Bigram-Backcopy', 'TriggerAveraging': 'Trigger-conditional averaging'}
_NEVER = 'did not emerge'  # may take three lines of a terminal
# Heading, meaning and cell of what the probe measured.
_PROBED: Sequence[tuple[str, str, Callable[[ProbeRecord], str]]] = (
    ('Sink_1 %', 'Share of heads whose importance of the first token exceeds epsilon.',
     lambda probe: number(probe.sink_1, '.1f')),
    ('Sink_* %', 'The same of the extra key or learned sink token: its mean weight over queries.',
     lambda probe: number(probe.sink_extra_key, '.1f')),
    ('Sink_* % (official)',
     'The same as the official implementation counts it, with a dummy row of weight one.',
     lambda probe: number(probe.sink_extra_key_official, '.1f')),
    ('largest import.', 'Largest importance of the first token over heads.',
     lambda probe: number(probe.largest_importance, '.3f')),
    ('raw mass, first', 'Mean weight on the first token, as it multiplies the values.',
     lambda probe: number(probe.raw_mass_1, '.3f')),
    ('raw mass, row',
     'Mean total weight of a row between tokens; 1 for softmax without an extra key.',
     lambda probe: number(probe.raw_row_mass, '.3f')),
    ('value ratio (block)', 'Norm of the value of the first token over the mean of the others: the '
     'smallest over blocks, and that block.',
     lambda probe: f'{probe.value_ratio:.2f} ({probe.value_ratio_block})'),
    ('max / median', 'Largest entry of the hidden states over the median entry, in size: the '
     'largest ratio over blocks. Activations are massive beyond 100 and more.',
     lambda probe: number(probe.curves.max_over_median[-1], '.0f')),
    ('sink emerged', 'First probed step from which Sink_1 stays at or above 10 %.',
     lambda probe: _NEVER if probe.emergence_step is None else f'step {probe.emergence_step}'))
# Left out where no run has them, such as runs without an extra key.
_OPTIONAL = ('Sink_* %', 'Sink_* % (official)', 'max / median')
_STARRED = ('Sink_1 %', 'largest import.')  # of proxy scores where rows do not sum to one


@dataclasses.dataclass(frozen=True)
class Picture:
  """A figure of a group: the name of its PNG, its caption, and the PNG."""

  file: str
  caption: str
  png: bytes = dataclasses.field(metadata=UNWRITTEN)


@dataclasses.dataclass(frozen=True)
class RunGroup:
  """The runs on one data set, softmax first.

  key: of file names. sentences, different_settings: by name of the run; the settings are dotted
  config keys with their values, and those that all runs have are in shared_settings.
  """

  key: str
  title: str
  runs: Sequence[RunRecord] = dataclasses.field(metadata=UNWRITTEN)  # `Comparison` has them
  overview: str
  sentences: Mapping[str, str]
  notes: Sequence[str]
  shared_settings: Mapping[str, Any]
  different_settings: Mapping[str, Mapping[str, Any]]
  pictures: Sequence[Picture] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The content of a report about runs.

  runs: by name. provenance: how the runs and the report were made.
  """

  runs: Mapping[str, RunRecord]
  groups: Sequence[RunGroup]
  provenance: Mapping[str, Sequence[str]]
  title: str = 'Attention sinks side by side'
  emergence_level: float = EMERGENCE_LEVEL


class Column(NamedTuple):
  """A column: its heading, what it means, and the cells of the runs ('-' where unknown)."""

  heading: str
  meaning: str
  cells: Sequence[str]


def compare(runs: Sequence[RunRecord], out: str | AnyPath, with_maps: bool = True,
            evaluation: AnyPath | None = None) -> Comparison:
  """Writes index.html, report.md, report.json and PNGs about runs.

  Args:
    evaluation: a folder that `evaluate` wrote about a model, with which the page begins.

  Raises:
    ValueError: `evaluation` is another folder. OSError: `out` cannot be written.
  """
  report = build(runs)
  report = dataclasses.replace(report, groups=[_drawn(of, with_maps) for of in report.groups])
  page(report, evaluation).write(to_path(out), to_json(report))
  return report


def build(runs: Sequence[RunRecord]) -> Comparison:
  """The runs in groups, without pictures; every sentence follows from the records."""
  groups: list[RunGroup] = []
  # Losses and rates are compared on equal data alone, so every source makes a group.
  data = lambda run: _place(run)[:2]
  for (_, source), of_source in itertools.groupby(sorted(runs, key=_place), data):
    members = list(of_source)
    # A damaged run is listed, but what its config says may not be what was trained.
    shared, different = differing_settings([run for run in members if run.readable])
    # Two sources of one class with other arguments have the same key: a number parts their files.
    key = re.sub(r'[^a-z0-9]+', '-', (source or 'unread').split('(')[0].lower())
    if taken := sum(group.key.split('.')[0] == key for group in groups):
      key += f'.{taken + 1}'
    groups.append(RunGroup(
        key=key,
        title=_title(members[0]),
        runs=members,
        overview=overview(members),
        sentences={run.name: sentences(run, baseline_of(run, members)) for run in members},
        notes=_notes(members),
        shared_settings=shared,
        different_settings=different,
    ))
  return Comparison({run.name: run for run in runs}, groups, made_by(runs))


def as_text(report: Comparison) -> str:
  """Tables and sentences for a terminal, within 100 columns."""
  blocks = []
  for group in report.groups:
    shown = columns(group.runs)
    table = text_table([column.heading for column in shown],
                       list(zip(*(column.cells for column in shown))), width=_WIDTH,
                       wrapped=[_NEVER])
    blocks.append('\n'.join([
        group.title, '=' * len(group.title), '', *table, '', fill(group.overview, _WIDTH),
        *(fill(f'{name}: {text}', _WIDTH, initial_indent='- ', subsequent_indent='  ')
          for name, text in group.sentences.items()),
        *(fill(note, _WIDTH) for note in group.notes)]))
  return '\n\n'.join(blocks)


def page(report: Comparison, evaluation: AnyPath | None = None) -> Parts:
  """The whole report: what was found first, how it was made last."""
  parts = Parts(report.title)
  if evaluation is not None:
    add_model(parts, evaluation)
    parts.heading('Models trained here')
  groups = report.groups
  parts.paragraph(' '.join(
      f'{group.title}: {group.overview}' if len(groups) > 1 else group.overview
      for group in groups))
  counts = [Counter(map(verdict, group.runs)) for group in groups]
  found = [key for key in VERDICTS if any(count[key] for count in counts)]
  parts.table(['data', 'runs', *(VERDICTS[key] for key in found)],
              [[group.title, str(len(group.runs)), *(str(count[key]) for key in found)]
               for group, count in zip(groups, counts)])
  for group in groups:
    _add_group(parts, group)
  parts.heading('How it was made')
  parts.paragraph(f'{_facts(report.runs.values())}; report of {report.provenance["date"][0]}')
  parts.facts(report.provenance)
  return parts


def columns(runs: Sequence[RunRecord]) -> list[Column]:
  """The columns that a group of runs needs; the first names the variant."""
  shown = [Column('variant', 'Folder of the run.', [
      run.name if run.status == 'done' else f'{run.name} ({run.status})' for run in runs])]
  for key in dict.fromkeys(key for run in runs for key in run.shown_losses) or ['valid']:
    meaning = ('Validation loss at its last evaluation, nats per token; of continuous targets, the '
               'squared error.' if key == 'valid' else
               f"Validation loss on the task's {key} targets, nats.")
    shown.append(Column(f'{key} loss', meaning, [
        number((run.losses or {}).get(key), '.3f') for run in runs]))
  for heading, meaning, cell in _PROBED:
    cells = [cell(run.probe) if run.probe else '-' for run in runs]
    if heading in _STARRED:
      cells = [words + '*' if run.proxy and words != '-' else words
               for run, words in zip(runs, cells)]
    if heading not in _OPTIONAL or set(cells) != {'-'}:
      shown.append(Column(heading, meaning, cells))
  return shown


def _place(run: RunRecord) -> tuple[int, str, bool, str]:
  """Texts, then synthetic tasks, then what could not be read; softmax before its variations."""
  setup = run.setup
  if setup is None:
    return 2, '', True, run.name
  return int(setup.synthetic), setup.source, setup.attention != 'softmax', run.name


def _title(run: RunRecord) -> str:
  if run.setup is None:
    return 'Runs that could not be read'
  # One run stands for its group: the members have the same source.
  settings = run.setup.settings
  source = settings['data.source'].removesuffix('()')
  if run.setup.synthetic:
    return re.sub(r'^\w+', lambda name: _TITLES.get(name[0], name[0]), source)
  return f'Language-model text ({source}, {settings["data.tokenizer"].removesuffix("()")})'


def _notes(runs: Sequence[RunRecord]) -> list[str]:
  notes = []
  if any(run.proxy for run in runs):
    notes.append('* of proxy scores: the rows of this attention do not sum to one, so its weights '
                 'are divided by the sums of their magnitudes before the metric, as in the paper.')
  setups = [run.setup for run in runs if run.setup is not None]
  # Members share their data, and so the optimum.
  optimum = next((setup.facts.get('bigram_entropy') for setup in setups), None)
  if optimum is not None:
    notes.append(f'The least possible loss is {optimum:.3f} nats on bigram targets and 0 on '
                 'back-copies.')
  seeds = {setup.seed for setup in setups}
  if len(seeds) == 1:
    notes.append(f'One seed ({seeds.pop()}): small differences between variants mean little.')
  return notes


def _drawn(group: RunGroup, with_maps: bool) -> RunGroup:
  """The same with curves and attention maps, and a note on every run without a map."""
  probed = [run for run in group.runs if run.probe is not None]
  if not probed:
    return group
  extra_key = any(run.probe and run.probe.sink_extra_key is not None for run in probed)
  pictures = [Picture(
      f'curves-{group.key}.png',
      'Sink_1 and the largest importance of the first token over heads, against step. Dashed '
      f'lines and * are of proxy scores{", dotted lines of the extra key" * extra_key}.',
      images.sink_curves(probed))]
  # Loading a checkpoint takes seconds; --no_maps leaves it out.
  maps, missing = _maps(probed) if with_maps else ({}, [])
  if maps:
    sequences = next(iter(maps.values())).sequences
    pictures.append(Picture(
        f'attention-{group.key}.png',
        'The head of every variant with the largest importance of the first token: its attention '
        f'at the last checkpoint, averaged over the probe sequences ({sequences}).',
        images.strongest_heads(maps)))
  return dataclasses.replace(group, pictures=pictures, notes=[*group.notes, *missing])


def _maps(runs: Sequence[RunRecord]) -> tuple[Mapping[str, HeadMaps], list[str]]:
  """Maps of the runs whose checkpoint can be read, and a line about every other."""
  maps, missing = {}, []
  for run in runs:
    try:
      model = load_run(run.folder)
      if model.probe_tokens is None:
        raise ValueError('it has no probe_tokens.npy.')
      maps[run.name] = head_maps(model, model.probe_tokens)
    # A run may have no checkpoint yet, or have lost it; its other numbers are still shown.
    except (ValueError, CheckpointError) as error:
      missing.append(f'No attention map of {run.name}: {" ".join(str(error).split())}')
  return maps, missing


def _add_group(parts: Parts, group: RunGroup) -> None:
  parts.heading(group.title)
  for picture in group.pictures:
    parts.picture(picture.file, picture.png, picture.caption)
  variants, *shown = columns(group.runs)
  # The operation of a run stands below its name.
  operations = [run.setup.attention if run.setup else '' for run in group.runs]
  parts.table([variants.heading, *(column.heading for column in shown)],
              list(zip(zip(variants.cells, operations), *(column.cells for column in shown))))
  parts.items([line(bold(name), ': ', words) for name, words in group.sentences.items()])
  parts.paragraphs(group.notes)
  with parts.details('Columns'):
    parts.items([line(bold(column.heading), ': ', column.meaning) for column in shown])
  if group.shared_settings:
    settings = lambda of: joined([code(f'{key} = {value}') for key, value in of.items()])
    with parts.details('Settings'):
      # A single run differs from none.
      if len(group.different_settings) > 1:
        parts.items([line(bold(name), ': ', settings(of) or 'as below')
                     for name, of in group.different_settings.items()])
      parts.paragraph(line('Shared by all: ', settings(group.shared_settings)))


def _facts(runs: Collection[RunRecord]) -> str:
  """What was run, in a line: variants, steps, tokens, seeds; what runs share is named once."""
  setups = [run.setup for run in runs if run.setup is not None]
  of_all = lambda key: sorted({getattr(setup, key) for setup in setups})
  facts = [f'{len(runs)} runs']
  if setups:
    facts += [' and '.join(f'{steps:,}' for steps in of_all('steps')) + ' steps',
              ' and '.join(f'{n / 1e6:.1f} M' for n in of_all('tokens')) + ' tokens each']
    # Of the texts, and how often they are passed over; 0 where that is unknown, as None has no
    # place in an order.
    amounts = sorted({(run.text.unique_tokens, run.text.epochs or 0.0) for run in runs
                      if run.text and run.text.unique_tokens})
    facts += [f'{unique / 1e6:.1f} M unique tokens' + bool(epochs) * f' seen {epochs:.2g} times'
              for unique, epochs in amounts]
    facts += ['seed ' + ', '.join(map(str, of_all('seed'))),
              'epsilon ' + ', '.join(f'{epsilon:g}' for epsilon in of_all('epsilon'))]
  return ', '.join(facts)
