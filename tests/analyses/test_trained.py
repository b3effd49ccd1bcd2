"""The analyses of trained runs against computations on full maps and plain parameters."""

import dataclasses
import json

import numpy as np
import pytest
from numpy.testing import assert_allclose

import sink_jax as sj
from sink_jax.analyses import trained
from sink_jax.analyses.trained import analyse_run, applicable, write_analyses
from sink_jax.data.dataset import open_data
from sink_jax.models.config import Layer
from sink_jax.models.record import states
from sink_jax.train.loop import train
from tests.analyses.numpy_decoder import forward, nats
from tests.analyses.small import near
from tests.random_params import random_params
from tests.train import runs


def untrained(scale=3.0, **changes):
  """(run, experiment, data): the small run before training, with sharpened attention."""
  experiment = runs.config(**changes)
  data = open_data(experiment.data)
  config = experiment.model_config()
  params = random_params(config)
  kernel = params['blocks']['attention']['query']['kernel']
  params['blocks']['attention']['query']['kernel'] = kernel * scale
  return sj.Run(config, params, probe_tokens=data.probe_tokens(10, 16)), experiment, data


def maps_of(run, tokens):
  """Attention weights (N, S, H, T, T), which need not sum to one."""
  options = sj.RecordOptions(attention=sj.maps)
  parts = [run.record(row, options).layers.attention for row in tokens[:, None]]
  return np.concatenate([part.weights_BxHxTxT for part in parts], 1).astype(np.float64)


def cross_entropy(run, batches):
  """Nats per token, in NumPy float64."""
  total = weight = 0
  for batch in batches:
    losses = nats(run.logits(batch.tokens), batch.targets)
    total = total + (losses * batch.weights).sum()
    weight = weight + batch.weights.sum()
  return total / weight


def test_a_finished_run_gets_its_file_once(tmp_path, monkeypatch):
  config = runs.config(
    attention__kv_bias='KBias()',
    attention__mask='Window(size=4)',
    steps=3,
    probe__every=0,
    validation__every=0,
  )
  train(config, tmp_path, show_progress=False)
  data = config.data
  write_analyses(tmp_path, data)
  found = json.loads((tmp_path / 'analyses.json').read_text())

  assert set(found) == {'removed', 'window'}
  assert found['removed']['what'] == 'the key bias k*'
  # The loss before removal is the loss that training recorded.
  expected = runs.rows(tmp_path, 'valid')[-1]['valid']
  assert found['removed']['valid_loss_before'] == pytest.approx(expected, rel=1e-6)

  monkeypatch.setattr(trained, 'load_run', None)  # an existing file stays, and the run is not read
  before = (tmp_path / 'analyses.json').stat().st_mtime_ns
  write_analyses(tmp_path, data)

  assert (tmp_path / 'analyses.json').stat().st_mtime_ns == before

  (tmp_path / 'analyses.json').unlink()
  status = json.loads((tmp_path / 'status.json').read_text())
  (tmp_path / 'status.json').write_text(json.dumps(status | {'status': 'diverged'}))
  write_analyses(tmp_path, data)

  assert not (tmp_path / 'analyses.json').exists()


@pytest.mark.parametrize(
  'spec, names',
  [
    ({}, ['first_token_chain']),
    (dict(kv_bias='VBias()'), ['removed']),
    (dict(mask='Window(size=15)'), ['window', 'first_token_chain']),
    (dict(mask='Window(size=16)'), ['first_token_chain']),
    (dict(mask='Prefix()'), ['prefix']),
    (dict(similarity='Sigmoid()', normalizer='RowSum(eps=1e-8)'), ['first_token_chain']),
    (dict(similarity='Sigmoid()', normalizer='Unnormalized()'), []),
    (dict(normalizer='PNorm()'), []),
  ],
)
def test_what_applies(spec, names):
  config = sj.sized('tiny', vocab_size=11, attention=sj.AttentionSpec(**spec))
  assert [*applicable(config, 16)] == names
  assert [*applicable(sj.sized('tiny', vocab_size=11, sink_tokens=1), 16)] == ['removed']


@pytest.mark.parametrize(
  'base, block, names',
  [('Causal()', sj.Prefix(), []), ('Window(size=4)', sj.Causal(), ['first_token_chain'])],
)
def test_blocks_that_differ_have_no_window_or_prefix_in_common(base, block, names):
  config = sj.sized(
    'tiny',
    vocab_size=11,
    pattern=(Layer(), Layer(mask=block)),
    attention=sj.AttentionSpec(mask=base),
  )
  assert [*applicable(config, 16)] == names


