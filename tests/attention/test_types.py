"""The annotated shapes and dtypes of the public functions hold when they are checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import sink_jax as sj
from tests.attention_specs import PAPER, random_inputs

pytestmark = pytest.mark.typed


@pytest.mark.parametrize('name', ['softmax', 'kv bias (Table 4)', 'mlp (Table 15)'])
@pytest.mark.parametrize(
  'convert',
  [
    np.asarray,
    jnp.asarray,
    lambda x: jnp.asarray(x, jnp.bfloat16),
  ],
)
def test_what_callers_give_and_get(name, convert):
  spec = PAPER[name]
  q, k, v, params = random_inputs(spec, heads=4, kv_heads=2)
  q, k, v = map(convert, (q, k, v))
  assert sj.attend(spec, q, k, v, params).shape == q.shape
  assert sj.attention_map(spec, q, k, params).shape == (1, 4, 7, 7)
  first = lambda q, k, params: sj.streaming_importance(spec, q, k, params, keys=3)
  alpha = jax.jit(first)(q, k, params)
  assert alpha.raw.shape == (1, 4, 3)


def test_what_does_not_fit_is_noticed():
  pytest.importorskip('beartype')
  x = np.zeros((1, 4, 2, 8), np.float32)
  with pytest.raises(TypeCheckError):
    sj.attend(sj.AttentionSpec(), x, x[:, :3], x)
  with pytest.raises(TypeCheckError):
    sj.attention_map(sj.AttentionSpec(), x.astype(np.int32), x)
