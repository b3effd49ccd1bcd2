"""Norms, angles, maps, positions and the last query against NumPy on full maps."""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import sink_jax as sj
from sink_jax.evaluate.inputs import random_tokens
from sink_jax.models.record import queries_keys, states
from tests.analyses.numpy_decoder import project, rms
from tests.analyses.small import HYBRID, importance, maps, near, small_run, tokens

LEARNED = sj.AttentionSpec(position=sj.Learned(max_length=64))
SIGMOID = sj.AttentionSpec('Sigmoid()', 'Unnormalized()')


def test_norms():
  run = small_run()
  ids = tokens()
  found = sj.analyse('norms', run, ids, batch_size=3).rows
  rows = {(row['kind'], row['block']): row for row in found}
  record = run.record(ids, sj.RecordOptions(attention=queries_keys, hidden=states))
  hidden = np.concatenate([record.embedding[None], record.layers.hidden]).astype(float)
  keys = np.asarray(record.layers.attention.k_BxTxHkvxDh, float)
  vectors = {('hidden states', block): x for block, x in enumerate(hidden)}
  for n in range(2):
    params = jax.tree.map(lambda x: x[n], run.params['blocks'])
    x = rms(hidden[n], params['norm1'], run.config.norm_eps)
    values = project(x, params['attention']['value'], run.config.dims.head_dim)
    vectors |= {('keys', n + 1): keys[n], ('values', n + 1): values}

  assert rows.keys() == vectors.keys()
  for name, row in rows.items():
    sizes = np.linalg.norm(vectors[name], axis=-1)
    first = sizes[:, 0].mean()
    others = sizes[:, 1:].mean()
    assert row['first'] == near(first)
    assert row['others'] == near(others)
    assert row['ratio'] == near(first / others)
    assert abs(row['ratio'] - 1) > 1e-3  # the first token differs from the others

  # The last hidden state is taken before the final norm, so a larger gain changes nothing.
  gain = {'gain': 1000 * run.params['final_norm']['gain']}
  louder = dataclasses.replace(run, params=run.params | {'final_norm': gain})

  assert sj.analyse('norms', louder, ids, batch_size=3).rows == found


