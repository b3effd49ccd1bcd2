"""A model in JAX as lm-evaluation-harness asks for one: no torch, no server.

The harness brings the tasks, their prompts and their scores; this file answers how probable a text
is, and hands what is to be generated to `lm_eval_generation`. lm_eval is an optional package, so it
is imported in the function that needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.analyses.lm_eval_generation import generated, settings
from sink_jax.analyses.lm_eval_package import imported
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.evaluate.activations import not_finite
from sink_jax.models.run import Run

_TOKENS_AT_A_TIME = 2048  # whose logits are in memory: 400 MB with GPT-2's vocabulary
_SAY_EVERY = 2000  # endings
_SHORTEST = 32  # tokens; batches are padded to this or to a power of two above it
_LONGEST = 2048  # tokens of a context where nothing bounds it, as in the harness


def language_model(run: Run, tokenizer: TextTokenizer, *, bos: str = 'none',
                   batch_size: int | None = None, max_length: int | None = None,
                   say: Callable[[str], None] = lambda line: None) -> Any:
  """Returns the model as an `lm_eval.api.model.LM`.

  Args:
    run: the model.
    tokenizer: of the model.
    bos: how every context begins: 'none', 'tokenizer' (as it begins a text) or 'force' (one BOS).
    batch_size: sequences at a time; by default as many as fit a fixed number of tokens.
    max_length: tokens that the model reads at most. Longer contexts lose their beginning, and a
      text whose rolling log-likelihood is asked for is read in windows of so many. None for the
      model's learned positions, and where there are none for 2,048 in rolling windows and
      generation, while `loglikelihood` reads texts of any length.
    say: is called with a line of progress.

  Raises:
    ValueError: lm_eval is not installed, there is no BOS where one is asked for, or the model sees
      tokens after the one that it predicts.
  """
  imported()
  tokenizer.with_prefix([], bos)  # refuses a BOS that there is not, before the questions are read
  _check_causal(run)
  from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]  optional
  from lm_eval.utils import (  # pyright: ignore[reportMissingImports]  optional
      get_rolling_token_windows, make_disjoint_window)
  window = max_length or learned_positions(run) or _LONGEST

  class Model(TemplateLM):
    """What tasks of every kind ask for: log-likelihoods, rolling ones, and texts."""

    @property
    def eot_token_id(self):
      """The token that stands before a text without a context: BOS, else EOS."""
      first = tokenizer.eos_ids[:1] if tokenizer.bos_id is None else (tokenizer.bos_id,)
      if not first:
        raise ValueError(f'{tokenizer.name} has neither BOS nor EOS, and a text without a context '
                         'needs one of them before it: name a bos_token in tokenizer_config.json.')
      return first[0]

    @property
    def max_length(self):
      """Tokens of a rolling window."""
      return window

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
      """Ids of a text."""
      ids = tokenizer.encode(string)
      return ids if add_special_tokens is False else tokenizer.with_prefix(ids, bos).tolist()

    def _loglikelihood_tokens(self, requests, **kwargs):
      # A context of spaces alone has moved to the ending as a whole, which then has none before it.
      pairs = [(context or [self.prefix_token_id], ending) for _, context, ending in requests]
      return loglikelihoods(run, pairs, batch_size=batch_size, max_length=max_length, say=say)

    def loglikelihood_rolling(self, requests, **kwargs):
      """Log-likelihoods of whole texts, each token scored once.

      A window predicts its tokens from those before them in the window; the last one begins so
      early that it is full. The first token is predicted from BOS, which is not scored itself.
      """
      pairs, owners = [], []
      for number, request in enumerate(requests):
        ids = self.tok_encode(request.args[0], add_special_tokens=False)
        # `context_len` of 1: the fewest windows.
        for inputs_and_targets in get_rolling_token_windows(
            ids, self.prefix_token_id, max_seq_len=window, context_len=1):
          pairs.append(make_disjoint_window(inputs_and_targets))
          owners.append(number)
      totals = [0.0] * len(requests)
      scored = loglikelihoods(run, pairs, batch_size=batch_size, max_length=max_length, say=say)
      for number, (total, _) in zip(owners, scored, strict=True):
        totals[number] += total
      return totals

    def generate_until(self, requests, **kwargs):
      """Continuations, each up to its stop sequences, its number of tokens or an EOS."""
      asked = []
      for context, arguments in (request.args for request in requests):
        wanted = settings(arguments, window)
        ids = self.tok_encode(context)[-(window - wanted.tokens):]
        asked.append((ids or [self.prefix_token_id], wanted))
      return generated(run, tokenizer, asked, batch_size=batch_size, say=say)

  return Model()


def learned_positions(run: Run) -> int | None:
  """How many tokens a model has positions for; None where there is no such number."""
  return getattr(run.config.attention.position, 'max_length', None)


def _check_causal(run: Run) -> None:
  """Raises a ValueError where a mask shows text after the token that is predicted from it."""
  config = run.config
  for layer in config.pattern:
    mask = config.attention_of(layer).mask
    # Learned sink tokens are the first positions of a prefix, and no text.
    if not layer.mamba and (mask.prefix or 0) > config.sink_tokens + 1:
      raise ValueError(f'{run.name or "the model"}: {mask} shows a token what comes after it, so '
                       'that its probabilities of a text mean nothing: a causal mask is needed.')


def loglikelihoods(run: Run, pairs: Sequence[tuple[list[int], list[int]]], *,
                   batch_size: int | None = None, max_length: int | None = None,
                   say: Callable[[str], None] = lambda line: None) -> list[tuple[float, bool]]:
  """Computes the log-probability of every ending after its context.

  Texts are sorted by length and padded on the right, where a causal model does not look, to few
  different lengths, each of which is a program to compile.

  Args:
    run: the model.
    pairs: token ids (context, ending), of which neither is empty.
    batch_size: texts at a time; by default as many as 2,048 tokens.
    max_length: tokens that the model reads at most, of longer texts the last ones; None for the
      model's learned positions, or no limit where it has none.
    say: is called with a line of progress.

  Returns:
    For every pair the log-probability in nats, and whether the ending is the greedy one.

  Raises:
    ValueError: an ending is longer than what the model reads, or a log-probability is not finite.
  """
  most = max_length or learned_positions(run)
  rows = [(context + ending, len(ending)) for context, ending in pairs]
  if most:
    longest = max((count for _, count in rows), default=0)
    if longest > most:
      raise ValueError(f'{run.name or "the model"} reads {most} tokens at most, and is to score an '
                       f'ending of {longest}: take a larger --max_length, or another model.')
    # A model with `most` positions reads as many tokens and predicts as many, so a text may have
    # one token more.
    rows = [(ids[-most - 1:], count) for ids, count in rows]
  order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
  results: list[tuple[float, bool]] = [(math.nan, False)] * len(rows)
  start, said = 0, 0
  while start < len(order):
    # The order is by length, so the first text is the longest of its batch and sets the width: the
    # smallest power of two that holds its tokens without the last, which is only predicted.
    width = max(_SHORTEST, 1 << (len(rows[order[start]][0]) - 2).bit_length())
    width = min(width, most) if most else width
    size = batch_size or max(1, _TOKENS_AT_A_TIME // width)
    batch = order[start:start + size]
    tokens, targets = np.zeros((2, size, width), np.int32)  # the last batch is padded as well
    counted = np.zeros((size, width), bool)
    for row, i in enumerate(batch):
      ids, count = rows[i]
      # A position is scored by the token after it. The ending is the last `count` targets.
      tokens[row, :len(ids) - 1], targets[row, :len(ids) - 1] = ids[:-1], ids[1:]
      counted[row, len(ids) - 1 - count:len(ids) - 1] = True
    total, greedy = map(np.asarray, _scores(run.logits(tokens), targets, counted))
    if not np.isfinite(total).all():
      raise not_finite(run, 'the log-probability of an ending', run.config.dtype)
    for row, i in enumerate(batch):
      results[i] = float(total[row]), bool(greedy[row])
    start += size
    if start >= min(said + _SAY_EVERY, len(order)):
      said = start
      say(f'{run.name}: {min(start, len(order))} of {len(order)} log-likelihoods')
  return results


@jax.jit
def _scores(logits_BxTxV, targets_BxT, counted_BxT):
  """Summed log-probability (B,) of the counted targets, and whether all are the most likely."""
  chosen_BxT = jnp.take_along_axis(logits_BxTxV, targets_BxT[..., None], -1)[..., 0]
  log_BxT = chosen_BxT - jax.nn.logsumexp(logits_BxTxV, -1)
  greedy_BxT = jnp.argmax(logits_BxTxV, -1) == targets_BxT
  # Positions that do not count add nothing to a sum, and must not make an ending less than greedy.
  return (jnp.where(counted_BxT, log_BxT, 0).sum(-1),
          jnp.where(counted_BxT, greedy_BxT, True).all(-1))
