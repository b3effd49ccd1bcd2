"""Continues a text on the terminal, as it is generated."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Collection, Iterable
from typing import Literal

import numpy as np

from sink_jax.cli.results import ReadModel
from sink_jax.data.chat import encode, load_template, question
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io import compile_cache
from sink_jax.io.files import decoded
from sink_jax.io.terminal import say
from sink_jax.models.decode import CachePolicy, state_bytes
from sink_jax.models.generate import stream_texts

_CHUNK = 8  # tokens between two writes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReadModel):
  """Continues a text, word after word, beyond the length that a model was trained on.

      python -m sink_jax generate --checkpoint=Pythia-160M --prompt='Once upon a time'

  The prompt is --prompt, or what is piped in. With --cache_size a cache keeps the first tokens and
  the most recent ones (StreamingLLM): the text may be of any length.
  """

  prompt: str | None = None  # the text to continue.
  #: template in which the prompt is a user's message, to be answered: chatml (SmolLM2), zephyr,
  #: plain, or a JSON file with the format of each role.
  chat: str | None = None
  #: whether it begins with BOS: as the tokenizer, or the training of a run, has it; never; always.
  bos: Literal['tokenizer', 'none', 'force'] = 'tokenizer'
  length: int = 128  # tokens to generate.
  cache_size: int | None = None  # tokens that the cache keeps; by default all.
  sinks: int = 4  # how many of them are the first tokens of the text; 0 is a sliding window.
  #: what positions count: the tokens in the cache, or in the text.
  positions: Literal['cache', 'text'] = 'cache'
  temperature: float = 0.0  # 0: the most likely token. 1: a sample.
  top_k: int | None = None  # sample among so many most likely tokens; by default among all.
  #: sample among the fewest most likely tokens whose probabilities sum to it; by default all.
  top_p: float | None = None
  eos: bool = True  # whether the text ends with an end-of-text token of the tokenizer.
  seed: int = 0  # of the sampling.


def main(options: Options, given: Collection[str]) -> None:
  """Writes the text as it is generated, and how fast that was."""
  for needed, names in (
    ('temperature', {'top_k', 'top_p', 'seed'}),
    ('cache_size', {'sinks', 'positions'}),
  ):
    if needed not in given and (unused := names.intersection(given)):
      raise ValueError(f'--{min(unused)} does nothing without --{needed}: add it.')
  if options.prompt is None and sys.stdin.isatty():  # which would look like a program that hangs
    raise ValueError("no prompt: give --prompt='...', or pipe a text in.")
  prompt = _piped() if options.prompt is None else options.prompt
  # A line about kernels would stand in the middle of the text.
  logging.getLogger('sink_jax').setLevel(logging.WARNING)
  compile_cache.enable()
  run = options.load()
  tokenizer = run.tokenizer
  if options.chat is None:
    ids = tokenizer.encode(prompt)
  else:
    ((ids, _),) = encode([question(load_template(options.chat), prompt)], tokenizer)
  tokens = tokenizer.with_prefix(ids, options.bos)
  if not len(tokens):
    raise ValueError('the prompt is empty: write something, or take --bos=force.')
  if options.bos != 'none':
    (tokens,) = run.begun([tokens])
  say(f'{run.name}: {len(tokens)} tokens of prompt, the first ids {tokens[:4].tolist()}')
  policy = (
    None
    if options.cache_size is None
    else CachePolicy(options.cache_size, options.sinks, options.positions)
  )
  ends = tokenizer.eos_ids if options.eos else ()
  pieces = stream_texts(
    run.config,
    run.params,
    [tokens],
    options.length,
    policy=policy,
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    seed=options.seed,
    chunk=_CHUNK,
    eos_token_id=ends or None,
  )
  # By default the cache has all tokens.
  policy = policy or CachePolicy(
    len(tokens) + options.length + run.config.sink_tokens, positions='text'
  )
  before = len(tokens) - len(ids)  # tokens that stand before the prompt
  made, rate = _write(pieces, tokens, tokenizer, ends, before)
  size = f'{state_bytes(run.config, policy, 1) / 2**20:.3g} MiB'
  speed = f'{rate:.1f} tokens/s' if rate else 'too short to be timed'
  ended = ' to the end of the text' if made < options.length else ''
  say(f'\n{made} tokens{ended}, {speed}; cache of {policy.size} tokens: {size}')


def _piped() -> str:
  """The text that is piped in; its line breaks are those of Python."""
  return decoded(sys.stdin.buffer.read(), 'The piped prompt').replace('\r\n', '\n')


def _write(
  pieces: Iterable[list[np.ndarray]],
  tokens: np.ndarray,
  tokenizer: TextTokenizer,
  ends: tuple[int, ...],
  before_prompt: int,
) -> tuple[int, float | None]:
  """Writes the text as it comes, without the tokens before the prompt and the one that ends it.

  Returns:
    New tokens, and tokens per second without the first piece, which compiles.

  A token may hold a part of a letter, and its text may depend on the token before it. So the
  new text is what the last tokens add to those that were written, once its last letter is whole.
  """
  ids, settled, written = tokens.tolist(), 0, len(tokens)
  print(tokenizer.decode(ids[before_prompt:]), end='', flush=True)
  made, times = [], []
  for (piece,) in pieces:  # of one text
    made.append(len(piece))
    times.append(time.perf_counter())
    ids += [token for token in piece.tolist() if token not in ends]
    before, after = tokenizer.decode(ids[settled:written]), tokenizer.decode(ids[settled:])
    if after.startswith(before) and not after.endswith('\ufffd'):
      print(after[len(before) :], end='', flush=True)
      settled, written = written, len(ids)
  print(tokenizer.decode(ids[written:]), flush=True)  # bytes that are not a letter to the end
  return sum(made), sum(made[1:]) / (times[-1] - times[0]) if len(made) > 1 else None
