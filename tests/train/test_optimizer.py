"""The optimiser against PyTorch's formulas in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sink_jax.component import from_string, registry
from sink_jax.models.sizes import parameter_shapes, sized
from sink_jax.train import optimizer as optimizer_module
from sink_jax.train.optimizer import (
  OptimizerConfig,
  Rates,
  init_optimizer,
  learning_rate_schedule,
  learning_rates,
  make_optimizer,
  peak_rates,
)
from sink_jax.train.update_rule import AdamW, Sgd, UpdateRule


def torch_adamw(config, steps, parameters, gradients):
  """torch.optim.AdamW with torch's clip_grad_norm_, as the official implementation uses them."""
  schedule, rule = learning_rate_schedule(config, steps), config.rule
  p = {k: np.float64(v) for k, v in parameters.items()}
  m, v = ({k: np.zeros_like(x) for k, x in p.items()} for _ in range(2))
  for t, grads in enumerate(gradients, 1):
    total = np.sqrt(sum((g.astype(np.float64)**2).sum() for g in grads.values()))
    clip = min(1, config.clip / total) if config.clip else 1
    lr = float(schedule(t - 1))
    for k in p:
      g = grads[k] * clip
      p[k] = p[k] * (1 - lr * config.weight_decay)
      m[k] = rule.b1 * m[k] + (1 - rule.b1) * g
      v[k] = rule.b2 * v[k] + (1 - rule.b2) * g**2
      mhat, vhat = m[k] / (1 - rule.b1**t), v[k] / (1 - rule.b2**t)
      p[k] = p[k] - lr * mhat / (np.sqrt(vhat) + rule.eps)
  return p


