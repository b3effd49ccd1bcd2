"""Perplexity over a long text with caches of one size (StreamingLLM, Table 1 and Figure 3).

A window of W tokens forgets the first ones, and with them the sink; a cache that keeps the
first s tokens and W - s recent ones does not. What the paper writes 0 + W against 4 + (W - 4).
"""

from __future__ import annotations

import math
import time

import numpy as np
from matplotlib.ticker import ScalarFormatter

from sink_jax.analyses.loaded_models import LoadedModel, make_inputs as usual_inputs
from sink_jax.analyses.options import Options
from sink_jax.data import inputs as data_inputs
from sink_jax.data.inputs import Inputs
from sink_jax.evaluate import plots
from sink_jax.evaluate.finite import not_finite
from sink_jax.models.decode import check_policy, state_bytes
from sink_jax.models.generate import text_losses
from sink_jax.models.kv_cache import CachePolicy
from sink_jax.models.run import Run

_POINTS = 64  # of a curve


def make_inputs(subject: LoadedModel, options: Options) -> Inputs:
  """One long text per sequence, made of documents one after the other, else the usual inputs."""
  if options.inputs != 'natural' or (subject.task and not options.source):
    return usual_inputs(subject, options)
  return data_inputs.long_text(
      subject.text_tokenizer(), data_inputs.open_source(options.source),
      sequences=options.sequences, length=options.length, bos=options.bos or 'tokenizer')


def policies(run: Run, size: int, sinks: int, length: int) -> dict[str, CachePolicy]:
  """The caches that are compared, by name.

  Raises:
    ValueError: sinks do not fit the size.
  """
  kept = size - sinks
  return {f'0 + {size}': CachePolicy(size), f'{sinks} + {kept}': CachePolicy(size, sinks),
          f'{sinks} + {kept}, text positions': CachePolicy(size, sinks, 'text'),
          'all tokens': CachePolicy(length + run.config.sink_tokens)}


def measure(run: Run, inputs: Inputs, options: Options) -> dict:
  """Losses of one model on texts (S, T) with every cache.

  caches: for each, 'perplexity' of the whole text, exp of the mean loss; 'running', the
  perplexity up to token 'tokens' (64 points); 'late', of the last quarter alone;
  'tokens_per_second' of the device, all sequences together, without the first piece, which
  compiles (None where there is one piece); 'bytes' of the cache. skipped {name: reason}:
  caches that the model cannot have, with too few learned positions for example.

  Raises:
    ValueError: cache_size or sinks out of range, a model that can have none of the caches, or a
      loss that is not finite.
  """
  tokens = inputs.tokens
  wanted = policies(run, options.cache_size, options.sinks, tokens.shape[1])
  caches, skipped = {}, {}
  for name, policy in wanted.items():
    try:
      check_policy(run.config, policy, tokens.shape[1])
    except ValueError as error:
      skipped[name] = str(error)
      continue
    losses, rate = _timed(run, tokens, policy, lambda done: options.say(
        f'{run.name}, cache {name}: {done} of {tokens.shape[1] - 1} tokens'))
    if not np.isfinite(losses).all():
      raise not_finite(run, f'the loss of a text with the cache {name}', run.config.dtype)
    ends = np.unique(np.linspace(1, len(losses), min(_POINTS, len(losses))).astype(int))
    running = np.cumsum(losses)[ends - 1] / ends
    caches[name] = {
        'size': policy.size, 'sinks': policy.sinks, 'positions': policy.positions,
        'perplexity': _exp(losses.mean()), 'late': _exp(losses[-max(1, len(losses) // 4):].mean()),
        'tokens': (ends + 1).tolist(), 'running': [_exp(x) for x in running],
        'tokens_per_second': rate, 'bytes': state_bytes(run.config, policy, len(tokens))}
  if not caches:
    raise ValueError(f'--cache_size={options.cache_size}: the model has no cache of this size for '
                     f'{tokens.shape[1]} tokens; use a smaller one.')
  return {'model': run.name, 'inputs': inputs.description, 'cache_size': options.cache_size,
          'caches': caches, 'skipped': skipped}


def draw(results: list[dict], path) -> None:
  """Running perplexity against tokens read, a line per cache and a panel per model (PNG)."""
  figure, axes = plots.canvas(1.4 + 4.6 * len(results), 3.9, columns=len(results))
  names = list(dict.fromkeys(name for result in results for name in result['caches']))
  for ax, result in zip(axes[0], results):
    for name, cache in result['caches'].items():
      points = [(t, y) for t, y in zip(cache['tokens'], cache['running']) if y is not None]
      if points:
        number = names.index(name)  # the first line may lie below the second
        ax.plot(*zip(*points), linewidth=2 if number else 4.5, color=plots.COLOURS[number],
                label=name, linestyle='--' if name == 'all tokens' else '-')
    ax.axvline(result['cache_size'], color='#555555', linewidth=1.2, linestyle=':')
    ax.set_yscale('log')
    for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
      axis(ScalarFormatter())
    ax.grid(alpha=0.25)
    ax.legend(fontsize=9, frameon=False, title='cache', title_fontsize=9)
    plots.label(ax, result['model'] or 'model', 'tokens read', 'perplexity so far')
  plots.save(figure, path)


def rows(results: list[dict]) -> list[list[str]]:
  """A line per model and cache."""
  table = [['perplexity', 'cache', 'all', 'last quarter', 'tokens/s', 'MiB']]
  show = lambda x, form: '-' if x is None else format(x, form)
  for result in results:
    for name, cache in result['caches'].items():
      table.append([result['model'] or 'model', name, show(cache['perplexity'], '.2f'),
                    show(cache['late'], '.2f'), show(cache['tokens_per_second'], '.0f'),
                    f'{cache["bytes"] / 2**20:.2f}'])
    table += [[result['model'] or 'model', name, 'cannot', '', '', '']
              for name in result['skipped']]
  return table


def _timed(run, tokens, policy, say):
  """Losses (T - 1,), mean over sequences, and tokens per second."""
  parts, started, count, elapsed = [], None, 0, 0.0
  for part in text_losses(run, tokens, policy):
    if started is None:
      started = time.perf_counter()
    else:
      count, elapsed = count + part.size, time.perf_counter() - started
    parts.append(np.asarray(part, np.float64).mean(0))
    say(sum(map(len, parts)))
  return np.concatenate(parts), count / elapsed if count else None


def _exp(x):
  """A perplexity, or None where it is beyond what a number holds."""
  return math.exp(x) if x < 700 else None
