"""What the benchmarks measure as dataclasses, and the JSON documents that hold it.

Every command has a class of rows. A row says what was run, and then either what was measured
or, in `failed`, why nothing was. Files that were written long ago are read with the same
classes, so a field keeps the name of its JSON key.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from sink_jax.benchmark.timing import Timing


def _left_out() -> Any:
  """A field whose JSON key is missing, rather than null, where it is None."""
  return dataclasses.field(default=None, metadata={'left_out': True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One line of a table. `failed` is the reason where nothing was measured."""

  failed: str | None = _left_out()
  note: str | None = _left_out()

  def to_json(self) -> dict[str, Any]:
    """The row as a flat JSON object.

    A Timing becomes five keys with the name of its field in front. None is written as null in
    a row that was measured, where it stands for a number that this machine does not give; a
    row that failed has the keys of what is known alone.
    """
    entries = {}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, Timing):
        entries |= value.named(field.name)
      elif value is not None or not (self.failed or 'left_out' in field.metadata):
        entries[field.name] = value
    return entries


R = TypeVar('R', bound=Row)


def row_from_json(kind: type[R], entries: dict[str, Any]) -> R:
  """The row that `to_json` wrote.

  Raises:
    ValueError: a key that no field of this kind of row has, or one that is missing.
  """
  # Annotations are texts in this file. The entries are copied because those that are read are
  # removed, and what is left at the end is unknown.
  hints, entries = typing.get_type_hints(kind), dict(entries)
  values: dict[str, Any] = {}
  for field in dataclasses.fields(kind):
    if hints[field.name] == Timing | None:
      if f'{field.name}_ms' in entries:
        values[field.name] = Timing.pop_named(field.name, entries)
    elif field.name in entries:
      values[field.name] = entries.pop(field.name)
  if entries:
    raise ValueError(f'A {kind.__name__} has no {", ".join(entries)}.')
  try:
    return kind(**values)
  except TypeError as error:
    raise ValueError(str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow(Row):
  """One implementation of one variant at one shape 'B,H,T,Dh'.

  kind: 'ours', 'T x T' or 'library'. both: the forward pass with the backward pass. share: of
  the matrix product's measured rate. library: the implementation whose softmax `vs_library`
  compares with.
  """

  shape: str
  variant: str
  implementation: str
  kind: str
  forward: Timing | None = _left_out()
  both: Timing | None = _left_out()
  calls_per_program: int | None = _left_out()  # older documents lack it
  # Peak beside the inputs; None where neither the compiler nor the device states it.
  forward_bytes: int | None = None
  both_bytes: int | None = None
  both_mb: float | None = None
  # By `benchmark.flops`, whatever the implementation computes; TFLOP/s and shares are of these.
  forward_flops: float | None = None
  forward_tflops: float | None = None
  forward_share: float | None = None
  both_flops: float | None = None
  both_tflops: float | None = None
  both_share: float | None = None
  forward_vs_library: float | None = _left_out()
  both_vs_library: float | None = _left_out()
  library: str | None = _left_out()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportanceRow(Row):
  """Importance of all keys, of the first ones, or by the T x T definition, at 'B,H,T,Dh'.

  map_gb: size of one float32 T x T map. alpha_1: mean importance of the first key.
  """

  shape: str
  what: str
  variant: str
  map_gb: float
  call: Timing | None = _left_out()
  implementation: str | None = None
  seconds: float | None = None
  flops: float | None = None
  tflops: float | None = None
  share: float | None = None
  bytes: int | None = None
  mb: float | None = None
  alpha_1: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossRow(Row):
  """One form of the cross-entropy with its gradients, at 'B,T,D,V'."""

  shape: str
  what: str
  both: Timing | None = _left_out()
  flops: float | None = None
  tflops: float | None = None
  share: float | None = None
  bytes: int | None = None
  mb: float | None = None
  loss: float | None = None
  vs_plain: float | None = _left_out()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStepRow(Row):
  """Steps of one model with one implementation of attention.

  bytes: peak memory that the compiler states, the training state included. mfu: share of the
  measured rate of matrix products; mfu_datasheet: of the maker's peak.
  """

  size: str
  batch: int
  length: int
  remat: str
  unroll: int
  implementation: str
  step: Timing | None = _left_out()
  # Seconds; short where the program was found in the cache on the disk.
  compile_s: float | None = None
  bytes: int | None = None
  gb: float | None = None
  peak_bytes_in_use: int | None = None
  # The same batch comes in every step, so `loss`, that of the last one, is smaller if the steps
  # train.
  loss_after_warmup: float | None = None
  loss: float | None = None
  tokens_per_second: float | None = None
  flops_per_step: float | None = None
  mfu: float | None = None
  mfu_datasheet: float | None = None
  mfu_datasheet_text: str | None = None
  # The time of the step's FLOPs at the measured rate, and the step's time over it.
  floor_ms: float | None = None
  vs_floor: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRow(Row):
  """A step of so many trials, one after the other and as one group, in milliseconds."""

  trials: int
  size: str
  batch: int
  length: int
  alone_ms: float | None = None
  group_ms: float | None = None
  ratio: float | None = None
  tokens_per_second: float | None = None
  mfu: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRow(Row):
  """Steps of the trial TASK-VARIANT of a config file, in turns with those of TASK-softmax.

  softmax: the steps of that one. ratio: the median over the pairs of timings; ratio_low,
  ratio_high: their quartiles.
  """

  task: str
  variant: str
  step: Timing | None = _left_out()
  softmax: Timing | None = _left_out()
  ratio: float | None = None
  ratio_low: float | None = None
  ratio_high: float | None = None
  pairs: int | None = None
  parameters: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectnessRow(Row):
  """One implementation against the definition.

  out, gradient: relative errors of the values and of the worst gradient, which `note` names.
  errors, allowed: of every array by name; of importance, in the order that they are computed.
  repeats: whether two runs are equal bit for bit.
  """

  head_dim: int
  length: int
  variant: str
  implementation: str
  out: float | None = None
  out_allowed: float | None = None
  gradient: float | None = _left_out()
  gradient_allowed: float | None = _left_out()
  errors: dict[str, float] | list[float] | None = _left_out()
  allowed: dict[str, float] | None = _left_out()
  repeats: Literal['yes', 'NO'] | None = _left_out()
  verdict: Literal['ok', 'FAILED']


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRow(Row):
  """One kernel of the GPU with one choice of block sizes, see `kernels.gpu_layout.Blocks`.

  shape: 'B,H,T,Dh', whose Dh is head_dim. vs_table: its time over that of the entry that the
  table has now. best: 'best' for the fastest of a kernel at a shape.
  """

  shape: str | None = _left_out()  # older documents lack it
  head_dim: int
  kernel: str
  own: int
  other: int
  warps: int
  stages: int
  note: str = ''
  call: Timing | None = _left_out()
  vs_table: float | None = None
  best: str = ''


ROWS: dict[str, type[Row]] = {
    'attention': AttentionRow, 'importance': ImportanceRow, 'loss': LossRow,
    'train_step': TrainStepRow, 'group': GroupRow, 'trials': TrialRow,
    'correctness': CorrectnessRow, 'sweep': SweepRow}


class Column(NamedTuple):
  """A column of a table: the JSON key of its numbers, its title, how they are formatted."""

  key: str
  title: str
  format: str = ''


@dataclasses.dataclass(frozen=True)
class Document:
  """What one command measured: enough to print its table again.

  machine: facts about the hardware and the software, by name. options: what the command was
  given. complete: False while rows are still to come. not_run: cases for which there was no
  time, their names or their number.
  """

  command: str
  machine: dict[str, Any]
  options: dict[str, Any]
  columns: Sequence[Column]
  rows: Sequence[Row]
  notes: Sequence[str]
  complete: bool = True
  not_run: list[str] | int | None = None

  def rows_of(self, kind: type[R]) -> list[R]:
    """The rows of this kind; a command has one kind alone."""
    return [row for row in self.rows if isinstance(row, kind)]

  def to_json(self) -> dict[str, Any]:
    """The document as a JSON object."""
    entries = {'command': self.command, 'machine': self.machine, 'options': self.options,
               'complete': self.complete,
               'columns': [column._asdict() for column in self.columns],
               'rows': [row.to_json() for row in self.rows], 'notes': list(self.notes)}
    return entries if self.not_run is None else entries | {'not_run': self.not_run}


def document_from_json(entries: dict[str, Any]) -> Document:
  """The document that `to_json` wrote.

  Raises:
    ValueError: it is of no command that there is, or a row has other keys than such rows.
  """
  kind = ROWS.get(entries.get('command', ''))
  if kind is None:
    raise ValueError('This is no document of a benchmark: its command is '
                     f'{entries.get("command")!r}, not one of {", ".join(ROWS)}.')
  return Document(**entries | {
      'columns': [Column(**column) for column in entries['columns']],
      'rows': [row_from_json(kind, row) for row in entries['rows']]})
