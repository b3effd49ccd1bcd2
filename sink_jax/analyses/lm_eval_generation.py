"""Texts that a task of lm-evaluation-harness asks for: greedy or sampled, up to where they stop."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.models.run import Run, stream_texts

_TOKENS_AT_A_TIME = 16384  # whose keys and values are in the cache
_TOKENS = 256  # of a continuation where the task names no number, as in the harness
# Arguments that change a sample alone, and so nothing where the most likely token is taken.
_OF_SAMPLES = {'temperature', 'top_k', 'top_p', 'min_p', 'typical_p', 'seed'}
# Arguments of other programs, with the value that asks for nothing.
_NEUTRAL = {'top_p': 1.0, 'min_p': 0.0, 'typical_p': 1.0, 'num_beams': 1, 'repetition_penalty': 1.0}


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a text is continued.

  Attributes:
    tokens: at most so many.
    until: texts that end it; they are no part of it.
    temperature: 0 takes the most likely token, 1 samples from the model.
    top_k: sample among so many most likely tokens; None for all.
  """

  tokens: int
  until: tuple[str, ...] = ()
  temperature: float = 0.0
  top_k: int | None = None


def settings(arguments: Mapping[str, Any], window: int) -> Settings:
  """Reads the `generation_kwargs` of a task, which `lm_eval` normalises.

  Args:
    arguments: of the task.
    window: tokens that the model reads at most, those of the context included.

  Raises:
    ValueError: an argument that is not supported, or more tokens than the model has room for.
  """
  from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]  optional
      normalize_gen_kwargs)
  # Half of a small window is left to the context.
  given: dict[str, Any] = dict(normalize_gen_kwargs(dict(arguments), min(_TOKENS, window // 2)))
  tokens, sampled = given.pop('max_gen_toks'), bool(given.pop('do_sample', False))
  until = tuple(text for text in given.pop('until') if text)
  if not 1 <= tokens < window:
    raise ValueError(f'a task asks for {tokens} tokens (max_gen_toks), and the model reads '
                     f'{window} with those of the context: take a larger --max_length, or another '
                     'task.')
  read = {'temperature', 'top_k'} if sampled else _OF_SAMPLES
  for name, value in given.items():
    if name not in read and value is not None and value != _NEUTRAL.get(name):
      raise ValueError(f'a task asks for {name} = {value!r} in its generation_kwargs, which is not '
                       'supported: max_gen_toks, until, do_sample, temperature and top_k are.')
  if not sampled:
    return Settings(tokens, until)
  temperature = given.get('temperature')
  return Settings(tokens, until, 1.0 if temperature is None else temperature,
                  given.get('top_k') or None)


def generated(run: Run, tokenizer: TextTokenizer, asked: Sequence[tuple[list[int], Settings]], *,
              batch_size: int | None = None,
              say: Callable[[str], None] = lambda line: None) -> list[str]:
  """Continues texts, each by its settings, several at a time.

  Args:
    run: the model.
    tokenizer: of the model; a text also ends before its `eos_ids`.
    asked: token ids, one or more, and settings of each text.
    batch_size: texts at a time; by default as many as 16,384 tokens.
    say: is called with a line of progress.

  Returns:
    The continuations, in the order of `asked`.
  """
  kind = lambda i: (asked[i][1].tokens, asked[i][1].temperature, asked[i][1].top_k or 0)
  # Texts of one batch are sampled alike, and are of similar lengths.
  order = sorted(range(len(asked)), key=lambda i: (*kind(i), -len(asked[i][0])))
  results, done, batches = [''] * len(asked), 0, itertools.count()
  for (tokens, _, _), group in itertools.groupby(order, kind):
    alike = list(group)
    # The first text is the longest, so all batches of its size fit, and share a program.
    room = len(asked[alike[0]][0]) + tokens
    size = min(batch_size or max(1, _TOKENS_AT_A_TIME // room), len(alike))
    for batch in (alike[start:start + size] for start in range(0, len(alike), size)):
      # The last batch is filled up with its first text.
      texts = [asked[i] for i in batch + batch[:1] * (size - len(batch))]
      # A batch has a seed of its own: a task may ask for one text several times.
      written = _batch(run, tokenizer, texts, next(batches))
      for i, text in zip(batch, written):
        results[i] = text
      done += len(batch)
      say(f'{run.name}: {done} of {len(asked)} texts')
  return results


def _batch(run: Run, tokenizer: TextTokenizer, texts: Sequence[tuple[list[int], Settings]],
           seed: int) -> list[str]:
  """The continuations of texts whose settings differ in `until` alone."""
  alike = texts[0][1]
  made: list[list[int]] = [[] for _ in texts]
  written: list[str | None] = [None] * len(texts)
  for pieces in stream_texts(run, [ids for ids, _ in texts], alike.tokens,
                             temperature=alike.temperature, top_k=alike.top_k, seed=seed):
    for row, piece in enumerate(pieces):
      if written[row] is None:
        made[row] += piece.tolist()
        written[row] = _ended(made[row], texts[row][1], tokenizer)
    if None not in written:
      break
  return [text or '' for text in written]


def _ended(ids: list[int], wanted: Settings, tokenizer: TextTokenizer) -> str | None:
  """The text of a continuation that has come to its end; None for one that goes on."""
  kept = ids[:wanted.tokens]
  end = next((n for n, token in enumerate(kept) if token in tokenizer.eos_ids), None)
  text = tokenizer.decode(kept[:end])
  stops = [text.index(stop) for stop in wanted.until if stop in text]
  if stops:
    return text[:min(stops)]
  return text if end is not None or len(ids) >= wanted.tokens else None
