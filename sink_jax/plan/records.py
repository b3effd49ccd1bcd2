"""A plan of a run as dataclasses, and the JSON of --json and of plan.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from sink_jax.plan.compiler import Memory
from sink_jax.plan.roofline import Roofline


@dataclasses.dataclass(frozen=True)
class Traffic:
  """All collectives of one kind in a step, along the same axes of the mesh.

  group: devices that take part in each. overlapped: whether other work goes on meanwhile.
  count: how often a device takes part. payload, moved: bytes of the arrays, and bytes that a
  device sends. seconds: on the links of the slice, computed.
  """

  kind: str
  axes: str
  group: int
  overlapped: bool
  count: float
  payload: float
  moved: float
  seconds: float


@dataclasses.dataclass(frozen=True)
class StepCost:
  """What a device does in a training step, counted in the compiled program, and its time.

  flops: of matrix products, kernel_flops of them in attention kernels. bytes: to and from main
  memory. compiler_flops, compiler_bytes: the compiler's own counts, which see the body of a loop
  once and no kernel. share: of the peak that products are taken to reach, None where the time
  was given. tokens_per_second: of the whole slice.
  """

  flops: float
  kernel_flops: float
  bytes: float
  compiler_flops: float | None
  compiler_bytes: float | None
  unknown_loops: int
  collectives: list[Traffic]
  share: float | None
  roofline: Roofline
  tokens_per_second: float
  mfu: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a run needs on every device of a slice.

  usable, capacity: bytes of a device's memory that programs may use, and all. model_flops: of
  a device and step, by `flops_per_token`. memory: of the training step. peaks: bytes that a
  device holds during training, validation and the probe, as far as they were compiled; empty,
  as unroll and attention are None, in plans of older versions. cost: None where the training
  step does not fit, so that nothing was compiled. made: where, when and with what.
  """

  name: str
  topology: str
  devices: int
  mesh: dict[str, int]
  batch_size: int
  microbatches: int
  context: int
  remat: str
  unroll: int | None
  vocab: int
  parameters: int
  tokens: int
  usable: float
  capacity: float
  model_flops: float
  attention: str | None
  memory: Memory
  peaks: dict[str, float]
  compile_seconds: float
  cost: StepCost | None = None
  made: dict[str, Any] | None = None

  @property
  def fits(self) -> bool:
    """Whether everything that was compiled fits the memory of a device."""
    return max([self.memory.total, *self.peaks.values()]) <= self.usable

  @property
  def largest_peak(self) -> tuple[str, float]:
    """The part of the run that needs most memory on a device, and how many bytes."""
    return max(self.peaks.items(), key=lambda item: item[1])

  def to_json(self) -> dict[str, Any]:
    """The plan as one flat JSON object."""
    # What is None or empty is left out, so that a plan that was read from an older file is written
    # as it was.
    entries = vars(self) | {'memory': self.memory._asdict(), 'fits': self.fits}
    entries = {key: value for key, value in entries.items()
               if key not in ('cost', 'made') and value not in (None, {})}
    if self.memory.outputs is None:
      del entries['memory']['outputs']
    if self.cost:
      roofline = self.cost.roofline
      entries |= dataclasses.asdict(self.cost) | {'seconds': dataclasses.asdict(roofline) | {
          'step': roofline.step, 'floor': roofline.floor, 'bound': roofline.bound}}
      del entries['roofline']
    return entries | ({'where': self.made} if self.made else {})


def plan_from_json(entries: dict[str, Any]) -> Plan:
  """The plan that `to_json` wrote, in this version or an older one."""
  cost = None
  if 'seconds' in entries:
    cost = StepCost(**{field.name: entries[field.name] for field in dataclasses.fields(StepCost)
                       if field.name not in ('collectives', 'roofline')},
                    collectives=[Traffic(**row) for row in entries['collectives']],
                    # 'seconds' holds the step, the floor and the bound too, which a Roofline
                    # computes anew.
                    roofline=Roofline(**{field.name: entries['seconds'][field.name]
                                         for field in dataclasses.fields(Roofline)}))
  names = {field.name for field in dataclasses.fields(Plan)}
  # Older plans lack these three, and newer ones have keys that are no fields, such as 'fits'.
  values = {'unroll': None, 'attention': None, 'peaks': {}} | {
      key: value for key, value in entries.items() if key in names}
  return Plan(**values | {'memory': Memory(**entries['memory']), 'cost': cost,
                          'made': entries.get('where')})
