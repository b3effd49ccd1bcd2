"""Options to change where a step does not fit: estimates, and alternatives to compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from sink_jax.models.config import CHOICES
from sink_jax.models.sizes import kept_bytes
from sink_jax.plan.chips import GIB
from sink_jax.plan.compiler import Memory
from sink_jax.plan.job import AXES, Job
from sink_jax.plan.records import Plan
from sink_jax.train.loss import default_logits

_POLICIES = CHOICES['remat']  # from what keeps most to what keeps least


def memory_options(job: Job, memory: Memory) -> list[str]:
  """Options in the order in which to try them, each with about what it would need.

  They are estimates from the memory of the step that was compiled; `--search` compiles them.
  """
  now, limit = job.model.remat, job.where.chip.usable
  arguments, temporaries = memory.arguments, memory.temporaries
  # The sum of the gradients over micro-batches: a third of the state, which has two moments beside
  # the parameters. With one micro-batch there is none.
  gradients = arguments / 3
  always = _always(job) + gradients * (job.microbatches > 1)
  # Temporaries are what is always there, the activations that every block keeps for the backward
  # pass, and those of the one block that is recomputed. Without recomputation there is no
  # estimate of the second, but the compiler's number has it: nothing else is left.
  kept = lambda remat: _kept(job, remat) if remat != 'none' else max(
      temporaries - always, _kept(job, 'save_matmuls'))
  block = (temporaries - always) / job.model.layers if now == 'none' else (
      max(0, temporaries - always - kept(now)))
  options = []
  # Only policies that keep less: the others need more memory than what did not fit.
  for remat in _POLICIES[_POLICIES.index(now) + 1:]:
    options.append((f'--remat={remat}', arguments + always + _kept(job, remat) + block))
  rows = job.mesh[0] * job.mesh[1]
  activations = max(0, temporaries - always)
  factors = [n for n in (2, 4, 8, 16) if job.batch_size % (n * job.microbatches * rows) == 0]
  for n in factors:
    options.append((f'--microbatches={n * job.microbatches}',
                    arguments + _always(job) + activations / n + gradients))
  data, fsdp, _ = job.mesh
  # Turning 'data' into 'fsdp' splits the state among more devices and leaves the sequences of a
  # device as they are.
  if data > 1:
    options.append((f'--data=1 --fsdp={data * fsdp}', arguments / data + temporaries))
  lines = [f'  {option}: about {needed / GIB:,.1f} GiB' + (', fits' if needed < limit else '')
           for option, needed in options if needed < memory.total]
  # One sequence for every group of devices and micro-batch, the least that divides.
  smaller = rows * job.microbatches
  if job.batch_size > smaller:
    lines.append(f'  --batch_size={max(smaller, job.batch_size // 2 // smaller * smaller)}: fewer '
                 'sequences on a device, another training')
  return lines or ['  a slice with more chips, or chips with more memory']


def alternatives(job: Job) -> Iterator[Job]:
  """A handful of meshes and remat policies for the same batch; the given one is the first."""
  devices, yielded = job.where.devices, set()
  # With 'data' alone every device holds the whole state, with 'fsdp' alone the smallest part of it.
  # Two meshes between them are tried, and one that splits the heads in four.
  meshes = [job.mesh, (devices, 1, 1), (1, devices, 1)]
  meshes += [(devices // n, n, 1) for n in (16, 64) if devices % n == 0 and devices > n]
  meshes += [(1, devices // n, n) for n in (4,) if devices % n == 0 and job.model.heads % n == 0]
  for mesh in meshes:
    for remat in dict.fromkeys((job.model.remat, 'none', 'save_attention', 'blocks')):
      if (mesh, remat) not in yielded:
        yielded.add((mesh, remat))
        try:
          other = dataclasses.replace(job, mesh=mesh)
          yield other if remat == job.model.remat else other.with_remat(remat)
        except ValueError:  # the batch does not divide
          continue


def ranked(plans: list[Plan]) -> list[Plan]:
  """The plans that fit, fastest first."""
  fitting = [(plan.cost.roofline.step, plan) for plan in plans if plan.fits and plan.cost]
  return [plan for _, plan in sorted(fitting, key=lambda pair: pair[0])]


def options_of(job: Job) -> str:
  """The options that give a job its mesh."""
  return ' '.join(f'--{name}={n}' for name, n in zip(AXES, job.mesh))


def _kept(job, remat):
  """Bytes of activations that a device keeps for the backward pass."""
  tokens = job.tokens / (job.mesh[0] * job.mesh[1] * job.microbatches)
  return tokens * job.model.layers * kept_bytes(job.model, remat, job.mesh[2])


def _always(job):
  """Bytes that no option changes: float32 gradients of the embeddings and the loss's logits."""
  # The loss computes so many logits at a time, in float32, or all of them where they are fewer.
  tokens = job.tokens / (job.mesh[0] * job.mesh[1] * job.microbatches)
  logits = min(tokens * job.model.vocab_size, job.loss_logits or default_logits('tpu'))
  return 4 * (3 * job.model.vocab_size * job.model.d_model + logits)
