"""What to turn where a step does not fit: estimates, and compiled alternatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from sink_jax.models.config import CHOICES
from sink_jax.models.sizes import kept_bytes
from sink_jax.plan.chips import GIB
from sink_jax.plan.job import AXES, Job

_POLICIES = CHOICES['remat']  # from what keeps most to what keeps least


def advice(job: Job, memory: dict[str, float]) -> list[str]:
  """Options in the order in which to try them, each with about what it would need.

  Estimates, from what was compiled: `--search` compiles them.
  """
  now, limit = job.model.remat, job.where.chip.usable
  arguments, temporaries = memory['arguments'], memory['temporaries']
  kept = lambda remat: _kept(job, remat) if remat != 'none' else max(
      temporaries - _always(job), _kept(job, 'save_matmuls'))
  block = (temporaries - _always(job)) / job.model.layers if now == 'none' else (
      max(0, temporaries - _always(job) - kept(now)))
  options = []
  for remat in _POLICIES[_POLICIES.index(now) + 1:]:
    options.append((f'--remat={remat}', arguments + _always(job) + _kept(job, remat) + block))
  rows = job.mesh[0] * job.mesh[1]
  held = max(0, temporaries - _always(job))
  parts = [n for n in (2, 4, 8, 16) if job.batch_size % (n * job.microbatches * rows) == 0]
  for n in parts:
    options.append((f'--microbatches={n * job.microbatches}',
                    arguments + _always(job) + held / n + arguments / 3))
  data, fsdp, _ = job.mesh
  if data > 1:
    options.append((f'--data=1 --fsdp={data * fsdp}', arguments / data + temporaries))
  lines = [f'  {option}: about {needed / GIB:,.1f} GiB' + (', fits' if needed < limit else '')
           for option, needed in options if needed < memory['total']]
  smaller = rows * job.microbatches
  if job.batch_size > smaller:
    lines.append(f'  --batch_size={max(smaller, job.batch_size // 2 // smaller * smaller)}: fewer '
                 'sequences on a device, another training')
  return lines or ['  a slice with more chips, or chips with more memory']


def alternatives(job: Job) -> Iterator[Job]:
  """A handful of meshes and remat policies for the same batch; the given one is the first."""
  devices, seen = job.where.devices, set()
  meshes = [job.mesh, (devices, 1, 1), (1, devices, 1)]
  meshes += [(devices // n, n, 1) for n in (16, 64) if devices % n == 0 and devices > n]
  meshes += [(1, devices // n, n) for n in (4,) if devices % n == 0 and job.model.heads % n == 0]
  for mesh in meshes:
    for remat in dict.fromkeys((job.model.remat, 'none', 'save_attention', 'blocks')):
      if (mesh, remat) not in seen:
        seen.add((mesh, remat))
        try:
          other = dataclasses.replace(job, mesh=mesh)
          yield other if remat == job.model.remat else other.with_remat(remat)
        except ValueError:  # the batch does not divide
          continue


def ranked(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Those that fit, fastest first."""
  return sorted((one for one in plans if one['fits']), key=lambda one: one['seconds']['step'])


def options_of(job: Job) -> str:
  return ' '.join(f'--{name}={n}' for name, n in zip(AXES, job.mesh))


def _kept(job, remat):
  """Bytes of activations that wait for the backward pass."""
  tokens = job.tokens / (job.mesh[0] * job.mesh[1] * job.microbatches)
  return tokens * job.model.layers * kept_bytes(job.model, remat, job.mesh[2])


def _always(job):
  """Embedding gradients in float32, whole on every device, and a part of the logits."""
  return 3 * 4 * job.model.vocab_size * job.model.d_model + 2**29