@pytest.mark.parametrize(
  'changes, what, tokens',
  [
    (dict(attention__kv_bias='KVBias()'), 'k* and v*', 2**17),
    (dict(model__sink_tokens=1), 'x*', 5 * 16),
  ],
)  # of a batch of eight, four sequences at a time
def test_removed(monkeypatch, changes, what, tokens):
  run, experiment, data = untrained(validation__batches=3, **changes)
  monkeypatch.setattr(trained, '_TOKENS_AT_A_TIME', tokens)
  found = analyse_run(run, experiment, data)['removed']

  assert what in found['what']

  # The bare model is built from the run's parameters, without the help of `without_bias`.
  blocks = dict(run.params['blocks'])
  blocks['attention'] = {n: blocks['attention'][n] for n in ('query', 'key', 'value', 'out')}
  params = {n: run.params[n] for n in ('embed', 'unembed', 'final_norm')} | {'blocks': blocks}
  bare = sj.Run(runs.config().model_config(), params)
  alpha = sj.importance(maps_of(bare, run.probe_tokens))

  expected = 100 * (alpha[..., 0] > 0.3).mean()
  assert found['sink_1'] == pytest.approx(expected)
  expected = alpha[..., 0].mean(1).max()
  assert found['largest_importance'] == near(expected)

  same = data.validation(experiment.batch_size, 3)['valid']
  assert found['valid_loss'] == near(cross_entropy(bare, same))
  assert found['valid_loss_before'] == near(cross_entropy(run, same))
  assert abs(found['valid_loss'] - found['valid_loss_before']) > 1e-3


@pytest.mark.parametrize(
  'size, changes',
  [
    (1, {}),
    (12, dict(attention__position='Nope()')),
    (5, dict(attention__similarity='Sigmoid()', attention__normalizer='Unnormalized()')),
  ],
)
def test_window(size, changes):
  run, experiment, data = untrained(attention__mask=f'Window(size={size})', **changes)
  found = trained.window(run, experiment, lambda: data)
  weights = maps_of(run, run.probe_tokens[:8])
  a = (weights / (weights.sum(-1, keepdims=True) + 1e-8)).mean((0, 1, 2))
  absolute = [a[i - 1, 0] for i in range(2, size + 1)]
  relative = [a[i - 1, i - size] for i in range(size + 1, 17)]  # token i - w + 1

  assert found['size'] == size
  assert found['length'] == 16
  assert found['sequences'] == 8
  assert found['inputs'] == 'probe'
  assert found['uniform'] == 1 / size
  assert found['relative_first'] == near(np.mean(relative))

  if size == 1:
    assert found['absolute_first'] is None
    assert found['relative_first'] == pytest.approx(1)
  else:
    assert found['absolute_first'] == near(np.mean(absolute))
    expected = np.mean(1 / np.arange(2, size + 1))
    assert found['absolute_uniform'] == pytest.approx(expected)


def test_prefix():
  run, experiment, data = untrained(attention__mask='Prefix(length=3)')
  found = analyse_run(run, experiment, data)['prefix']
  alpha = sj.importance(maps_of(run, run.probe_tokens))  # (N, S, H, T)

  assert found['length'] == 3

  places = [head[:8].argmax() for head in alpha.reshape(-1, 16) if head[:8].max() > 0.3]
  assert 0 < len(places) < alpha[..., 0].size
  expected = np.mean([k < 3 for k in places])
  assert found['strongest_in_prefix'] == pytest.approx(expected)
  assert 0 < found['strongest_in_prefix'] < 1


def test_first_token_chain():
  run, experiment, data = untrained(model__dtype='bfloat16')
  found = analyse_run(run, experiment, data)['first_token_chain']

  assert found['largest_relative_difference'] < 1e-6

  # The states equal the chain of MLPs of Section 3.1.
  float32 = dataclasses.replace(run, config=dataclasses.replace(run.config, dtype='float32'))
  hidden = float32.record(run.probe_tokens, sj.RecordOptions(hidden=states)).layers.hidden[:, :, 0]

  expected = forward(float32, run.probe_tokens[:, :1])[1][:, :, 0]  # a text of one token
  assert_allclose(hidden, expected, rtol=1e-4, atol=1e-5)

  # The difference is large where it should be: scores count if rows do not sum to one, and other
  # tokens count under a prefix.
  for changes in (
    dict(similarity='Sigmoid()', normalizer='Unnormalized()'),
    dict(mask='Prefix(length=3)'),
  ):
    config = dataclasses.replace(run.config, attention=sj.AttentionSpec(**changes))
    other = dataclasses.replace(run, config=config)
    assert trained.first_token(other)['largest_relative_difference'] > 0.01


@pytest.mark.parametrize(
  'options',
  [
    dict(norm_location='post'),
    dict(kv_heads=2, attention=sj.AttentionSpec(value='ValueScale()')),
    dict(
      combine_heads='add',
      attention=sj.AttentionSpec('Sigmoid()', 'RowSum()', mask='Window(size=2)'),
    ),
    dict(attention=sj.AttentionSpec('Linear()', 'RowSum()', 'EluPlusOne()', head='HeadNorm()')),
  ],
  ids=str,
)
def test_the_first_token_of_other_architectures_is_a_chain(options):
  config = sj.ModelConfig(
    **dict(
      layers=3,
      d_model=16,
      heads=4,
      ffn_hidden=24,
      vocab_size=11,
    )
    | options
  )
  tokens = np.random.default_rng(0).integers(0, 11, (2, 9))
  run = sj.Run(config, random_params(config), probe_tokens=tokens)

  assert trained.first_token(run)['largest_relative_difference'] < 1e-5
