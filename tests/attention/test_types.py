"""The annotated shapes and dtypes of the public functions hold when they are checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import sink_jax as sj
from tests.attention_specs import PAPER, random_inputs

pytestmark = pytest.mark.typed


def test_arrays_of_jax_in_bfloat16_and_tracers():
  spec = PAPER['kv bias (Table 4)']
  *arrays, params = random_inputs(spec, heads=4, kv_heads=2)
  q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays)
  assert sj.attend(spec, q, k, v, params).shape == q.shape
  assert sj.attention_map(spec, q, k, params).shape == (1, 4, 7, 7)
  first = lambda q, k, params: sj.streaming_importance(spec, q, k, params, keys=3)
  assert jax.jit(first)(q, k, params).raw.shape == (1, 4, 3)


def test_what_does_not_fit_is_noticed():
  pytest.importorskip('beartype')
  x = np.zeros((1, 4, 2, 8), np.float32)
  with pytest.raises(TypeCheckError):
    sj.attend(sj.AttentionSpec(), x, x[:, :3], x)
  with pytest.raises(TypeCheckError):
    sj.attention_map(sj.AttentionSpec(), x.astype(np.int32), x)
