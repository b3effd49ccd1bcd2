"""The models of this package in lm-evaluation-harness, without torch.

    python -m sink_jax.analyses.lm_eval run --model sink_jax --model_args checkpoint=Pythia-160M \\
      --tasks hellaswag --batch_size auto --output_path results

runs the command of the harness, which has tasks, prompts and scores.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.analyses.models import load
from sink_jax.evaluate.activations import not_finite
from sink_jax.models.generate import stream_texts
from sink_jax.models.run import Run

try:
  from lm_eval.api.model import TemplateLM
  from lm_eval.api.registry import register_model
  from lm_eval.models.utils import normalize_gen_kwargs
  from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
  sys.exit(f"error: lm-evaluation-harness is needed ({error}): pip install 'sink_jax[evaluation]'.")

_SCORED = 2048  # tokens whose logits are in memory: 400 MB with GPT-2's vocabulary
_CACHED = 16384  # tokens whose keys and values are in memory
_SHORTEST = 32  # tokens; batches are padded to this or to a power of two above it
_LONGEST = 2048  # tokens of a window if the model sets no limit, as in the harness
_TOKENS = 256  # of a continuation if the task names no number, as in the harness


@register_model('sink_jax')
class SinkJax(TemplateLM):
  """A model with the interface of the harness; its arguments are those of --model_args.

  A published model `checkpoint`, a run `workdir` (with `plugins`, see `load_run`), or a `run` in
  memory. bos: how a context begins, 'none',
  'tokenizer' (as it begins a text) or 'force' (one BOS). max_length: the most tokens that the model
  reads, and of a longer context the last ones; by default its learned positions, or 2,048.
  batch_size: texts at a time, or 'auto'. A ValueError says that the model, its tokenizer or a BOS
  is missing, or that its mask is not causal.
  """

  def __init__(
    self,
    checkpoint: str | None = None,
    workdir: str | None = None,
    run: Run | None = None,
    bos: str = 'tokenizer',
    max_length: int | None = None,
    dtype: str = 'float32',
    batch_size: int | str | None = None,
    max_batch_size: int | None = None,
    device: Any = None,
    plugins: str = '',
  ):
    super().__init__()
    if (checkpoint is None) + (workdir is None) + (run is None) != 2:
      raise ValueError('--model_args: name one model, by checkpoint= or workdir=.')
    self.run = run or load(checkpoint, workdir, dtype, plugins=plugins)
    self.tokenizer, self.bos = self.run.tokenizer, bos
    self.tokenizer.with_prefix([], bos)  # raises if there is no BOS
    self.batch = None if batch_size in (None, 'auto') else int(batch_size)
    config = self.run.config
    self._max_length = (
      max_length or getattr(config.attention.position, 'max_length', None) or _LONGEST
    )
    for mask in (spec.mask for spec in config.attention_specs):
      if (mask.prefix or 0) > config.sink_tokens + 1:  # sink tokens are its first positions
        raise ValueError(f'{mask} shows a token what comes after it: a causal mask is needed.')

  @property
  def eot_token_id(self) -> int:
    """The token before a text without a context: BOS, else EOS."""
    bos = self.tokenizer.bos_id
    if bos is None and not self.tokenizer.eos_ids:
      raise ValueError(
        f'{self.tokenizer.name} has neither BOS nor EOS: name a bos_token in tokenizer_config.json.'
      )
    return self.tokenizer.eos_ids[0] if bos is None else bos

  @property
  def max_length(self) -> int:  # of a window, as the harness calls it
    return self._max_length

  def get_model_info(self) -> dict[str, str]:
    """The entries about the model in the results of the harness."""
    return {'sink_jax_model': self.run.name}

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
    """Ids of a text."""
    ids = self.tokenizer.encode(string)
    return (
      ids if add_special_tokens is False else self.tokenizer.with_prefix(ids, self.bos).tolist()
    )

  def _loglikelihood_tokens(self, requests, **kwargs):
    # The harness has moved a context of spaces to the ending, and leaves an empty context.
    pairs = [(context or [self.prefix_token_id], ending) for _, context, ending in requests]
    return loglikelihoods(self.run, pairs, self.max_length, self.batch)

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """Log-likelihoods of texts, each token scored once, the first one after BOS."""
    windows = [
      [
        make_disjoint_window(window)
        for window in get_rolling_token_windows(
          self.tok_encode(request.args[0], False),
          self.prefix_token_id,
          self.max_length,
          context_len=1,
        )
      ]
      for request in requests
    ]
    found = iter(loglikelihoods(self.run, sum(windows, []), self.max_length, self.batch))
    return [float(sum(next(found)[0] for _ in own)) for own in windows]

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """Continuations, each up to one of its stops, its number of tokens or an EOS."""
    asked, seeds = [], itertools.count()
    for context, arguments in (request.args for request in requests):
      tokens, stops, sampling = generation(arguments, self.max_length)
      ids = self.tok_encode(context)[-(self.max_length - tokens) :] or [self.prefix_token_id]
      asked.append((ids, tokens, stops, sampling))
    found = [''] * len(asked)
    # All texts of a batch have equal options. The longest comes first, so that all batches of its
    # size fit.
    alike = lambda i: (asked[i][1], repr(asked[i][3]))
    order = sorted(range(len(asked)), key=lambda i: (*alike(i), -len(asked[i][0])))
    for (tokens, _), group in ((key, [*group]) for key, group in itertools.groupby(order, alike)):
      size = min(self.batch or max(1, _CACHED // (len(asked[group[0]][0]) + tokens)), len(group))
      for batch in (group[i : i + size] for i in range(0, len(group), size)):
        made, ended = {i: [] for i in batch}, set()
        texts = [asked[i][0] for i in batch]
        for pieces in stream_texts(
          self.run.config, self.run.params, texts, tokens, seed=next(seeds), **asked[batch[0]][3]
        ):
          for i, piece in zip(batch, pieces):
            if i not in ended:
              made[i] += piece.tolist()
              end = next(
                (n for n, token in enumerate(made[i]) if token in self.tokenizer.eos_ids), None
              )
              text = self.tokenizer.decode(made[i][:end])
              cut = min((text.index(stop) for stop in asked[i][2] if stop in text), default=None)
              found[i] = text[:cut]
              if end is not None or cut is not None or len(made[i]) >= tokens:
                ended.add(i)
          if len(ended) == len(batch):
            break
    return found


def generation(
  arguments: Mapping[str, Any], window: int
) -> tuple[int, tuple[str, ...], dict[str, Any]]:
  """(tokens, stops, options of `stream_texts`) of a task's `generation_kwargs`.

  A ValueError names an argument that would change the text and is not supported, or too many
  tokens.
  """
  given: dict[str, Any] = dict(normalize_gen_kwargs(dict(arguments), min(_TOKENS, window // 2)))
  tokens, sampled = given.pop('max_gen_toks'), given.pop('do_sample', False)
  stops = tuple(filter(None, given.pop('until')))
  if not 1 <= tokens < window:
    raise ValueError(
      f'max_gen_toks = {tokens} of a task, and the model reads {window} tokens: take a larger '
      'max_length in --model_args.'
    )
  sampling = {name: given.pop(name, None) for name in ('temperature', 'top_k', 'top_p')}
  given.pop('seed', None)
  neutral = {'num_beams': 1, 'repetition_penalty': 1.0}
  if given := {k: v for k, v in given.items() if v is not None and v != neutral.get(k)}:
    raise ValueError(f'generation_kwargs of a task: {given} are not supported.')
  if not sampled:
    return tokens, stops, {}
  return (
    tokens,
    stops,
    {
      'temperature': 1.0 if sampling['temperature'] is None else sampling['temperature'],
      'top_k': sampling['top_k'] or None,
      'top_p': sampling['top_p'],
    },
  )


def loglikelihoods(
  run: Run, pairs: Sequence[tuple[list[int], list[int]]], most: int, batch_size: int | None = None
) -> list[tuple[float, bool]]:
  """The log-probability (nats) of every ending after its context, and whether it is the greedy one.

  pairs: token ids (context, ending), neither of them empty. most: the most tokens that the model
  reads, the last ones of a longer text. A ValueError says that an ending is longer, or a
  log-probability not finite.
  """
  if (longest := max((len(ending) for _, ending in pairs), default=0)) > most:
    raise ValueError(
      f'an ending of {longest} tokens, and the model reads {most}: take a larger max_length.'
    )
  # A model that reads `most` tokens predicts as many, so a text may have one more. Texts are sorted
  # by length and padded to a few lengths on the right, where a causal model does not look.
  rows = [((context + ending)[-most - 1 :], len(ending)) for context, ending in pairs]
  order, start = sorted(range(len(rows)), key=lambda i: -len(rows[i][0])), 0
  results = [(math.nan, False)] * len(rows)
  while start < len(order):
    # The first text is the longest of its batch: the smallest power of two that holds all but its
    # last token.
    width = min(most, max(_SHORTEST, 1 << (len(rows[order[start]][0]) - 2).bit_length()))
    size = batch_size or max(1, _SCORED // width)
    batch = order[start : start + size]
    # The last batch is padded as well.
    tokens, targets, counted = np.zeros((3, size, width), np.int32)
    for row, i in enumerate(batch):
      ids, count = rows[i]
      tokens[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
      counted[row, len(ids) - 1 - count : len(ids) - 1] = 1
    totals, greedy = map(np.asarray, _scores(run.logits(tokens), targets, counted.astype(bool)))
    if not np.isfinite(totals).all():
      raise not_finite(run, 'the log-probability of an ending', run.config.dtype)
    for row, i in enumerate(batch):
      results[i] = float(totals[row]), bool(greedy[row])
    start += size
  return results


@jax.jit
def _scores(logits_BxTxV, targets_BxT, counted_BxT):
  """Summed log-probability (B,) of the counted targets, and whether all are the most likely."""
  chosen_BxT = jnp.take_along_axis(logits_BxTxV, targets_BxT[..., None], -1)[..., 0]
  log_BxT = chosen_BxT - jax.nn.logsumexp(logits_BxTxV, -1)
  greedy_BxT = jnp.argmax(logits_BxTxV, -1) == targets_BxT
  return jnp.where(counted_BxT, log_BxT, 0).sum(-1), jnp.where(counted_BxT, greedy_BxT, True).all(
    -1
  )


if __name__ == '__main__':
  from lm_eval.__main__ import cli_evaluate

  cli_evaluate()
