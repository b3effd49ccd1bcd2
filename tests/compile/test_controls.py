"""Programs of known outcome show that the compile checks detect what they are for."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu, triton

from tests.compile import targets
from tests.compile.targets import compile_for, memory, ptx_report, struct


def double(rows, limit=None):
  """A TPU kernel with `rows` x 1024 float32 in VMEM twice, as input and as output."""

  def kernel(x, o):
    o[...] = 2 * x[...]

  spec = pl.BlockSpec((rows, 1024), lambda i: (i, 0))
  return lambda x: pl.pallas_call(
    kernel,
    grid=4,
    in_specs=[spec],
    out_specs=spec,
    out_shape=jax.typeof(x),
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
  )(x)


def test_blocks_must_fit_vmem(tpu):
  vmem = targets.VMEM_BYTES[tpu]

  def compile_blocks(share, limit=None):
    rows = int(share * vmem) // 2**14 // 8 * 8
    compile_for(tpu, double(rows, limit), struct(4 * rows, 1024, dtype=jnp.float32))

  with pytest.raises(jax.errors.JaxRuntimeError, match='CompileTimeScopedVmemOom'):
    compile_blocks(0.9)  # more than a kernel gets without a request
  compile_blocks(0.9, limit=vmem)
  with pytest.raises(jax.errors.JaxRuntimeError, match='Exceeded vmem capacity'):
    compile_blocks(1.1, limit=2 * vmem)


def test_a_program_must_fit_the_memory_of_the_chip(tpu):
  def compile_copies(share, copies):
    rows = int(share * targets.HBM_BYTES[tpu]) // 2**12
    keep = lambda x: sum(
      jnp.sum(y) for y in jax.lax.optimization_barrier([x + i for i in range(1, copies + 1)])
    )
    return compile_for(tpu, keep, struct(rows, 1024, dtype=jnp.float32))

  fits = memory(compile_copies(0.2, 3))
  assert fits.arguments == pytest.approx(0.2 * targets.HBM_BYTES[tpu], rel=0.01)
  assert fits.total == pytest.approx(0.8 * targets.HBM_BYTES[tpu], rel=0.01)
  with pytest.raises(jax.errors.JaxRuntimeError, match='(?i)ran out of memory'):
    compile_copies(0.2, 6)


def matmul(block):
  """A Triton kernel for (1024, 1024) bfloat16 matrices: square blocks, 64 inner ones a step."""

  def kernel(x, y, o):
    def step(i, total):
      part = pl.ds(64 * i, 64)
      return total + jnp.dot(x[:, part], y[part, :], preferred_element_type=jnp.float32)

    total = jax.lax.fori_loop(0, 16, step, jnp.zeros((block, block), jnp.float32))
    o[...] = total.astype(o.dtype)

  return lambda x, y: pl.pallas_call(
    kernel,
    grid=(1024 // block,) * 2,
    out_shape=jax.typeof(x),
    name='matmul',
    in_specs=[
      pl.BlockSpec((block, 1024), lambda i, j: (i, 0)),
      pl.BlockSpec((1024, block), lambda i, j: (0, j)),
    ],
    out_specs=pl.BlockSpec((block, block), lambda i, j: (i, j)),
    compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
  )(x, y)


@pytest.mark.parametrize('block, spills', [(128, False), (256, True)])
def test_registers_and_the_matrix_unit_are_seen(h200, block, spills):
  x = struct(1024, 1024)
  _, [kernel] = ptx_report(matmul(block), x, x)
  assert (kernel.registers == 255) == (kernel.spilled_bytes > 100) == spills
  assert spills or kernel.wgmma and not kernel.serialized
