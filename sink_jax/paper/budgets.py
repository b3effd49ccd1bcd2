"""Budgets: the rules by which a trial of the paper is trained at a lower cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from sink_jax.arguments import check_known
from sink_jax.attention.extra_key_value import ExtraKeyValue, KBias
from sink_jax.attention.mask import Mask, Window
from sink_jax.attention.position import Learned, Position
from sink_jax.component import from_string
from sink_jax.data.token_edits import RandomTokens, TokenEdit
from sink_jax.train.config import NotExpressible

_Config = Mapping[str, Any]  # the nested config of a trial at the paper's scale
_PAPER_TOKENS = 5_000_000_000  # unique ones, for every trial that does not limit them further
_CONTEXT, _HEAD_DIM = 64, 16  # of the small model
# The model and the text of the budgets for two CPU cores, and how often a run is measured.
_SMALL = {
    'model.size': 'tiny',
    # Null: the vocabulary is that of the tokenizer, and not the paper's padded one.
    'model.vocab_size': None,
    'model.dtype': 'float32',
    'data.source': 'Stdlib()',
    'data.tokenizer': 'TrainedBpe(vocab_size=512)',
    'data.context': _CONTEXT,
    'data.valid_fraction': 0.05,
    'checkpoints_kept': 1,
    'optimizer.warmup_steps': 100,
    'validation.batches': 20,
}
# Factors on the paper's values. The rate and the decay are larger because the steps are few and
# the model is small: with the paper's own no sink emerges.
_BATCH, _HEADS = 16 / 512, 4 / 8
_LEARNING_RATE, _WEIGHT_DECAY = 50, 5
# Without it no sink emerges in these steps: a chunk begins anywhere in a text.
_FIRST_TOKEN = 'FixedToken(position=1)'


@dataclasses.dataclass(frozen=True)
class Budget:
  """How a trial is changed to cost less.

  changes: returns the dotted keys to set. rules: what that does, in words, for the dry run and the
  report.
  """

  changes: Callable[[_Config], dict[str, Any]]
  rules: tuple[str, ...]


def scaled(config: _Config, budget: str) -> dict[str, Any]:
  """Dotted keys and values that bring a trial at the paper's scale to a budget.

  Raises:
    ValueError: unknown budget; lists the choices.
    NotExpressible: the trial has no counterpart there, with the reason.
  """
  check_known(budget, BUDGETS, 'Unknown budget')
  return BUDGETS[budget].changes(config)


def _shorter(share: float, config: _Config) -> dict[str, Any]:
  """The paper's models and batches for a share of the steps and of the unique tokens."""
  steps = max(1, round(config['steps'] * share))
  # A short run is probed, validated and saved as many times as its curves need.
  # About twenty points make a curve, if the paper's own interval does not give more.
  often = lambda section: min(config[section]['every'], max(1, steps // 20))
  return {'steps': steps,
          'checkpoint_every': min(config['checkpoint_every'], max(1, steps // 10)),
          'probe.every': often('probe'), 'validation.every': often('validation'),
          'data.max_tokens': round((config['data']['max_tokens'] or _PAPER_TOKENS) * share)}


def _small(share: float, every: int, config: _Config) -> dict[str, Any]:
  """The small model for a share of the paper's steps, probed every so many of them."""
  data, optimizer = config['data'], config['optimizer']
  steps, batch = round(config['steps'] * share), round(config['batch_size'] * _BATCH)
  tokens = config['steps'] * config['batch_size'] * data['context']
  rate = optimizer['learning_rate'] * _LEARNING_RATE
  decay = optimizer['weight_decay'] * _WEIGHT_DECAY
  if rate * decay >= 1:  # decoupled weight decay multiplies every weight by 1 - rate * decay
    raise NotExpressible(f'a step would take away {rate * decay:.0%} of every weight')
  return _SMALL | _small_model(config) | {
      'steps': steps,
      'batch_size': batch,
      'optimizer.learning_rate': rate,
      'optimizer.weight_decay': decay,
      'probe.every': every,
      'validation.every': 5 * every,
      'checkpoint_every': 5 * every,
      # The share of unique tokens among all tokens seen stays, and so do the epochs.
      'data.max_tokens': round(data['max_tokens'] / tokens * steps * batch * _CONTEXT),
      'data.interventions': _small_edits(data['interventions']) or _FIRST_TOKEN}


def _small_model(config: _Config) -> dict[str, Any]:
  """What differs from the small model: the larger model's shapes, numbers of heads, components."""
  model, attention, changes = config['model'], config['attention'], {}
  # Heads of 16 as in the smaller model, and the feed-forward width in the paper's ratio.
  if model['size'] == '1b':
    changes |= {'model.layers': 4, 'model.d_model': 128, 'model.heads': 8, 'model.ffn_hidden': 352}
  # Empty where the size of the model decides, which is already that of the small model.
  if model['heads']:
    heads = model['heads'] * _HEADS
    if heads < 1:
      raise NotExpressible(f'{model["heads"]} of the paper\'s 8 heads would be {heads:g} of 4')
    changes['model.heads'] = round(heads)
  # Components whose numbers mean something else in shorter sequences and narrower heads.
  mask = from_string(Mask, attention['mask'])
  extra = from_string(ExtraKeyValue, attention['kv_bias'])
  if isinstance(mask, Window):
    size = mask.size * _CONTEXT / (context := config['data']['context'])
    if size < 1:
      raise NotExpressible(f'a window of {mask.size} of {context} tokens would be {size:g} of '
                           f'{_CONTEXT}')
    changes['attention.mask'] = repr(Window(size=round(size)))
  if isinstance(from_string(Position, attention['position']), Learned):
    changes['attention.position'] = repr(Learned(max_length=_CONTEXT))
  # Equal is refused, too: with all channels learned, a row of Table 13 would be the plain K bias.
  if isinstance(extra, KBias) and (extra.learnable_dims or 0) >= _HEAD_DIM:
    raise NotExpressible(f'{extra.learnable_dims} learnable dimensions; heads have {_HEAD_DIM}')
  return changes


def _small_edits(text: str) -> str:
  """Edits of the sequences, for shorter ones and for the vocabulary of the small model."""
  parts = [part.strip() for part in text.split(';') if part.strip()]
  for i, part in enumerate(parts):
    edit = from_string(TokenEdit, part)
    if isinstance(edit, RandomTokens):
      if edit.last >= _CONTEXT:
        raise NotExpressible(f'{edit.last} random tokens; sequences have {_CONTEXT} tokens')
      if edit.below:  # the paper's vocabulary; 0 is any token of the smaller one
        parts[i] = repr(dataclasses.replace(edit, below=0))
  return '; '.join(parts)


def _shorter_rules(share: str) -> tuple[str, ...]:
  return ('models, batches, learning rates, weight decays, windows: as in the paper',
          f"steps and unique tokens: {share} of the paper's, so that epochs stay the same",
          'warm-up: 100 steps, as in the paper')


def _small_rules(share: float, steps: str) -> tuple[str, ...]:
  """The rules of `_small` in words; steps: what becomes of the paper's 20,000."""
  taken = share * _LEARNING_RATE * _WEIGHT_DECAY
  return (
      'model: 2 layers, d = 64, 4 heads of 16, FFN 128, float32 (the 1B model: 4 layers, '
      'd = 128, 8 heads, FFN 352)',
      'text: the standard library of the Python that runs, in sequences of 64 tokens of a '
      'byte-pair encoding of 512, trained on it',
      'every sequence begins with a fixed token, unless the trial itself edits the sequences: '
      'without one no sink emerges at this cost',
      f'steps times {share:g} (20,000 become {steps}), sequences per batch times 1/32 (512 become '
      '16)',
      f'learning rate times {_LEARNING_RATE}, weight decay times {_WEIGHT_DECAY}: all steps '
      f"together take away {taken:g} times what the paper's do; with less no sink emerges here",
      'warm-up: 100 steps, as in the paper, of fewer',
      'random tokens: any of the vocabulary, in both protocols',
      "unique tokens where a trial limits them: the paper's share of all tokens seen, so that "
      'epochs stay the same; the others see all of the text',
      "window: the paper's share of the sequence (32 of 2048 becomes 1 of 64)",
      'heads times 1/2; a single head has no counterpart',
      'learnable dimensions of k*: as in the paper, below the 16 of a head; the rest have no '
      'counterpart',
      'positions of fixed and random tokens, prefix lengths, norms of fixed values and buckets '
      'of relative positions: as in the paper')


BUDGETS = {
    'full': Budget(lambda config: {}, ('everything as in the paper',)),
    'quarter': Budget(functools.partial(_shorter, 0.25), _shorter_rules('a quarter')),
    'tenth': Budget(functools.partial(_shorter, 0.1), _shorter_rules('a tenth')),
    # Two CPU cores: `desk`, a minute and a half a trial, is the cheapest setting in which a sink
    # emerges with softmax and with normalised sigmoid (results/baseline); `smoke`, half a minute,
    # shows that everything runs.
    'desk': Budget(functools.partial(_small, 0.2, 100), _small_rules(0.2, '4,000')),
    'smoke': Budget(functools.partial(_small, 0.05, 50), _small_rules(0.05, '1,000')),
}