@pytest.mark.parametrize('clip', [0.0, 1.0])
def test_adamw_is_torch_adamw_on_all_parameters(clip):
  rng = np.random.default_rng(0)
  shapes = {'kernel': (3, 4), 'gain': (4,)}
  draw = lambda: {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
  parameters, gradients = draw(), [draw() for _ in range(6)]
  config = OptimizerConfig(learning_rate=0.1, warmup_steps=2, clip=clip, weight_decay=0.3)
  p, state = jax.tree.map(jnp.asarray, parameters), init_optimizer(config, parameters)
  for g, rate in zip(gradients, map(learning_rates(config, 6), range(6))):
    updates, state = make_optimizer(config, Rates(rate, config.weight_decay)).update(g, state, p)
    p = optax.apply_updates(p, updates)
  expected = torch_adamw(config, 6, parameters, gradients)
  for k in shapes:
    np.testing.assert_allclose(p[k], expected[k], rtol=2e-5, atol=1e-6)


def test_sgd_has_no_memory():
  config = OptimizerConfig(rule=Sgd(), learning_rate=0.1, schedule='constant', warmup_steps=0,
                           weight_decay=0.5, clip=0.0)
  optimizer = make_optimizer(config, peak_rates(config))
  p = {'w': jnp.array([2.0])}
  updates, _ = optimizer.update({'w': jnp.array([3.0])}, optimizer.init(p), p)
  np.testing.assert_allclose(updates['w'], -0.1 * (3.0 + 0.5 * 2.0), rtol=1e-6)


def test_sgd_with_momentum_sums_what_is_left_of_older_gradients():
  config = OptimizerConfig(rule=Sgd(momentum=0.5), learning_rate=0.1, clip=0.0, weight_decay=0.0)
  p, state = {'w': jnp.array([2.0])}, init_optimizer(config, {'w': jnp.array([2.0])})
  for gradient, velocity in ((4.0, 4.0), (1.0, 3.0), (-2.0, -0.5)):
    updates, state = make_optimizer(config, peak_rates(config)).update(
        {'w': jnp.array([gradient])}, state, p)
    np.testing.assert_allclose(updates['w'], -0.1 * velocity, rtol=1e-6)


@pytest.mark.parametrize('rule, scaling', [
    (AdamW(b1=0.8, b2=0.9, eps=1e-6), [optax.scale_by_adam(0.8, 0.9, 1e-6)]), (Sgd(), [])])
def test_the_chain_and_its_state_are_those_of_older_checkpoints(rule, scaling):
  config = OptimizerConfig(rule=rule, weight_decay=0.3)
  rates = peak_rates(config)
  older = optax.chain(
      optax.clip_by_global_norm(config.clip), *scaling,
      optax.add_decayed_weights(rates.weight_decay),
      optax.scale_by_learning_rate(lambda _: rates.learning_rate))
  rng = np.random.default_rng(0)
  draw = lambda: {'w': rng.standard_normal((3, 4)).astype(np.float32)}
  p, optimizer = draw(), make_optimizer(config, rates)
  states = [optimizer.init(p), older.init(p)]
  assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
  for gradient in (draw(), draw()):
    (update, states[0]), (expected, states[1]) = (
        chain.update(gradient, state, p) for chain, state in zip((optimizer, older), states))
    np.testing.assert_array_equal(update['w'], expected['w'])


@pytest.mark.parametrize('name', registry(UpdateRule))
def test_a_rule_is_built_again_by_its_repr(name):
  rule = registry(UpdateRule)[name]()
  assert from_string(UpdateRule, repr(rule)) == rule


@pytest.mark.parametrize('text, words', [
    ('Adam()', 'Choices: .*AdamW.*Sgd'), ('AdamW(b1=1.0)', 'b1 and b2 must be in'),
    ('AdamW(eps=0.0)', 'eps must be > 0'), ('Sgd(momentum=1.0)', 'momentum must be in'),
    ('AdamW(beta1=0.9)', 'it takes: b1, b2, eps')])
def test_bad_rules_are_explained(text, words):
  with pytest.raises(ValueError, match=words):
    from_string(UpdateRule, text)


def test_decay_on_matrices_spares_embeddings_gains_and_biases():
  import sink_jax as sj

  config = sized('tiny', vocab_size=10, attention=sj.AttentionSpec(
      'Exp()', 'RowSum()', 'Mlp()', 'Learned(max_length=8)', kv_bias='KBias()',
      head='HeadGate(opening=0.25)'))
  ones = jax.tree.map(lambda x: jnp.ones(x.shape), parameter_shapes(config))
  zero = jax.tree.map(jnp.zeros_like, ones)
  decayed = {}
  for decay in ('matrices', 'all'):
    settings = OptimizerConfig(decay=decay)
    optimizer = make_optimizer(settings, peak_rates(settings))
    updates, _ = optimizer.update(zero, optimizer.init(ones), ones)
    decayed[decay] = {jax.tree_util.keystr(path, simple=True, separator='.')
                      for path, u in jax.tree_util.tree_leaves_with_path(updates)
                      if float(jnp.abs(u).max()) > 0}
  everything = {jax.tree_util.keystr(path, simple=True, separator='.')
                for path, _ in jax.tree_util.tree_leaves_with_path(ones)}
  assert decayed['all'] == everything
  assert everything - decayed['matrices'] == {
      'embed', 'positions', 'final_norm.gain', 'blocks.norm1.gain', 'blocks.norm2.gain',
      'blocks.attention.kv_bias_key', 'blocks.attention.head_bias'}


def test_schedules():
  cosine = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=10), 110)
  values = np.array([float(cosine(s)) for s in range(111)])
  np.testing.assert_allclose(values[:10], np.arange(1, 11) / 10, rtol=1e-6)
  np.testing.assert_allclose(values[10:], 0.1 + 0.45 * (1 + np.cos(np.pi * np.arange(101) / 100)),
                             rtol=1e-5)
  constant = learning_rate_schedule(
      OptimizerConfig(learning_rate=1.0, schedule='constant', warmup_steps=0), 100)
  assert [float(constant(s)) for s in (0, 50, 99)] == [1, 1, 1]


@pytest.mark.parametrize('options', [
    {}, dict(schedule='constant'), dict(schedule='constant', warmup_steps=0),
    dict(warmup_steps=5, final_fraction=0.0), dict(warmup_steps=1, learning_rate=0.02)])
def test_the_learning_rates_of_all_updates_are_the_schedules(options, monkeypatch):
  monkeypatch.setattr(optimizer_module, '_BLOCK', 8)
  config = OptimizerConfig(**options)
  schedule, rate = learning_rate_schedule(config, 20), learning_rates(config, 20)
  # Two roundings of float32 apart: the rates are a fraction times the peak.
  np.testing.assert_allclose([rate(s) for s in range(20)], [float(schedule(s)) for s in range(20)],
                             rtol=3e-7, atol=3e-7 * config.learning_rate)


def test_a_run_that_nobody_means_to_end_computes_the_rates_that_it_needs():
  config = OptimizerConfig(learning_rate=1.0)
  assert learning_rates(config, 10**9)(0) == pytest.approx(0.01)
  assert learning_rates(config, 10**9)(10**9 - 1) == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize('options, words', [
    (dict(schedule='linear'), 'cosine, constant'),
    (dict(learning_rate=0.0), 'learning_rate'), (dict(weight_decay=-1.0), 'weight_decay'),
    (dict(learning_rate=float('nan')), 'learning_rate')])
def test_bad_options_are_explained(options, words):
  with pytest.raises(ValueError, match=words):
    OptimizerConfig(**options)
