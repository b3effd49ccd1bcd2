"""The optimisers against their formulas in NumPy float64."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sink_jax as sj
from sink_jax.component import from_string, registry
from sink_jax.models.config import Experts, Layer, Mamba
from sink_jax.models.sizes import parameter_shapes, sized
from sink_jax.train.optimizer import (
  AdamW,
  Muon,
  OptimizerConfig,
  OrthoAdam,
  Sgd,
  UpdateRule,
  learning_rate,
  make_optimizer,
)


def adam_directions(rule, gradients):
  """Adam's scaled gradients, one per step; Kingma and Ba 2015, Algorithm 1."""
  m, v = 0, 0
  for t, g in enumerate(gradients, 1):
    m, v = rule.b1 * m + (1 - rule.b1) * g, rule.b2 * v + (1 - rule.b2) * g**2
    yield m / (1 - rule.b1**t) / (np.sqrt(v / (1 - rule.b2**t)) + rule.eps)


def sgd_directions(rule, gradients):
  """The sum of what remains of older gradients, as in torch.optim.SGD."""
  velocity = 0
  for g in gradients:
    velocity = rule.momentum * velocity + g
    yield velocity


def muon_directions(rule, gradients):
  """Jordan et al. 2024 for matrices (..., in, out), with optax's correction of the momentum."""
  m = 0
  for t, g in enumerate(gradients, 1):
    m = rule.momentum * m + (1 - rule.momentum) * g
    nesterov = rule.momentum * m / (1 - rule.momentum ** (t + 1)) + (1 - rule.momentum) * g / (
      1 - rule.momentum**t
    )
    direction = np.empty_like(nesterov)
    for index in np.ndindex(g.shape[:-2]):
      x = nesterov[index]
      x = x / np.sqrt((x**2).sum())
      for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
      rows, columns = x.shape
      direction[index] = x * (
        max(1, columns / rows) ** 0.5 if rule.rms is None else rule.rms * max(rows, columns) ** 0.5
      )
    yield direction


def ortho_adam_directions(rule, gradients, rotations):
  """Kaul et al., Algorithm 1, on the flat parameter of each layer, with one Q for all of it."""
  gradients = np.array(gradients)
  layers = gradients.reshape(len(gradients), 2, -1).swapaxes(0, 1)
  turned = []
  for layer, g in enumerate(layers):
    q = np.asarray(rotations['columns'])[layer]
    if 'rows' in rotations:
      q = np.kron(np.asarray(rotations['rows'])[layer], q)
    np.testing.assert_allclose(q @ q.T, np.eye(len(q)), atol=1e-12)
    turned.append([q.T @ step for step in adam_directions(rule, [q @ step for step in g])])
  return np.swapaxes(turned, 0, 1).reshape(gradients.shape)


RULES = [
  AdamW(b1=0.8, b2=0.9, eps=1e-3),
  Sgd(momentum=0.5),
  Muon(),
  Muon(momentum=0.8, rms=None, b1=0.8, b2=0.9, eps=1e-6),
  OrthoAdam(b1=0.8, b2=0.9, eps=1e-6, seed=3),
]


def test_every_rule_has_a_formula_here_and_a_line_of_its_page():
  page = (Path(__file__).parents[2] / 'docs' / 'training.md').read_text()
  rules = [cls for cls in registry(UpdateRule).values() if cls.__module__ == AdamW.__module__]

  assert {type(rule) for rule in RULES} == set(rules)
  assert all(f'| `{cls.__name__}(' in page for cls in rules)


def draws(count, *shape):
  rng = np.random.default_rng(count)
  return [rng.standard_normal(shape) for _ in range(count)]


@pytest.mark.parametrize('rule', RULES, ids=str)
def test_three_updates_are_those_of_the_formula(rule):
  """Includes clipping by the norm of all gradients, and decoupled decay as in torch.optim.AdamW."""
  shapes = {'wide': (2, 3, 5), 'tall': (2, 5, 3), 'gain': (2, 4)}
  # Needs float64, because Newton-Schulz magnifies roundings along small singular values 480 times.
  with jax.enable_x64(True):
    tree = lambda leaves: {
      'blocks': {name: {'gain' if name == 'gain' else 'kernel': x} for name, x in leaves.items()}
    }
    steps = {name: draws(3, *shape) for name, shape in shapes.items()}
    clipped = {
      name: [
        g * min(1, 6 / np.sqrt(sum((x[t] ** 2).sum() for x in steps.values())))
        for t, g in enumerate(gradients)
      ]
      for name, gradients in steps.items()
    }
    config = OptimizerConfig(rule=rule, learning_rate=0.1, weight_decay=0.3, clip=6.0)
    p = tree({name: draws(4, *shape)[3] for name, shape in shapes.items()})
    optimizer = make_optimizer(config, 0.1)
    state = optimizer.init(p)
    expected = dict(p['blocks'])
    if isinstance(rule, OrthoAdam):
      rotations = state[1].rotations['blocks']
      directions = {
        name: ortho_adam_directions(rule, g, next(iter(rotations[name].values())))
        for name, g in clipped.items()
      }
    else:
      formula = {AdamW: adam_directions, Sgd: sgd_directions, Muon: muon_directions}[type(rule)]
      of = lambda name: adam_directions if isinstance(rule, Muon) and name == 'gain' else formula
      directions = {name: list(of(name)(rule, g)) for name, g in clipped.items()}
    for t in range(3):
      updates, state = optimizer.update(tree({n: g[t] for n, g in steps.items()}), state, p)
      p = optax.apply_updates(p, updates)
      for name in shapes:
        [(leaf, before)] = expected[name].items()
        expected[name] = {leaf: before * (1 - 0.1 * 0.3) - 0.1 * directions[name][t]}
        np.testing.assert_allclose(
          p['blocks'][name][leaf], expected[name][leaf], rtol=1e-6, atol=1e-9
        )


