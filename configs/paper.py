"""Every training experiment of the paper: {experiment: {trial: what differs from the default run}}.

  python -m sink_jax sweep --config=configs/paper.py --budget=desk --only="window-*" \\
    --workdir=runs/desk

Figures 4, 7, 8, 28 and 29 show the course of these runs, and need no further trials. A sweep trains
in this order: first the main results of the paper, last the 1B models.
"""

from ml_collections import ConfigDict

from configs import budget as budgets
from configs.base import attention
from sink_jax.attention.extra_key_value import KBias, KVBias, VBias
from sink_jax.attention.mask import Prefix, Window
from sink_jax.attention.normalizer import AbsFloor, Normalizer, PNorm, RowSum, Unnormalized
from sink_jax.attention.per_token import EluPlusOne, FeatureMap, Identity, Mlp
from sink_jax.attention.position import Alibi, Learned, Nope, Relative, Sinusoidal
from sink_jax.attention.similarity import Exp, Linear, Sigmoid, Similarity
from sink_jax.component import Component
from sink_jax.data.token_edits import FixedToken, RandomTokens


def _operation(
  similarity: Similarity = Linear(),
  normalizer: Normalizer = Unnormalized(),
  feature_map: FeatureMap = Identity(),
) -> dict[str, Component]:
  return attention(similarity=similarity, normalizer=normalizer, feature_map=feature_map)


_ROW_SUM, _ABS_FLOOR = RowSum(eps=1e-08), AbsFloor(1.0)
SIGMOID = _operation(Sigmoid())
_LARGE = {'model.size': '1b', 'steps': 40_000}
# The text gives p only for softmax, and Figure 29 gives it for sigmoid; here both have the same
# values.
_P = {'quarter': 0.25, 'third': 1 / 3, 'half': 0.5, '2': 2.0, '3': 3.0, '4': 4.0}

