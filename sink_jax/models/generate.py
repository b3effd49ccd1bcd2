"""Generating tokens, and scoring long texts, with a cache of bounded size."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Integer

from sink_jax.kernels.shard import mesh_context, mesh_of
from sink_jax.models.arrays import AnyArray, ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.decode import check_policy, decode_step, prefill, read_tokens
from sink_jax.models.inputs import check_ids
from sink_jax.models.kv_cache import CachePolicy, DecodeState
from sink_jax.models.precision import precise
from sink_jax.models.sampling import Endings, Sampling

_CHUNK = 32  # tokens that the device makes between two transfers to the host
_SCORED = 128  # tokens that are scored at once, at most
# Caches of texts of different lengths are a multiple of so many tokens, to share a program.
_CACHE_STEP = 64

Tokens = Integer[AnyArray, 'S T'] | Sequence
EosTokenId = int | Sequence[int] | None
# Logits (S, V) of the last token that was read, and the state after it.
_Carry = tuple[jax.Array, DecodeState]


@runtime_checkable
class Model(Protocol):
  """What generation needs of a model; `sink_jax.Run` has it."""

  @property
  def config(self) -> ModelConfig: ...
  @property
  def params(self) -> ParamTree: ...
  @property
  def name(self) -> str: ...
  @property
  def first_token(self) -> int | None: ...


def stream(run: Model, tokens: Tokens, length: int, *, policy: CachePolicy | None = None,
           temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
           seed: int = 0, eos_token_id: EosTokenId = None,
           chunk: int = _CHUNK) -> Iterator[Integer[np.ndarray, 'S n']]:
  """Continues texts (S, T) of token ids by `length` tokens, in pieces (S, <= chunk).

  If the run has a first token, texts of which none begins with it get it in front;
  `dataclasses.replace(run, first_token=None)` reads them as they are.

  Args:
    policy: what the cache keeps; everything by default.
    temperature, top_k, top_p: see `Sampling`; the most likely token by default.
    seed: the seed of the random numbers; the same seed gives the same tokens.
    eos_token_id: an id that ends a text, or several. The rest of the text's row is filled with the
      (first) id, and the iterator ends once all texts have ended.
    chunk: the largest number of tokens in a piece.

  Raises:
    ValueError: tokens are not ids (S, T) of the vocabulary, some texts begin with the first token
      of the run and some do not, an option is out of range, or there are more tokens than the model
      has learned positions for.
  """
  tokens = _begun(run, checked_tokens(run, tokens))
  _check_sizes(length, chunk, seed)
  sampling = Sampling(temperature, top_k, top_p).checked(run.config.vocab_size)
  endings = Endings(tokens.shape[0], eos_token_id, run.config.vocab_size)
  total = tokens.shape[1] + length
  # It keeps all tokens, whose positions in the cache and in the text then are the same.
  policy = policy or CachePolicy(total + run.config.sink_tokens, positions='text')
  check_policy(run.config, policy, total, tokens.shape[1])
  return _pieces(run, tokens, length, policy, sampling, seed, endings, chunk)


def stream_texts(run: Model, texts: Sequence[Sequence[int]], length: int, *,
                 policy: CachePolicy | None = None, temperature: float = 0.0,
                 top_k: int | None = None, top_p: float | None = None, seed: int = 0,
                 eos_token_id: EosTokenId = None,
                 chunk: int = _CHUNK) -> Iterator[list[Integer[np.ndarray, 'n']]]:
  """Continues S texts of different lengths by `length` tokens or more, in pieces.

  What all texts have is read at once, and the rest of the longer ones token after token, beside
  the tokens that the shorter ones already generate. So there is no padding before a text, and
  every token has the position that it has alone. The texts are read as they are: unlike `stream`,
  this puts no first token of the run before them.

  Args:
    texts: token ids, one or more of each.
    policy, temperature, top_k, top_p, seed: as in `stream`.
    eos_token_id: an id that ends a text, or several; nothing follows it.
    chunk: tokens between two transfers to the host.

  Returns:
    An iterator of S arrays with the new tokens of each text. A shorter text gets its first ones
    earlier, and more than `length` in the end; who has enough of all of them stops asking.

  Raises:
    ValueError: no text, an empty one, ids out of the vocabulary, or more tokens than the model has
      learned positions for.
  """
  counts = np.asarray([len(text) for text in texts], np.int32)
  _check_sizes(length, chunk, seed)
  if not counts.size or counts.min() < 1:
    raise ValueError('there must be at least one text, and one token of each.')
  sampling = Sampling(temperature, top_k, top_p).checked(run.config.vocab_size)
  endings = Endings(len(counts), eos_token_id, run.config.vocab_size)
  checked_tokens(run, [np.concatenate([np.asarray(text) for text in texts])])
  # The three leading bits of the shortest length: at most a fifth of it is read token by token,
  # and all lengths from 2^n to 2^(n+1) share four programs.
  unit = 1 << max(0, int(counts.min()).bit_length() - 3)
  at_once = int(counts.min()) // unit * unit
  total = int(counts.max()) + length
  policy = policy or CachePolicy(
      -(-(total + run.config.sink_tokens) // _CACHE_STEP) * _CACHE_STEP, positions='text')
  check_policy(run.config, policy, total, at_once)
  steps = -(-(total - at_once) // chunk) * chunk
  given_SxT = np.zeros((len(counts), at_once + steps), np.int32)
  for row, text in zip(given_SxT, texts, strict=True):
    row[:len(text)] = text
  return _pieces_of_texts(run, given_SxT, counts, at_once, policy, sampling, seed, endings, chunk)


def text_losses(run: Model, tokens: Tokens, policy: CachePolicy,
                ) -> Iterator[Float[np.ndarray, 'S n']]:
  """Losses -log p(x_t | what the cache keeps of x_<t) of texts (S, T), in pieces (S, n).

  There are T - 1 losses in all, in nats. The texts are scored as they are: unlike `stream`, this
  puts no first token of the run before them, so the losses of a run that was trained with one
  are those of its training only where the texts begin with it. As many tokens as the cache has
  recent ones are read together, 128 at most, and each sees what it would see in generation: the
  losses are those of reading one token at a time, to rounding. Memory does not grow with the text.

  Raises:
    ValueError: as `stream`.
  """
  tokens = checked_tokens(run, tokens)
  if tokens.shape[1] < 2:
    raise ValueError('a text needs at least two tokens to be scored.')
  check_policy(run.config, policy, tokens.shape[1])
  return _losses(run, tokens, policy)


def _pieces(run: Model, tokens: jax.Array, length: int, policy: CachePolicy,
            sampling: Sampling, seed: int, endings: Endings, chunk: int) -> Iterator[np.ndarray]:
  mesh = mesh_of(run.params)
  state = _begin(run.config, mesh, policy, run.params, tokens)
  key = jax.random.key(seed)
  for start in range(0, length, chunk):
    count = min(chunk, length - start)
    # All pieces are made by the same program, which is compiled once for one length; tokens of
    # the last piece that are too many are cut off.
    state, piece = _continue(run.config, mesh, policy, sampling, min(chunk, length), run.params,
                             state, key, start)
    yield endings.filled(np.asarray(piece)[:, :count])
    if endings.all:
      return


def _pieces_of_texts(run: Model, given_SxT: np.ndarray, counts_S: np.ndarray, at_once: int,
                     policy: CachePolicy, sampling: Sampling, seed: int, endings: Endings,
                     chunk: int) -> Iterator[list[np.ndarray]]:
  mesh = mesh_of(run.params)
  state = _begin(run.config, mesh, policy, run.params, jnp.asarray(given_SxT[:, :at_once]))
  key = jax.random.key(seed)
  for start in range(at_once, given_SxT.shape[1], chunk):
    state, piece = _continue_texts(run.config, mesh, policy, sampling, run.params, state, key,
                                   start, given_SxT[:, start:start + chunk], counts_S)
    # The first tokens of a piece may still be those of the text itself.
    yield [endings.cut(row, tokens[max(0, count - start):])
           for row, (tokens, count) in enumerate(zip(np.asarray(piece), counts_S))]
    if endings.all:
      return


def _losses(run: Model, tokens: jax.Array, policy: CachePolicy) -> Iterator[np.ndarray]:
  mesh = mesh_of(run.params)
  state = _begin(run.config, mesh, policy, run.params, tokens[:, :1])
  count = tokens.shape[1] - 1
  # More than the recent tokens at once, and a token would miss some that the cache still has.
  piece = min(_SCORED, policy.recent, count)
  # All pieces are scored by the same program; the losses of the last piece's padding are cut off.
  rest = jnp.pad(tokens[:, 1:], ((0, 0), (0, -count % piece)))
  for start in range(0, count, piece):
    state, losses = _score(run.config, mesh, policy, run.params, state,
                           rest[:, start:start + piece])
    yield np.asarray(losses)[:, :count - start]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _begin(config: ModelConfig, mesh: Mesh | None, policy: CachePolicy, params: ParamTree,
           tokens: jax.Array) -> _Carry:
  with mesh_context(mesh), precise(config.dtype):
    return prefill(config, params, tokens, policy)


# The carry is donated: its caches are the largest arrays of generation, and the program writes
# the new ones into their memory instead of holding both. The caller must not use it again.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=(6,))
def _continue(config: ModelConfig, mesh: Mesh | None, policy: CachePolicy,
              sampling: Sampling, count: int, params: ParamTree, state: _Carry,
              key: jax.Array, start: int | jax.Array) -> tuple[_Carry, jax.Array]:
  def step(carry, number):
    logits, decode_state = carry
    # The key depends on the number of the token alone, so the size of the pieces changes nothing.
    token = sampling.sample(logits, jax.random.fold_in(key, number))
    return decode_step(config, params, token, policy, decode_state), token

  with mesh_context(mesh), precise(config.dtype):
    state, tokens_TxS = jax.lax.scan(step, state, start + jnp.arange(count))
  return state, tokens_TxS.T


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(5,))
def _continue_texts(config: ModelConfig, mesh: Mesh | None, policy: CachePolicy,
                    sampling: Sampling, params: ParamTree, state: _Carry,
                    key: jax.Array, start: int | jax.Array, given_SxT: jax.Array,
                    counts_S: jax.Array) -> tuple[_Carry, jax.Array]:
  """Tokens (S, T) from position `start` on: those of the texts, and then the model's."""
  def step(carry, at):
    position, given_S = at
    logits, decode_state = carry
    made_S = sampling.sample(logits, jax.random.fold_in(key, position))
    token_S = jnp.where(position < counts_S, given_S, made_S)
    return decode_step(config, params, token_S, policy, decode_state), token_S

  with mesh_context(mesh), precise(config.dtype):
    positions = start + jnp.arange(given_SxT.shape[1])
    state, tokens_TxS = jax.lax.scan(step, state, (positions, given_SxT.T))
  return state, tokens_TxS.T


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4,))
def _score(config: ModelConfig, mesh: Mesh | None, policy: CachePolicy, params: ParamTree,
           state: _Carry, tokens: jax.Array) -> tuple[_Carry, jax.Array]:
  logits_SxV, decode_state = state
  with mesh_context(mesh), precise(config.dtype):
    logits_SxLxV, decode_state = read_tokens(config, params, tokens, policy, decode_state, True)
    # The token after these is predicted by the last of them: its loss belongs to the next piece.
    before_SxLxV = jnp.concatenate([logits_SxV[:, None], logits_SxLxV[:, :-1]], 1)
    picked_SxL = jnp.take_along_axis(before_SxLxV, tokens[..., None], -1)[..., 0]
    losses_SxL = jax.nn.logsumexp(before_SxLxV, -1) - picked_SxL
  return (logits_SxLxV[:, -1], decode_state), losses_SxL


