"""Attention of the last query against whole maps; memory of what is linear in the length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import last_query
from sink_jax.models.sizes import parameter_shapes
from sink_jax.models.transformer import Transformer
from tests.analyses.small import check_png, check_rows, options, random_inputs, small_run

WINDOW = sj.AttentionSpec(mask='Window(size=4)')


@pytest.mark.parametrize('changes', [
    {}, dict(attention=sj.AttentionSpec('Sigmoid()', 'Unnormalized()'), kv_heads=4),
    dict(attention=sj.AttentionSpec(kv_bias='SinkLogit()')), dict(attention=WINDOW)],
    ids=['softmax', 'sigmoid', 'sink logit', 'window'])
def test_numbers(changes):
  run, inputs = small_run(**changes), random_inputs()
  found = last_query.measure(run, inputs, options())
  layers = run.record(inputs.tokens, sj.Want(maps=True)).layers
  maps = np.asarray(layers.proxy_maps_BxHxTxT, np.float64)
  heads = maps[:, :, :, -1, 0].mean(1)  # (N, H)
  np.testing.assert_allclose(found['heads'], heads, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(found['mean'], heads.mean(1), rtol=1e-4, atol=1e-6)
  deviation = np.sqrt(((heads - heads.mean(1, keepdims=True)) ** 2).mean(1))
  np.testing.assert_allclose(found['deviation'], deviation, rtol=1e-4, atol=1e-6)
  assert (found['sequences'], found['length'], found['uniform']) == (3, 9, 1 / 9)
  assert (heads == 0).all() == (changes.get('attention') == WINDOW)


def test_chosen_layers_and_heads():
  run, inputs = small_run(), random_inputs()
  whole = last_query.measure(run, inputs, options())
  found = last_query.measure(run, inputs, options(layers=(1,), heads=(3, 0)))
  assert found['layers'] == [1]
  assert found['heads'] == [[whole['heads'][1][3], whole['heads'][1][0]]]
  for asked, words in ((dict(layers=(2,)), '--layers=3: .* in 1,2'),
                       (dict(heads=(4,)), '--heads=5: .* 1 to 4')):
    with pytest.raises(ValueError, match=words):
      last_query.measure(run, inputs, options(**asked))


@pytest.mark.parametrize('want', [sj.Want(last_query=True), sj.Want(angles=True)], ids=str)
def test_4096_tokens_need_no_map(want):
  config = small_run(implementation='chunked').config
  shapes = parameter_shapes(config)

  def temporary_bytes(want, length):
    record = lambda params, tokens: Transformer(config).apply({'params': params}, tokens, want)[1]
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(record).lower(shapes, tokens).compile().memory_analysis().temp_size_in_bytes

  long = temporary_bytes(want, 4096)
  one_map = 4 * 4096 ** 2  # bytes, of one of the four heads
  assert long < one_map
  assert long / temporary_bytes(want, 1024) < 4.5
  if want.angles:  # the comparison can tell
    assert temporary_bytes(sj.Want(maps=True), 4096) > 4 * one_map


def test_picture(tmp_path):
  result = last_query.measure(small_run(layers=4), random_inputs(), options())
  assert len(check_rows(last_query, [result])) == 5
  last_query.draw([result, result | {'model': 'other'}], tmp_path / 'last.png')
  check_png(tmp_path / 'last.png')