EXPERIMENTS = {
  # Section 4, Figure 4 (middle), and the baseline of every table.
  'default': {'default': {}},
  # Table 4, Figure 7 (middle).
  'biases': {
    'sink-token': {'model.sink_tokens': 1},
    'kv-bias': attention(kv_bias=KVBias()),
    'k-bias': attention(kv_bias=KBias()),
    'v-bias': attention(kv_bias=VBias()),
  },
  # Section 7.4, Tables 6 and 15, Figure 8; softmax is the default.
  'attention_operation': {
    'sigmoid': SIGMOID,
    'sigmoid-normalized': _operation(Sigmoid(), _ROW_SUM),
    'elu': _operation(EluPlusOne()),
    'elu-normalized': _operation(EluPlusOne(), _ROW_SUM),
    'elu-kernel': _operation(feature_map=EluPlusOne()),
    'elu-kernel-normalized': _operation(Linear(), _ROW_SUM, EluPlusOne()),
    'identity': _operation(),
    'identity-normalized': _operation(Linear(), _ABS_FLOOR),
    'mlp': _operation(feature_map=Mlp()),
    'mlp-normalized': _operation(Linear(), _ABS_FLOOR, Mlp()),
  },
  # Table 9, Figure 4 (right). The last two are only in the official code
  # (sail-sg/Attention-Sink).
  'learning_rate': {
    'lr-8e-4-10k': {'optimizer.learning_rate': 8e-4, 'steps': 10_000},
    'lr-8e-4': {'optimizer.learning_rate': 8e-4},
    'lr-2e-4': {'optimizer.learning_rate': 2e-4},
    'lr-2e-4-40k': {'optimizer.learning_rate': 2e-4, 'steps': 40_000},
    'lr-1e-4': {'optimizer.learning_rate': 1e-4},
    'lr-1e-4-80k': {'optimizer.learning_rate': 1e-4, 'steps': 80_000},
    'lr-1e-3': {'optimizer.learning_rate': 1e-3},
    'lr-1e-5-80k': {'optimizer.learning_rate': 1e-5, 'steps': 80_000},
  },
  # Table 10 (left): sequences per batch, at equal steps.
  'batch_size': {f'batch-{size}': {'batch_size': size} for size in (128, 256, 1024)},
  # Table 2; 10 is only in the official code.
  'weight_decay': {
    f'weight-decay-{decay:g}': {'optimizer.weight_decay': float(decay)}
    for decay in (0, 0.001, 0.01, 0.5, 1, 2, 5, 10)
  },
  # Section 5, Figures 5 (right) and 28: unique tokens, at equal steps. The default sees all of
  # its data.
  'data_amount': {
    f'data-{name}': {'data.max_tokens': tokens}
    for name, tokens in (
      ('5b', 5_000_000_000),
      ('2.5b', 2_500_000_000),
      ('500m', 500_000_000),
      ('200m', 200_000_000),
      ('100m', 100_000_000),
      ('50m', 50_000_000),
    )
  },
  # Section 5. The paper does not say how many its "more random tokens" are: the last three.
  'random_tokens': {
    name: {'data.interventions': (RandomTokens(first=first, last=last),)}
    for name, first, last in (
      ('random-1', 1, 1),
      ('random-1-2', 1, 2),
      ('random-2', 2, 2),
      ('random-1-4', 1, 4),
      ('random-1-16', 1, 16),
      ('random-1-64', 1, 64),
    )
  },
  # Table 10 (right).
  'fixed_token': {
    f'fixed-{position}': {'data.interventions': (FixedToken(position),)} for position in (1, 2, 3)
  },
  # Section 6, Figure 5: all queries see the first tokens.
  'prefix': {f'prefix-{length}': attention(mask=Prefix(length)) for length in (2, 3, 4, 5, 10)},
  # Section 6, Figure 6.
  'window': {
    f'window-{size}': attention(mask=Window(size)) for size in (32, 64, 128, 256, 512, 1024)
  },
  # Table 3. `relative` adds the bucket of the distance, as the official code does;
  # `relative-decreasing` subtracts it, as Proposition 2 assumes.
  'position': {
    'nope': attention(position=Nope()),
    'absolute': attention(position=Sinusoidal()),
    'learned': attention(position=Learned(2048)),
    'relative': attention(position=Relative()),
    'relative-decreasing': attention(position=Relative(decreasing=True)),
    'alibi': attention(position=Alibi()),
  },
  # Section 7.2, Figure 7 (left).
  'norm_location': {'post-norm': {'model.norm_location': 'post'}},
  # Table 5, Figure 7 (right): K biases with a fixed value m v' or m v''.
  'fixed_value': {
    f'value-{value}-{norm}': attention(kv_bias=KBias(value=value, value_norm=float(norm)))
    for value in ('first', 'uniform')
    for norm in (1, 5, 20)
  },
  # Table 13: K biases of which d_a dimensions are learned, and the others zero.
  'learnable_dims': {
    f'learnable-dims-{d_a}': attention(kv_bias=KBias(learnable_dims=d_a))
    for d_a in (1, 2, 4, 8, 16, 32, 64)
  },
  # Table 12: fewer heads, outputs of heads added; biases that all heads of a layer share.
  'heads': {f'heads-{heads}': {'model.heads': heads} for heads in (4, 2, 1)}
  | {'heads-added': {'model.combine_heads': 'add'}},
  'head_sharing': {
    'kv-bias-shared': attention(kv_bias=KVBias(shared=True)),
    'k-bias-shared': attention(kv_bias=KBias(shared=True)),
  },
  # Table 14 (left): softmax whose rows sum to alpha.
  'normalization_scale': {
    f'scale-{alpha:g}': attention(normalizer=RowSum(scale=alpha)) for alpha in (2.0, 0.2, 0.1, 0.05)
  },
  # Table 14 (right).
  'sigmoid_optimization': {
    **{
      f'sigmoid-wd-{decay:g}': SIGMOID | {'optimizer.weight_decay': float(decay)}
      for decay in (0, 0.5, 1)
    },
    **{
      f'sigmoid-lr-{rate}': SIGMOID | {'optimizer.learning_rate': float(rate)}
      for rate in ('1e-3', '1e-4')
    },
  },
  # Equations 43 and 44, Figure 29.
  'p_norm': {
    f'{name}-p-{word}': attention(similarity=similarity, normalizer=PNorm(p))
    for name, similarity in (('softmax', Exp()), ('sigmoid', Sigmoid()))
    for word, p in _P.items()
  },
  # Table 11; SwiGLU is the default.
  'ffn': {
    f'ffn-{name}': {'model.ffn': name} for name in ('relu', 'gelu', 'swish', 'reglu', 'geglu')
  },
  # Section 7.4, Figure 8 (right).
  'one_billion': {'1b-softmax': _LARGE, '1b-sigmoid': _LARGE | SIGMOID},
}
TRIALS = {trial: changes for trials in EXPERIMENTS.values() for trial, changes in trials.items()}


def get_config(name: str = '', budget: str = 'full', protocol: str = 'paper') -> ConfigDict:
  return budgets.config(TRIALS, name, budget, protocol)