@pytest.mark.parametrize(
  'changes',
  [
    {},
    dict(attention=sj.AttentionSpec(position='Alibi()', mask='Window(size=3)'), kv_heads=4),
    dict(attention=sj.AttentionSpec(qk_norm='QKNorm()')),
  ],
  ids=['rotary', 'alibi', 'qk norm'],
)
def test_angles_by_loops_over_queries_and_keys(changes):
  run = small_run(**changes)
  ids = tokens(length=7)
  options = dict(heads=('1.3', '2.2'), batch_size=3)
  rows = sj.analyse('angles', run, ids, **options).rows
  qk = run.record(ids, sj.RecordOptions(attention=queries_keys)).layers.attention
  q, k = (np.asarray(x, float) for x in qk)
  n, s, length, heads, width = q.shape
  shape = n, heads, s, length, length
  found = {name: np.zeros(shape) for name in ('cosine', 'norm_product', 'score')}
  for i in np.ndindex(shape):
    block, head, text, t, j = i
    if j > t:
      continue
    a = q[block, text, t, head]
    b = k[block, text, j, head // (heads // k.shape[3])]
    norms = math.sqrt(a @ a) * math.sqrt(b @ b)  # without 1/sqrt(Dh), as in the paper
    found['norm_product'][i] = norms
    found['cosine'][i] = a @ b / norms
    found['score'][i] = a @ b / math.sqrt(width)

  alpha = importance(run, ids)[..., 0].mean(1)
  close = functools.partial(pytest.approx, rel=1e-4, abs=1e-5)

  for row in rows:
    at = row['block'] - 1, row['head'] - 1
    assert row['importance'] == near(alpha[at])
    for name, x in found.items():
      of_head = x[at]
      of_queries = [of_head[:, t, 1 : t + 1].mean() for t in range(1, 7)]
      assert row[f'{name}_first'] == close(of_head[:, 1:, 0].mean())
      assert row[f'{name}_others'] == close(np.mean(of_queries))

  with_maps = [row for row in rows if 'cosine' in row]

  assert [(row['block'], row['head']) for row in with_maps] == [(1, 3), (2, 2)]
  for row in with_maps:
    assert row['averaged'] == 'mean of 4 sequences'
    for name, x in found.items():
      expected = x[row['block'] - 1, row['head'] - 1].mean(0)
      assert_allclose(row[name], expected, atol=7e-5)  # rows hold four digits


def test_maps_of_two_heads_with_sinks_and_two_without():
  run = small_run(sharp=3.0)
  ids = tokens()
  weights = maps(run, ids).mean(1)
  alpha = importance(run, ids)[..., 0].mean(1)
  rows = sj.analyse('maps', run, ids).rows
  ordered = np.sort(alpha, None)

  found = [row['importance'] for row in rows]

  assert found == near([*ordered[:-3:-1], *ordered[1::-1]])

  for row in rows:
    expected = weights[row['block'] - 1, row['head'] - 1]
    assert_allclose(row['map'], expected, atol=6e-5)

  [one] = sj.analyse('maps', run, ids[:1], heads=('2.3',)).rows

  assert_allclose(one['map'], maps(run, ids[:1])[1, 0, 2], atol=6e-5)
  assert one['averaged'] == 'one sequence'
  assert 'raw_map' not in one

  with pytest.raises(ValueError, match="--heads.*'3.1'"):  # block 3 has no attention
    sj.analyse('maps', small_run(layers=4, pattern=HYBRID), ids, heads=('3.1',))


def test_maps_whose_rows_need_not_sum_to_one_are_shown_raw_too():
  run = small_run(attention=SIGMOID)
  ids = tokens()
  [row] = sj.analyse('maps', run, ids, heads=('1.2',)).rows
  recorded = run.record(ids, sj.RecordOptions(attention=sj.maps)).layers.attention
  raw = np.asarray(recorded.weights_BxHxTxT)[0, :, 1].mean(0)

  assert_allclose(row['raw_map'], raw, atol=6e-5)
  assert_allclose(row['map'], maps(run, ids)[0, :, 1].mean(0), atol=6e-5)


@pytest.mark.parametrize(
  'changes',
  [
    {},
    dict(attention=SIGMOID, kv_heads=4),
    dict(attention=sj.AttentionSpec(kv_bias='SinkLogit()')),
    dict(attention=sj.AttentionSpec(mask='Window(size=4)')),
  ],
  ids=['softmax', 'sigmoid', 'logit', 'window'],
)
def test_the_last_query(changes):
  run = small_run(**changes)
  ids = tokens()
  heads = maps(run, ids)[..., -1, 0].mean(1)  # (N, H)
  rows = sj.analyse('last_query', run, ids, batch_size=3).rows

  assert [row['layer'] for row in rows] == [0, 1]

  close = functools.partial(assert_allclose, rtol=1e-4, atol=1e-6)

  close([row['attention'] for row in rows], heads.mean(1))
  close([row['deviation'] for row in rows], heads.std(1))


def test_positions_are_those_of_edited_maps():
  run = dataclasses.replace(small_run(sharp=4.0, attention=LEARNED), name='gpt2-xl')
  options = dict(sequences=6, positions=(2, 5, 30, 99), epsilon=0.3)
  result = sj.analyse('positions', run, **options)
  rows = {(row['change'], row['position']): row for row in result.rows}

  edits = itertools.product(('replaced', 'swapped'), (2, 5, 30))

  assert list(rows) == [('', 1), *edits]

  inputs = random_tokens(258, sequences=6, tokenizer=run.tokenizer, repeat=True)
  ids = inputs.tokens

  for (change, t), row in rows.items():
    table = np.array(run.params['positions'])
    order = np.arange(len(table))
    order[0] = t - 1
    if change == 'swapped':
      order[t - 1] = 0
    edited = dataclasses.replace(run, params=run.params | {'positions': table[order]})
    rate = 100 * (importance(edited, ids) > 0.3).mean((0, 1, 2))
    assert row['sink_1'] == pytest.approx(rate[0], abs=1e-4)
    assert ('sink_t' in row) == bool(change)
    if change:
      assert row['sink_t'] == pytest.approx(rate[t - 1], abs=1e-4)

  assert len({row['sink_1'] for row in rows.values()}) > 1  # the edits have different effects
  assert rows['', 1]['paper_sink_1'] == 62.28  # Table 7
  assert rows['swapped', 5]['paper_sink_1'] == 1.44
  assert rows['swapped', 5]['paper_sink_t'] == 57.63
  assert rows['swapped', 30]['paper_sink_t'] == 50.22
  assert 'paper_sink_t' not in rows['swapped', 2]

  for changed in (
    dict(epsilon=0.2),
    dict(inputs='random'),
    dict(bos='force'),
  ):
    other = sj.analyse('positions', run, sequences=2, positions=(5,), **changed)
    columns = {key for row in other.rows for key in row}
    assert not any(key.startswith('paper') for key in columns)

  with pytest.raises(ValueError, match='learned position'):
    sj.analyse('positions', small_run(), tokens())
  with pytest.raises(ValueError, match='--positions=30'):
    sj.analyse('positions', run, tokens(), positions=(30,))
