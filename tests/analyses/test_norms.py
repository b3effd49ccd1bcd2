"""Norms of the first token against NumPy on recorded hidden states."""

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import norms
from sink_jax.models.config import Layer, Mamba
from tests.analyses.small import (
  check_png,
  check_rows,
  drawn,
  lines,
  options,
  random_inputs,
  small_run,
)

HYBRID = (Layer(mamba=Mamba(inner=16, state=2, conv=2, rank=1)), Layer())


def expected(run, tokens):
  """{kind: norms (S, N, ...)} from hidden states and parameters, float64."""
  record = run.record(tokens, sj.RecordOptions(hidden=True, queries_keys=True))
  layers = record.layers
  h_NxSxTxD = np.concatenate([np.asarray(record.embedding_BxTxD)[None], layers.hidden_BxTxD])
  size = lambda x: np.linalg.norm(np.asarray(x, np.float64), axis=-1)
  keys_NxSxTxH = size(layers.keys_BxTxHkvxDh)
  values_NxSxTxH = []
  own, config = run.params['blocks'], run.config
  for n in range(config.layers):
    h = h_NxSxTxD[n].astype(np.float64)
    h = h / np.sqrt((h ** 2).mean(-1, keepdims=True) + config.norm_eps) * np.asarray(
        own['norm1']['gain'][n])
    v = h @ np.asarray(own['attention']['value']['kernel'][n], np.float64)
    first = v if n == 0 else first
    if config.attention.value.reads_first and n:  # the norms are those of what attention mixes
      a, b = (float(own['attention'][f'value_{name}'][n]) for name in ('own', 'first'))
      v = a * v + b * first
    values_NxSxTxH.append(size(v.reshape(*v.shape[:2], config.dims.kv_heads, -1)))
  return {'hidden': size(h_NxSxTxD), 'key': keys_NxSxTxH, 'value': np.stack(values_NxSxTxH)}


@pytest.mark.parametrize('attention', [
    sj.AttentionSpec(), sj.AttentionSpec(value='ValueResidual()', temperature='LogLength()')])
def test_numbers(attention):
  run, inputs = small_run(attention=attention), random_inputs()
  found = norms.measure(run, inputs, options())
  assert (found['model'], found['inputs'], found['layers']) == ('small', inputs.description, [0, 1])
  for kind, own in expected(run, inputs.tokens).items():
    assert len(found[kind]['first']) == (3 if kind == 'hidden' else 2)
    for n, x in enumerate(own):  # (S, T, ...) of one layer
      first, others = x[:, 0].mean(), x[:, 1:].mean()
      assert found[kind]['first'][n] == pytest.approx(first, rel=1e-5)
      assert found[kind]['others'][n] == pytest.approx(others, rel=1e-5)
      assert found[kind]['ratio'][n] == pytest.approx(first / others, rel=1e-5)
      assert abs(first / others - 1) > 1e-3  # the two can be told apart


def test_the_last_hidden_state_is_taken_before_the_final_norm():
  run, inputs = small_run(), random_inputs()
  params = run.params | {'final_norm': {'gain': 1000 * run.params['final_norm']['gain']}}
  louder = sj.Run(run.config, params, run.name)
  assert norms.measure(louder, inputs, options()) == norms.measure(run, inputs, options())


def test_blocks_without_attention_have_hidden_states_alone(tmp_path):
  run = small_run(layers=4, pattern=HYBRID)
  assert run.config.attention_layers == (1, 3)
  found = norms.measure(run, random_inputs(), options())
  assert found['layers'] == [1, 3]
  assert [len(found[kind]['ratio']) for kind in norms.KINDS] == [5, 2, 2]
  table = check_rows(norms, [found])
  assert [row[1] for row in table[1:]] == ['hidden states', 'keys', 'values']
  ratio = found['key']['ratio'][int(table[2][2]) // 2 - 1]  # of block 2 or 4
  assert table[2][5] == f'{ratio:.4g}'
  norms.draw([found, found], tmp_path / 'norms.png')
  check_png(tmp_path / 'norms.png')


def test_what_is_drawn_where(monkeypatch):
  found = norms.measure(small_run(layers=4, pattern=HYBRID), random_inputs(), options())
  axes = drawn(norms, [found], monkeypatch).axes
  for ax, kind, blocks in zip(axes, norms.KINDS, (range(5), (2, 4), (2, 4))):
    own = lines(ax)
    for name, key in (('first token', 'first'), ('mean of the others', 'others')):
      np.testing.assert_allclose(own[name], np.transpose([blocks, found[kind][key]]))