def _begun(run: Model, tokens: jax.Array) -> jax.Array:
  """The texts with the first token of the run before them, where it has one."""
  before = first_token_lacking(run, np.asarray(tokens[:, 0]))
  return jnp.pad(tokens, ((0, 0), (len(before), 0)), constant_values=before[0] if before else 0)


def first_token_lacking(run: Model, first_S: np.ndarray) -> list[int]:
  """The first token of the run, where it has one and no text begins with it; else nothing."""
  begins = first_S == run.first_token
  if run.first_token is None or begins.all():
    return []
  if begins.any():
    raise ValueError(f'some texts begin with the first token {run.first_token} of {run.name} and '
                     'some do not: leave it out of all, or put it before all, as '
                     'sj.tokenize(run, texts, length=...) does.')
  return [run.first_token]


def _check_sizes(length: int, chunk: int, seed: int) -> None:
  if length < 1 or chunk < 1:
    raise ValueError(f'length = {length} and chunk = {chunk} must be at least 1.')
  if not 0 <= seed < 2**32:
    raise ValueError(f'seed = {seed} must lie between 0 and {2**32 - 1}.')


def checked_tokens(run: Model, tokens: Tokens) -> jax.Array:
  """The texts as an int32 array, or an error that names what they should be."""
  tokens, config = np.asarray(tokens), run.config
  if not config.vocab_size:
    raise ValueError('a model of continuous inputs has no tokens to generate or to score.')
  if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(f'tokens must be integers of shape (S, T), not {tokens.dtype} of shape '
                     f'{tokens.shape}.')
  check_ids(tokens, config.vocab_size)
  return jnp.asarray(tokens, jnp.int32)
