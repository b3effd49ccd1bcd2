"""Continues a text, word after word, beyond the length that a model was trained on.

    python -m sink_jax generate --checkpoint=Pythia-160M --prompt='Once upon a time'

The prompt is --prompt, --prompt_file, or what is piped in. With --cache_size a cache keeps the
first tokens and the most recent ones (StreamingLLM), so that the text may become longer than
anything the model was trained on.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np

from sink_jax.arguments import check_least
from sink_jax.cli.one_model import ModelOptions

if TYPE_CHECKING:  # it imports jax
  from sink_jax.models.run import RunTokenizer

_CHUNK = 8  # tokens between two writes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
  """The options of a text, and those of its model.

  Attributes:
    prompt: the text to continue.
    prompt_file: a file with it, UTF-8.
    bos: whether it begins with BOS: as the tokenizer does it, or the training of a run did; never;
      always.
    length: tokens to generate.
    cache_size: tokens that the cache keeps; by default all.
    sinks: how many of them are the first tokens of the text; 0 is a sliding window.
    positions: what positions count: the tokens in the cache, or in the text.
    temperature: 0: the most likely token. 1: a sample.
    top_k: sample among so many most likely tokens; by default among all.
    top_p: sample among the fewest most likely tokens whose probabilities sum to it; by default all.
    eos: whether the text ends with an end-of-text token of the tokenizer.
    seed: of the sampling.
  """

  prompt: str | None = None
  prompt_file: str | None = None
  bos: Literal['tokenizer', 'none', 'force'] = 'tokenizer'
  length: int = 128
  cache_size: int | None = None
  sinks: int = 4
  positions: Literal['cache', 'text'] = 'cache'
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  eos: bool = True
  seed: int = 0

  def __post_init__(self):
    super().__post_init__()
    check_least(self, length=1, cache_size=1, sinks=0, temperature=0, top_k=1, seed=0)
    if self.seed >= 2**32:
      raise ValueError(f'--seed={self.seed} must be less than 2**32.')
    if self.cache_size is None:
      self.unused('is for a cache that does not keep all: add --cache_size.', 'sinks', 'positions')
    if not self.temperature:
      self.unused('is for sampling: add --temperature, such as 1.', 'top_k', 'top_p', 'seed')


def main(options: Options) -> None:
  """Writes the text as it is generated, and how fast that was."""
  prompt = _prompt(options)

  from sink_jax.io import compile_cache
  from sink_jax.models.decode import state_bytes
  from sink_jax.models.generate import stream
  from sink_jax.models.kv_cache import CachePolicy

  compile_cache.enable()
  run = options.load().run
  if options.bos == 'none':
    # `stream` puts the first token of a run's training before every text that lacks it.
    run = dataclasses.replace(run, first_token=None)
  tokenizer = run.tokenizer
  tokens = _first_tokens(tokenizer, prompt, options.bos)
  # On stderr, so that what is piped on is the text alone.
  print(f'{run.name}: {len(tokens)} tokens of prompt, the first ids {tokens[:4].tolist()}',
        file=sys.stderr)
  # A cache of all tokens drops none, and so is no different from attention over the whole text.
  policy = CachePolicy(len(tokens) + options.length + run.config.sink_tokens, positions='text')
  if options.cache_size is not None:
    policy = CachePolicy(options.cache_size, options.sinks, options.positions)
  ends = tokenizer.eos_ids if options.eos else ()
  # tokens[None]: a batch of one text.
  pieces = stream(run, tokens[None], options.length, policy=policy,
                  temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
                  seed=options.seed, chunk=_CHUNK, eos_token_id=ends or None)
  made, rate = _write(pieces, tokens, tokenizer, ends)
  cache = state_bytes(run.config, policy, 1) / 2**20
  speed = f'{rate:.1f} tokens/s' if rate else 'too short to be timed'
  ended = ' to the end of the text' if made < options.length else ''
  print(f'\n{made} tokens{ended}, {speed}; cache of {policy.size} tokens: {cache:.1f} MiB',
        file=sys.stderr)


def _prompt(options: Options) -> str:
  if options.prompt is not None and options.prompt_file is not None:
    raise ValueError('--prompt and --prompt_file exclude each other.')
  if options.prompt is not None:
    prompt = options.prompt
  elif options.prompt_file is not None:
    with open(os.path.expanduser(options.prompt_file), encoding='utf-8') as file:
      prompt = file.read()
  # Reading a terminal would look like a program that hangs.
  elif sys.stdin.isatty():
    raise ValueError("no prompt: give --prompt='...' or --prompt_file, or pipe a text in.")
  else:
    prompt = sys.stdin.read()
  prompt.encode()  # a ValueError where the bytes are no text
  return prompt


def _first_tokens(tokenizer: RunTokenizer, prompt: str, bos: str) -> np.ndarray:
  tokens = tokenizer.with_prefix(tokenizer.encode(prompt).tolist(), bos)
  if not len(tokens):
    raise ValueError('the prompt is empty, and no BOS stands before it: write something, or '
                     'take --bos=force.')
  return tokens


def _write(pieces: Iterable[np.ndarray], tokens: np.ndarray, tokenizer: RunTokenizer,
           ends: tuple[int, ...]) -> tuple[int, float | None]:
  """Writes the text as it comes, without the token that ends it.

  Returns:
    New tokens, and tokens per second without the first piece, which compiles.

  A token may hold a part of a letter, and its text may depend on the token before it. So the
  new text is what the last tokens add to those that were written, once its last letter is whole.
  """
  ids, settled, written = tokens.tolist(), 0, len(tokens)
  print(tokenizer.decode(ids), end='', flush=True)
  started, elapsed, count, made = None, 0.0, 0, 0
  for piece in pieces:
    made += piece.shape[1]
    count += 0 if started is None else piece.shape[1]
    started = started or time.perf_counter()
    elapsed = time.perf_counter() - started
    ids += [token for token in piece[0].tolist() if token not in ends]
    before, after = tokenizer.decode(ids[settled:written]), tokenizer.decode(ids[settled:])
    if after.startswith(before) and not after.endswith('\ufffd'):
      print(after[len(before):], end='', flush=True)
      settled, written = written, len(ids)
  if written < len(ids):  # bytes that are no letter to the end
    print(tokenizer.decode(ids[written:]), end='')
  print(flush=True)
  return made, count / elapsed if count else None
