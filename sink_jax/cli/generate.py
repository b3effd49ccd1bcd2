"""python -m sink_jax.generate --checkpoint=Pythia-160M --prompt='Once upon a time'

Continues a text, word after word, with a cache that keeps the first tokens and the most
recent ones (StreamingLLM), so that the text may become longer than anything the model was
trained on. The prompt is --prompt, --prompt_file, or what is piped in.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Sequence

from absl import flags

from sink_jax.cli import command

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Folder or name of a published model.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a training run instead.')
_PROMPT = flags.DEFINE_string('prompt', None, 'The text to continue.')
_PROMPT_FILE = flags.DEFINE_string('prompt_file', None, 'A file with it, UTF-8.')
_BOS = flags.DEFINE_enum('bos', 'tokenizer', ['tokenizer', 'none', 'force'],
                         'Whether it begins with BOS: as the tokenizer does it, or the training '
                         'of a run did; never; always.')
_LENGTH = flags.DEFINE_integer('length', 128, 'Tokens to generate.', lower_bound=1)
_CACHE_SIZE = flags.DEFINE_integer('cache_size', None, 'Tokens that the cache keeps. Default: all.',
                                   lower_bound=1)
_SINKS = flags.DEFINE_integer('sinks', 4, 'How many of them are the first tokens of the text; '
                              '0 is a sliding window.', lower_bound=0)
_POSITIONS = flags.DEFINE_enum('positions', 'cache', ['cache', 'text'],
                               'What positions count: the tokens in the cache, or in the text.')
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0: the most likely token. 1: a sample.',
                                  lower_bound=0)
_TOP_K = flags.DEFINE_integer('top_k', None, 'Sample among so many most likely tokens.',
                              lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the sampling.', lower_bound=0, upper_bound=2**32 - 1)
_DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'],
                           'Of parameters and activations.')
_FSDP = flags.DEFINE_integer('fsdp', 1, 'Devices to split the parameters over.', lower_bound=1)

command.answer_help(__name__)  # the imports below take seconds

import numpy as np

from sink_jax.io import compile_cache
from sink_jax.models.decode import state_bytes
from sink_jax.models.generate import stream
from sink_jax.models.kv_cache import CachePolicy
from sink_jax.models.run import RunTokenizer
from sink_jax.pretrained.load import load_pretrained, load_run
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.loop import quiet_logs
from sink_jax.train.sharding import make_mesh

_CHUNK = 8  # tokens between two writes


def main(argv: Sequence[str]) -> None:
  """Generates; a reason instead of a traceback where that cannot be done."""
  quiet_logs()
  try:
    command.no_arguments(argv)
    _generate()
  except (ValueError, CheckpointError, OSError) as error:
    command.stop(error)


def _generate() -> None:
  if (_CHECKPOINT.value is None) == (_WORKDIR.value is None):
    raise ValueError('name a model: either --checkpoint or --workdir.')
  if _CACHE_SIZE.value is None:
    command.unused('is for a cache that does not keep all: add --cache_size.', _SINKS, _POSITIONS)
  if not _TEMPERATURE.value:
    command.unused('is for sampling: add --temperature, such as 1.', _TOP_K, _SEED)
  if _FSDP.value > 1 and _WORKDIR.value is not None:
    raise ValueError('--fsdp is for published models; a run is loaded onto one device.')
  prompt = _read_prompt()
  compile_cache.enable()
  if _CHECKPOINT.value is not None:
    mesh = make_mesh(-1, _FSDP.value) if _FSDP.value > 1 else None
    run = load_pretrained(_CHECKPOINT.value, dtype=_DTYPE.value, mesh=mesh)
  else:
    assert _WORKDIR.value is not None  # one of the two is given, see above
    run = load_run(os.path.expanduser(_WORKDIR.value))
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=_DTYPE.value))
  if _BOS.value == 'none':
    # `stream` puts the first token of a run's training before every text that lacks it.
    run = dataclasses.replace(run, first_token=None)
  tokenizer = run.tokenizer
  tokens = _first_tokens(tokenizer, prompt)
  # On stderr, so that what is piped on is the text alone.
  print(f'{run.name}: {len(tokens)} tokens of prompt, the first ids {tokens[:4].tolist()}',
        file=sys.stderr)
  total = len(tokens) + _LENGTH.value + run.config.sink_tokens
  # A cache of all tokens drops none, and so is no different from attention over the whole text.
  policy = CachePolicy(total)
  if _CACHE_SIZE.value is not None:
    policy = CachePolicy(_CACHE_SIZE.value, _SINKS.value, _POSITIONS.value)
  # tokens[None]: a batch of one text.
  pieces = stream(run, tokens[None], _LENGTH.value, policy=policy,
                  temperature=_TEMPERATURE.value, top_k=_TOP_K.value, seed=_SEED.value,
                  chunk=_CHUNK)
  rate = _write(pieces, tokens, tokenizer)
  cache = state_bytes(run.config, policy, 1) / 2**20
  speed = f'{rate:.1f} tokens/s' if rate else 'too short to be timed'
  print(f'\n{_LENGTH.value} tokens, {speed}; cache of {policy.size} tokens: {cache:.1f} MiB',
        file=sys.stderr)


def _read_prompt() -> str:
  prompt = _given_prompt()
  prompt.encode()  # a ValueError where the bytes are no text
  return prompt


def _given_prompt() -> str:
  if _PROMPT.value is not None and _PROMPT_FILE.value is not None:
    raise ValueError('--prompt and --prompt_file exclude each other.')
  if _PROMPT.value is not None:
    return _PROMPT.value
  if _PROMPT_FILE.value is not None:
    with open(os.path.expanduser(_PROMPT_FILE.value), encoding='utf-8') as file:
      return file.read()
  # Reading a terminal would look like a program that hangs.
  if sys.stdin.isatty():
    raise ValueError("no prompt: give --prompt='...' or --prompt_file, or pipe a text in.")
  return sys.stdin.read()


def _first_tokens(tokenizer: RunTokenizer, prompt: str) -> np.ndarray:
  tokens = tokenizer.with_prefix(tokenizer.encode(prompt).tolist(), _BOS.value)
  if not len(tokens):
    raise ValueError('the prompt is empty, and no BOS stands before it: write something, or '
                     'take --bos=force.')
  return tokens


def _write(pieces: Iterable[np.ndarray], tokens: np.ndarray,
           tokenizer: RunTokenizer) -> float | None:
  """Writes the text as it comes; returns tokens per second without the first piece, which compiles.

  A token may hold a part of a letter, and its text may depend on the token before it. So the
  new text is what the last tokens add to those that were written, once its last letter is whole.
  """
  ids, settled, written = tokens.tolist(), 0, len(tokens)
  print(tokenizer.decode(ids), end='', flush=True)
  started, elapsed, count = None, 0.0, 0
  for piece in pieces:
    count += 0 if started is None else piece.shape[1]
    started = started or time.perf_counter()
    elapsed = time.perf_counter() - started
    ids += piece[0].tolist()
    before, after = tokenizer.decode(ids[settled:written]), tokenizer.decode(ids[settled:])
    if after.startswith(before) and not after.endswith('\ufffd'):
      print(after[len(before):], end='', flush=True)
      settled, written = written, len(ids)
  if written < len(ids):  # bytes that are no letter to the end
    print(tokenizer.decode(ids[written:]), end='')
  print(flush=True)
  return count / elapsed if count else None


def start() -> None:
  command.run(main)
