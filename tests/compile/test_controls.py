"""Do the compile checks see what they are for? Programs of known outcome show it."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu, triton
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from tests.compile import targets
from tests.compile.ptx import ptx_report
from tests.compile.sass import loops
from tests.compile.targets import compile_for, lowered_text, memory, struct


@pytest.mark.parametrize('head_dim', [64, 96])
def test_splash_attention_compiles(tpu, head_dim, note):
  q = struct(8, 2048, head_dim)
  kernel = splash.make_splash_mha_single_device(
      splash.MultiHeadMask([splash.CausalMask((2048, 2048))] * 8))
  loss = lambda q, k, v: jnp.sum(kernel(q, k, v).astype(jnp.float32))
  compiled = compile_for(tpu, jax.grad(loss, argnums=(0, 1, 2)), q, q, q)
  assert compiled.as_text().count('tpu_custom_call') >= 2  # forward and backward
  note(tpu=tpu, temporaries=memory(compiled).temporaries)
  assert memory(compiled).temporaries < 8 * 2048 * 2048 * 2  # no T x T


def double(rows, limit=None):
  """A TPU kernel whose blocks of `rows` x 1024 float32 lie twice in VMEM, in and out."""
  def kernel(x, o):
    o[...] = 2 * x[...]

  spec = pl.BlockSpec((rows, 1024), lambda i: (i, 0))
  return lambda x: pl.pallas_call(
      kernel, grid=4, in_specs=[spec], out_specs=spec, out_shape=jax.typeof(x),
      compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit))(x)


def test_blocks_must_fit_vmem(tpu):
  vmem = targets.VMEM_BYTES[tpu]

  def compile_blocks(share, limit=None):
    rows = int(share * vmem) // 2**14 // 8 * 8
    compile_for(tpu, double(rows, limit), struct(4 * rows, 1024, dtype=jnp.float32))

  compile_blocks(.05)
  with pytest.raises(jax.errors.JaxRuntimeError, match='CompileTimeScopedVmemOom'):
    compile_blocks(.9)  # more than a kernel gets that does not ask
  compile_blocks(.9, limit=vmem)
  with pytest.raises(jax.errors.JaxRuntimeError, match='Exceeded vmem capacity'):
    compile_blocks(1.1, limit=2 * vmem)


def test_a_program_must_fit_the_memory_of_the_chip(tpu):
  def compile_copies(share, copies):
    rows = int(share * targets.HBM_BYTES[tpu]) // 2**12
    keep = lambda x: sum(jnp.sum(y) for y in jax.lax.optimization_barrier(
        [x + i for i in range(1, copies + 1)]))
    return compile_for(tpu, keep, struct(rows, 1024, dtype=jnp.float32))

  fits = memory(compile_copies(.2, 3))
  assert fits.arguments == pytest.approx(.2 * targets.HBM_BYTES[tpu], rel=.01)
  assert fits.total == pytest.approx(.8 * targets.HBM_BYTES[tpu], rel=.01)
  with pytest.raises(jax.errors.JaxRuntimeError, match='(?i)ran out of memory'):
    compile_copies(.2, 6)


def matmul(block):
  """A Triton kernel: (1024, 1024) bfloat16 in square blocks, 64 of the inner axis a step."""
  def kernel(x, y, o):
    def step(i, total):
      part = pl.ds(64 * i, 64)
      return total + jnp.dot(x[:, part], y[part, :], preferred_element_type=jnp.float32)

    total = jax.lax.fori_loop(0, 16, step, jnp.zeros((block, block), jnp.float32))
    o[...] = total.astype(o.dtype)

  return lambda x, y: pl.pallas_call(
      kernel, grid=(1024 // block,) * 2, out_shape=jax.typeof(x), name='matmul',
      in_specs=[pl.BlockSpec((block, 1024), lambda i, j: (i, 0)),
                pl.BlockSpec((1024, block), lambda i, j: (0, j))],
      out_specs=pl.BlockSpec((block, block), lambda i, j: (i, j)),
      compiler_params=triton.CompilerParams(num_warps=8, num_stages=3))(x, y)


def test_a_matmul_uses_the_matrix_unit_of_the_h200(h200, note):
  x = struct(1024, 1024)
  _, [kernel] = ptx_report(matmul(128), x, x)
  note(target=h200, **kernel._asdict())
  assert (kernel.name, kernel.threads) == ('matmul', 256)
  assert kernel.wgmma and not kernel.serialized and kernel.spilled_bytes == 0
  assert 64 <= kernel.registers < 255
  assert kernel.shared_bytes == 3 * (2 * 128 * 64) * 2  # stages of two blocks of bfloat16
  # One round multiplies (128, 64) by (64, 128), and computes nothing else.
  assert kernel.loop.matrix_cycles == 2 * 128 * 128 * 64 / 4096 and not kernel.loop.special_cycles


def test_registers_that_do_not_suffice_are_seen(h200):
  x = struct(1024, 1024)
  _, [kernel] = ptx_report(matmul(256), x, x)
  assert kernel.registers == 255 and kernel.spilled_bytes > 100


def test_a_block_must_fit_shared_memory(h200):
  x = struct(1024, 1024)
  with pytest.raises(jax.errors.JaxRuntimeError, match='Shared memory size limit exceeded'):
    compile_for(h200, matmul(512), x, x)


def two_products(last):
  """A Triton kernel with the products of attention; `last` steps come in a loop of their own."""
  def kernel(q, k, v, o):
    def step(i, total):
      part = pl.ds(64 * i, 64)
      s = jnp.dot(q[...], k[part, :].T, preferred_element_type=jnp.float32)
      f = jax.nn.sigmoid(s).astype(v.dtype)
      return total + jnp.dot(f, v[part, :], preferred_element_type=jnp.float32)

    row = pl.program_id(0)
    total = jax.lax.fori_loop(0, row, step, jnp.zeros((64, 64), jnp.float32))
    total = jax.lax.fori_loop(row, row + last, step, total)
    o[...] = total.astype(o.dtype)

  whole = pl.BlockSpec((1024, 64), lambda i: (0, 0))
  rows = pl.BlockSpec((64, 64), lambda i: (i, 0))
  return lambda q, k, v: pl.pallas_call(
      kernel, grid=16, in_specs=[rows, whole, whole], out_specs=rows, out_shape=jax.typeof(q),
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=2))(q, k, v)


def test_waiting_after_each_product_is_seen(h200):
  x = struct(1024, 64)
  both = lambda q, k, v: two_products(1)(q, k, two_products(0)(q, k, v))
  _, kernels = ptx_report(both, x, x, x)
  assert [(k.wgmma, k.serialized) for k in kernels] == [(True, False), (True, True)]


@pytest.mark.parametrize('platform, call, kernel', [
    ('tpu', 'tpu_custom_call', double(8)), ('cuda', 'triton', lambda x: matmul(128)(x, x))])
def test_lowering_needs_no_device(platform, call, kernel):
  assert call in lowered_text(platform, kernel, struct(1024, 1024))


def test_loops_are_found_in_machine_code():
  line, rule = '        /*{:04x}*/                   {} ;', f'//{"-" * 20} .text {"-" * 20}'
  text = '\n'.join([
      '.text.other:', line.format(0, 'EXIT'), rule, '.text.ours:',
      line.format(0, 'MOV R1, R2'), '.L_x_1:', line.format(16, 'HGMMA.64x32x16.F32.BF16 R8, R4'),
      line.format(32, '@!P1 MUFU.EX2 R3, R3'), line.format(48, '@P0 BRA `(.L_x_1)'), '.L_x_2:',
      line.format(64, 'MUFU.RCP R3, R3'), line.format(80, '@P0 BRA `(.L_x_2)'),
      line.format(96, '@P0 BRA `(.L_x_3)'), '.L_x_3:', line.format(112, 'EXIT'),
      rule, '.text.next:', '.L_x_4:',
      line.format(0, 'HGMMA.64x64x16.F32.BF16 R8, R4'), line.format(16, 'BRA `(.L_x_4)')])
  [loop] = loops(text, 'ours', threads=256)
  # 64 x 32 x 16 twice; exp2 of 256 threads, 16 a cycle; three instructions of two warps each.
  assert loop == (3, 6, 2 * 64 * 32 * 16 * 2 / 4096, 16) and loop.matrix_share == 1


def test_a_missing_compiler_is_named(monkeypatch):
  monkeypatch.setenv('COMPILERS', '')
  with pytest.raises(RuntimeError, match='bash launch/test.sh --compile'):
    targets.compiler_directory('cuda')