def paths(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator='.')
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_muon_takes_the_matrices_of_hidden_layers():
  shapes = parameter_shapes(
    sized(
      'tiny',
      vocab_size=10,
      embedding_dim=8,
      biases=('qkv', 'ffn'),
      norm='layernorm',
      pattern=(Layer(experts=Experts(4, 2)), Layer(mamba=Mamba(32, 4, 4, 4))),
      attention=sj.AttentionSpec('Exp()', 'RowSum()', 'Mlp()', kv_bias='KBias()'),
    )
  )
  state = jax.eval_shape(make_optimizer(OptimizerConfig(rule=Muon()), 0.1).init, shapes)
  parts = {
    name: {path.partition('.mu.')[2] for path in paths(state) if f'.{name}.' in path} - {''}
    for name in ('muon', 'adamw')
  }
  assert parts['muon'] | parts['adamw'] == paths(shapes)
  kernels = {path for path in paths(shapes) if path.endswith('.kernel')}
  assert {'unembed.kernel', 'blocks.layer1.mamba.conv.kernel'} == kernels & parts['adamw']
  assert parts['muon'] - kernels == {f'blocks.layer0.attention.feature_map_w{i}' for i in (1, 2)}
  assert {'blocks.layer0.ffn.w1.kernel', 'embed_in.kernel'} < parts['muon']


def test_rotations_are_of_a_seed_a_path_and_a_layer():
  w = {'w': jnp.ones((2, 3, 4))}

  def rotations(rule, **others):
    optimizer = make_optimizer(OptimizerConfig(rule=rule, clip=0.0), 0.1)
    return optimizer.init({'blocks': w, **others})[1].rotations

  first = rotations(OrthoAdam())['blocks']['w']
  more = rotations(OrthoAdam(b1=0.5, longest=4), embed=w['w'])
  jax.tree.map(np.testing.assert_array_equal, more['blocks']['w'], first)
  other = rotations(OrthoAdam(seed=1))['blocks']['w']
  for side in ('rows', 'columns'):
    q = first[side][0]
    for different in (first[side][1], other[side][0], more['embed'][side][0]):
      assert jnp.abs(q - different).max() > 0.1
  assert set(rotations(OrthoAdam(longest=3))['blocks']['w']) == {'rows'}


@pytest.mark.parametrize(
  'text, words',
  [
    ('Adam()', 'Choices: .*AdamW.*Muon.*OrthoAdam.*Sgd'),
    ('AdamW(b1=1.0)', 'b[12] must be in'),
    ('AdamW(eps=0.0)', 'eps must be > 0'),
    ('Sgd(momentum=1.0)', 'momentum must be in'),
    ('Muon(rms=0.0)', 'rms must be > 0, or None'),
  ],
)
def test_bad_rules_are_explained(text, words):
  with pytest.raises(ValueError, match=words):
    from_string(UpdateRule, text)


def test_decay_on_matrices_spares_embeddings_gains_and_biases():
  config = sized(
    'tiny',
    vocab_size=10,
    attention=sj.AttentionSpec(
      'Exp()',
      'RowSum()',
      'Mlp()',
      'Learned(max_length=8)',
      kv_bias='KBias()',
      head='HeadGate(opening=0.25)',
    ),
  )
  ones = jax.tree.map(lambda x: jnp.ones(x.shape), parameter_shapes(config))
  zero = jax.tree.map(jnp.zeros_like, ones)
  decayed = {}
  for decay in ('matrices', 'all'):
    settings = OptimizerConfig(decay=decay)
    optimizer = make_optimizer(settings, settings.learning_rate)
    updates, _ = optimizer.update(zero, optimizer.init(ones), ones)
    decayed[decay] = paths(jax.tree.map(lambda u: u if jnp.any(u != 0) else None, updates))
  everything = paths(ones)
  assert decayed['all'] == everything
  spared = 'embed positions final_norm.gain blocks.norm1.gain blocks.norm2.gain '
  spared += 'blocks.attention.kv_bias_key blocks.attention.head_bias'
  assert everything - decayed['matrices'] == set(spared.split())


@pytest.mark.parametrize(
  'options',
  [
    {},
    dict(schedule='constant', warmup_steps=0),
    dict(warmup_steps=5, final_fraction=0.0),
    dict(schedule='constant', warmup_steps=1, learning_rate=0.02),
  ],
)
def test_the_schedule_is_optax_s(options):
  config, steps = OptimizerConfig(**options), 120
  peak, warmup = config.learning_rate, config.warmup_steps
  after = optax.constant_schedule(peak)
  if config.schedule == 'cosine':
    after = optax.cosine_decay_schedule(peak, steps - warmup, config.final_fraction)
  warm = optax.linear_schedule(peak / max(1, warmup), peak, max(1, warmup - 1))
  theirs = optax.join_schedules([warm, after], [warmup]) if warmup else after
  # Optax computes this in float32.
  np.testing.assert_allclose(
    [learning_rate(config, steps, s) for s in range(steps)],
    [float(theirs(s)) for s in range(steps)],
    rtol=1e-5,
    atol=1e-9,
  )
