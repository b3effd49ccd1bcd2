"""Perplexity of a long text with caches of one size (StreamingLLM, Table 1 and Figure 3).

A window of W tokens forgets the first ones, and with them the sink; a cache that keeps the first s
tokens and W - s recent ones does not. The paper writes them 0 + W and s + (W - s).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.loaded_models import LoadedModel, make_inputs as usual_inputs
from sink_jax.analyses.options import Options
from sink_jax.evaluate import inputs as data_inputs
from sink_jax.evaluate import plots
from sink_jax.evaluate.activations import not_finite
from sink_jax.evaluate.inputs import Inputs
from sink_jax.io.terminal import number
from sink_jax.models.decode import CachePolicy, check_policy, state_bytes
from sink_jax.models.run import Run, text_losses

_POINTS = 32  # of a curve


def make_inputs(model: LoadedModel, options: Options) -> Inputs:
  """Makes one long text per sequence of documents one after the other; else the usual inputs."""
  if options.inputs != 'natural' or (model.task and not options.source):
    return usual_inputs(model, options)
  return data_inputs.long_text(
      model.text_tokenizer(), data_inputs.open_source(options.source),
      sequences=options.sequences, length=options.length, bos=options.bos or 'tokenizer')


def policies(run: Run, size: int, sinks: int, length: int) -> dict[str, CachePolicy]:
  """Returns the caches that are compared, by name.

  Args:
    run: the model.
    size: tokens that the caches keep, but for the one that keeps all.
    sinks: how many of them are the first tokens of the text.
    length: of the text.

  Raises:
    ValueError: sinks do not fit the size.
  """
  recent = size - sinks
  # StreamingLLM counts positions in the cache. The same cache with those of the text shows what
  # that is worth. A cache that keeps all has entries for learned sink tokens too.
  first = f'first {sinks} and last {recent}'
  return {f'last {size}': CachePolicy(size), first: CachePolicy(size, sinks),
          f'{first}, text positions': CachePolicy(size, sinks, 'text'),
          'all tokens': CachePolicy(length + run.config.sink_tokens, positions='text')}


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures the losses of one model on texts (S, T) with every cache.

  Texts are scored as they are. Natural texts of `make_inputs` begin with the first token that the
  run was trained with, but under --bos=none; tokens of --inputs=random and repeat do not.

  Returns:
    caches: {name: numbers}. 'perplexity' of the whole text, exp of the mean loss; 'curve', the
    perplexity of up to 32 parts of equal length, which end at the tokens 'tokens'; 'late', that of
    the last quarter; 'tokens_per_second' of the scoring, of all sequences together, without the
    first piece, which compiles (None where there is one piece), and with the padding of the last
    one; 'bytes' of the cache; 'size', 'sinks' and 'positions' of its policy.
    skipped {name: reason}: caches that the model cannot have, for want of learned positions for
    example. cache_size: that of the options.

  Raises:
    ValueError: cache_size or sinks out of range, a model that can have none of the caches, or a
      loss that is not finite.
  """
  tokens = inputs.tokens
  caches, skipped = {}, {}
  by_name = policies(run, options.cache_size, options.sinks, tokens.shape[1])
  for name, policy in by_name.items():
    try:
      check_policy(run.config, policy, tokens.shape[1])
    except ValueError as error:
      skipped[name] = str(error)
      continue
    losses, rate = _timed(run, tokens, policy, lambda done: options.say(
        f'{run.name}, cache {name}: {done} of {tokens.shape[1] - 1} tokens'))
    if not np.isfinite(losses).all():
      raise not_finite(run, f'the loss of a text with the cache {name}', run.config.dtype)
    # Points at equal distances; rounding down may give one of them twice.
    ends = np.unique(np.linspace(0, len(losses), min(_POINTS, len(losses)) + 1)[1:].astype(int))
    parts = np.diff(np.cumsum(losses)[ends - 1], prepend=0) / np.diff(ends, prepend=0)
    caches[name] = {
        'size': policy.size, 'sinks': policy.sinks, 'positions': policy.positions,
        'perplexity': _exp(losses.mean()), 'late': _exp(losses[-max(1, len(losses) // 4):].mean()),
        # The first token has no loss, so the n-th loss is that of token n + 1.
        'tokens': (ends + 1).tolist(), 'curve': [_exp(x) for x in parts],
        'tokens_per_second': rate, 'bytes': state_bytes(run.config, policy, len(tokens))}
  if not caches:
    raise ValueError(f'--cache_size={options.cache_size}: the model has no cache of this size for '
                     f'{tokens.shape[1]} tokens; use a smaller one.')
  return {'model': run.name, 'inputs': inputs.description, 'cache_size': options.cache_size,
          'caches': caches, 'skipped': skipped}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws perplexity by tokens read, a line per cache and a panel per model (PNG).

  Up to the size of the cache all caches hold the same, so the axis begins there.
  """
  figure, axes = plots.canvas(1.4 + 4.6 * len(results), 4.4, columns=len(results))
  names = list(dict.fromkeys(name for result in results for name in result['caches']))
  for ax, result in zip(axes[0], results):
    for name, cache in result['caches'].items():
      starts = [1, *cache['tokens']]  # of the parts: one begins where the one before ends
      points = [(t, y) for start, t, y in zip(starts, cache['tokens'], cache['curve'])
                if y is not None and start >= result['cache_size']]
      if points:
        ax.plot(*zip(*points), linewidth=2, color=plots.COLOURS[names.index(name)], label=name,
                linestyle='--' if name == 'all tokens' else '-')
    ax.set_yscale('log')
    low, high = ax.get_ylim()
    # Powers of ten alone would leave most axes with one label, and a label at every multiple of
    # one prints them over each other.
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 10 * low else
                               MaxNLocator(6, steps=[1, 2, 5, 10]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.grid(alpha=0.25)
    plots.label(ax, model_name(result), 'tokens read', 'perplexity of the tokens around')
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside lower center', ncols=2, fontsize=9, frameon=False,
                title='tokens that the cache keeps', title_fontsize=9)
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates perplexity, speed and memory, with a row per model and cache."""
  table = [['perplexity', 'cache', 'all', 'last quarter', 'tokens scored/s', 'MiB']]
  for result in results:
    for name, cache in result['caches'].items():
      table.append([model_name(result), name, number(cache['perplexity'], '.2f'),
                    number(cache['late'], '.2f'), number(cache['tokens_per_second'], '.0f'),
                    f'{cache["bytes"] / 2**20:.2f}'])
    table += [[model_name(result), name, 'cannot', '', '', '']
              for name in result['skipped']]
  return table


def _timed(run: Run, tokens: np.ndarray, policy: CachePolicy,
           say: Callable[[int], None]) -> tuple[np.ndarray, float | None]:
  """Losses (T - 1,), mean over sequences, and tokens per second.

  say: is called after every piece with the number of tokens so far.
  """
  parts, started, whole, count, elapsed = [], None, 0, 0, 0.0
  for part in text_losses(run, tokens, policy):
    if started is None:
      started, whole = time.perf_counter(), part.size
    else:
      # The last piece may hold fewer losses, but it is padded, and takes the time of a whole one.
      count, elapsed = count + whole, time.perf_counter() - started
    parts.append(np.asarray(part, np.float64).mean(0))
    say(sum(map(len, parts)))
  return np.concatenate(parts), count / elapsed if count else None


def _exp(x: float) -> float | None:
  """A perplexity, or None where it is beyond what a number holds."""
  # From exp(709.8) on, math.exp raises an OverflowError: float64 holds no more.
  return math.exp(x) if x < 700 else None
