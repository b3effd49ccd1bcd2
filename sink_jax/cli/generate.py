"""Continues a text on the terminal, as it is generated."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterable

import numpy as np

from sink_jax.cli.model_options import Generate
from sink_jax.cli.results import load
from sink_jax.io import compile_cache
from sink_jax.models.decode import state_bytes
from sink_jax.models.generate import stream
from sink_jax.models.kv_cache import CachePolicy
from sink_jax.models.run import RunTokenizer

_CHUNK = 8  # tokens between two writes


def main(options: Generate) -> None:
  """Writes the text as it is generated, and how fast that was."""
  prompt = _prompt(options)
  # A line about kernels would stand in the middle of the text.
  logging.getLogger('sink_jax').setLevel(logging.WARNING)
  compile_cache.enable()
  run = load(options).run
  if options.bos == 'none':
    # `stream` puts the first token of a run's training before every text that lacks it.
    run = dataclasses.replace(run, first_token=None)
  tokenizer = run.tokenizer
  tokens = tokenizer.with_prefix(tokenizer.encode(prompt), options.bos)
  if not len(tokens):
    raise ValueError('the prompt is empty, and no BOS stands before it: write something, or '
                     'take --bos=force.')
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
  before = len(tokens) - len(tokenizer.encode(prompt))  # tokens that stand before the prompt
  made, rate = _write(pieces, tokens, tokenizer, ends, before)
  cache = state_bytes(run.config, policy, 1)
  size = f'{cache / 2**20:.1f} MiB' if cache >= 2**20 else f'{cache / 2**10:.0f} KiB'
  speed = f'{rate:.1f} tokens/s' if rate else 'too short to be timed'
  ended = ' to the end of the text' if made < options.length else ''
  print(f'\n{made} tokens{ended}, {speed}; cache of {policy.size} tokens: {size}',
        file=sys.stderr)


def _prompt(options: Generate) -> str:
  if options.prompt is not None:
    prompt = options.prompt
  elif options.prompt_file is not None:
    with open(os.path.expanduser(options.prompt_file), encoding='utf-8-sig') as file:
      try:
        prompt = file.read()
      except UnicodeDecodeError as error:
        raise ValueError(f'--prompt_file={options.prompt_file} is no UTF-8 text: {error}') from None
  # Reading a terminal would look like a program that hangs.
  elif sys.stdin.isatty():
    raise ValueError("no prompt: give --prompt='...' or --prompt_file, or pipe a text in.")
  else:
    prompt = sys.stdin.read()
  try:
    prompt.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f'the prompt is no UTF-8 text: {error}') from None
  return prompt


def _write(pieces: Iterable[np.ndarray], tokens: np.ndarray, tokenizer: RunTokenizer,
           ends: tuple[int, ...], before_prompt: int) -> tuple[int, float | None]:
  """Writes the text as it comes, without the tokens before the prompt and the one that ends it.

  Returns:
    New tokens, and tokens per second without the first piece, which compiles.

  A token may hold a part of a letter, and its text may depend on the token before it. So the
  new text is what the last tokens add to those that were written, once its last letter is whole.
  """
  ids, settled, written = tokens.tolist(), 0, len(tokens)
  print(tokenizer.decode(ids[before_prompt:]), end='', flush=True)
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
