"""How precisely the matrix products of a model are computed when it is evaluated."""

from __future__ import annotations

import contextlib

import jax


def matmul_precision(dtype: str) -> str:
  """The precision of matrix products of activations of a type: 'highest', or JAX's 'default'.

  The default multiplies float32 in TF32 on GPUs and in passes of bfloat16 on TPUs.
  """
  return 'highest' if dtype == 'float32' else 'default'


def precise(dtype: str) -> contextlib.AbstractContextManager:
  """A context in which products of float32 are traced in float32, and others as by default.

  It belongs inside of the function that jit traces: around its call it would be a part of the
  key of the compiled program, and the program would be compiled again where the context is not.
  """
  if matmul_precision(dtype) == 'highest':
    return jax.default_matmul_precision('highest')
  return contextlib.nullcontext()
