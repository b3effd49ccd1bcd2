"""Generated texts and their losses, with a key/value cache of bounded size.

Both share one loop over positions, `_read`: it reads the tokens of the texts, and after their end
the tokens that the model generates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Float, Integer

from sink_jax.attention import AnyArray
from sink_jax.foreign import Tensor
from sink_jax.kernels.shard import mesh_context, mesh_of
from sink_jax.models.arrays import ParamTree, check_ids, checked_inputs, precise
from sink_jax.models.config import ModelConfig
from sink_jax.models.decode import CachePolicy, DecodeState, check_policy, empty_state
from sink_jax.models.layers import apply
from sink_jax.models.transformer import Transformer

# Tokens of a text that are read at once; with positions='cache' each layer holds as many rotated
# copies of the keys.
_TOGETHER = 16
_SCORED = 128  # about how many tokens are scored between two transfers to the host
# The size of a cache is a multiple of this, so that texts of different lengths share a program.
_CACHE_STEP = 64
_COLDEST = 1e-6  # temperature; below it the most likely token is taken

Tokens = Integer[AnyArray, 'S T'] | Sequence | Tensor
# Logits (S, V) of the last token that was read, and the state after it.
_Carry = tuple[jax.Array, DecodeState]


class Sampling(NamedTuple):
  """How the next token is chosen; calls with equal values share a compiled program.

  temperature: 0 takes the most likely token, 1 samples from the model's distribution.
  top_k: the number of most likely tokens that are sampled from; None for all.
  top_p: samples from the fewest most likely tokens of this total probability, at this temperature
    and among those of top_k (nucleus sampling, arXiv:1904.09751); None for all.
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None

  def check(self, vocab_size: int) -> None:
    if not 0 <= self.temperature < math.inf:
      raise ValueError(f'temperature = {self.temperature} must be a number from 0 on.')
    if self.top_k is not None and not 1 <= self.top_k <= vocab_size:
      raise ValueError(f'top_k = {self.top_k} must be between 1 and {vocab_size}.')
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f'top_p = {self.top_p} must be above 0, and at most 1.')

  def sample(self, logits_SxV: jax.Array, key: jax.Array, number_S: jax.Array) -> jax.Array:
    """The next token (S,) of each text; draws depend only on the row and the number of a token."""
    if self.temperature < _COLDEST:
      return jnp.argmax(logits_SxV, -1)
    logits_SxV = logits_SxV / self.temperature
    fold = jax.random.fold_in
    key_of = lambda row, number: fold(fold(key, row), number)
    keys_S = jax.vmap(key_of)(jnp.arange(len(number_S)), number_S)
    draw = jax.vmap(jax.random.categorical)
    if self.top_k is None and self.top_p is None:
      return draw(keys_S, logits_SxV)
    best_SxK, ids_SxK = jax.lax.top_k(logits_SxV, self.top_k or logits_SxV.shape[-1])
    if self.top_p is not None:
      p_SxK = jax.nn.softmax(best_SxK, -1)
      # A token is left out if the likelier ones suffice; the likeliest never is.
      best_SxK = jnp.where(jnp.cumsum(p_SxK, -1) - p_SxK < self.top_p, best_SxK, -jnp.inf)
    return jnp.take_along_axis(ids_SxK, draw(keys_S, best_SxK)[:, None], -1)[:, 0]


def stream_texts(
  config: ModelConfig,
  params: ParamTree,
  texts: Sequence[Sequence[int] | np.ndarray],
  length: int,
  *,
  policy: CachePolicy | None = None,
  temperature: float = 0.0,
  top_k: int | None = None,
  top_p: float | None = None,
  seed: int = 0,
  eos_token_id: int | Sequence[int] | None = None,
  chunk: int = 32,
) -> Iterator[list[Integer[np.ndarray, 'n']]]:
  """Continues S texts of different lengths by `length` tokens, in pieces.

  The tokens up to the length of the shortest text are read at once. Longer texts are then read
  token by token, while shorter ones already generate, so nothing is padded.

  Args:
    texts: token ids, one or more of each.
    policy: what the cache keeps; everything by default.
    temperature, top_k, top_p, seed: see `Sampling`; the most likely token by default.
    eos_token_id: an id that ends a text, or several; nothing follows it.
    chunk: the largest number of tokens in a piece, which the device makes between two transfers.

  Returns:
    An iterator over lists of S arrays with new tokens; a shorter text gets its first ones earlier.

  Raises:
    ValueError: there is no text or an empty one, an id or option is out of range, or positions do
    not suffice.
  """
  counts_S = np.asarray([len(text) for text in texts], np.int32)
  if not counts_S.size or not counts_S.all():
    raise ValueError(
      'there is no text, or one without a token: write something, or put BOS before '
      "it, as bos='force' does."
    )
  if min(length, chunk) < 1 or not 0 <= seed < 2**32:
    raise ValueError(
      f'length = {length} and chunk = {chunk} must be at least 1, and seed = {seed} '
      f'between 0 and {2**32 - 1}.'
    )
  sampling, ends = Sampling(temperature, top_k, top_p), end_ids(eos_token_id)
  sampling.check(config.vocab_size)
  check_ids(ends, config.vocab_size, 'eos_token_id')
  total = int(counts_S.max()) + length
  at_once, size = _read_at_once(config, int(counts_S.min()), total, length)
  policy = policy or CachePolicy(size, positions='text')
  check_policy(config, policy, total, at_once)
  given_SxT = np.zeros((len(texts), total + chunk), np.int32)  # a piece may reach beyond the end
  for row, text in zip(given_SxT, texts, strict=True):
    row[: len(text)] = text
  check_ids(given_SxT, config.vocab_size)
  # Learned sink tokens, which `Transformer` puts before the text, take entries as well.
  start = min(at_once, policy.size - config.sink_tokens)
  made = _made(config, params, policy, sampling, seed, given_SxT, counts_S, start, chunk)
  return _new_tokens(made, counts_S, length, ends)


def _read_at_once(config: ModelConfig, shortest: int, total: int, length: int) -> tuple[int, int]:
  """How many tokens are read in the first pass, and the size of a cache of everything."""
  size = total + config.sink_tokens
  if shortest + length == total:
    return shortest, size
  # The shortest length is rounded down to its three leading bits, so that lengths from 2^n to
  # 2^(n+1) share four programs for this part, but a prefix is not cut. Caches of equal size share
  # the programs for the rest.
  prefix = max(spec.mask.prefix or 0 for spec in config.attention_specs)
  rounded = shortest & -1 << max(0, shortest.bit_length() - 3)
  at_once = max(rounded, min(shortest, prefix - config.sink_tokens))
  return at_once, -(-size // _CACHE_STEP) * _CACHE_STEP


def _made(
  config: ModelConfig,
  params: ParamTree,
  policy: CachePolicy,
  sampling: Sampling,
  seed: int,
  given_SxT: np.ndarray,
  counts_S: np.ndarray,
  start: int,
  chunk: int,
) -> Iterator[tuple[int, np.ndarray]]:
  """Pieces (start, tokens (S, chunk)) of the texts and of what the model adds, without an end."""
  model, key = (config, mesh_of(params), policy, params), jax.random.key(seed)
  carry = _begin(*model, given_SxT[:, :start])
  together, total = min(_TOGETHER, policy.recent), given_SxT.shape[1] - chunk
  while start + together <= counts_S.min():  # one program for all lengths
    given = given_SxT[:, start : start + together]
    carry, _ = _read(*model, None, together, carry, key, start, given, counts_S)
    start += together
  chunk = min(chunk, total - start)
  while True:
    given = given_SxT[:, start : start + chunk]
    carry, tokens_SxT = _read(*model, sampling, 1, carry, key, start, given, counts_S)
    yield start, np.asarray(tokens_SxT)
    start += chunk


def _new_tokens(
  made: Iterator[tuple[int, np.ndarray]],
  counts_S: np.ndarray,
  length: int,
  ends: np.ndarray,
) -> Iterator[list[np.ndarray]]:
  """The tokens of each text after the given ones, up to its end."""
  left_S = np.full(len(counts_S), length)
  while left_S.any():
    start, tokens_SxT = next(made)
    rows = []
    for s, tokens_T in enumerate(tokens_SxT):
      # The first tokens of a piece may still belong to the given text.
      new = tokens_T[max(0, counts_S[s] - start) :][: left_S[s]]
      at = np.flatnonzero(np.isin(new, ends))
      rows.append(new[: at[0] + 1] if at.size else new)
      left_S[s] = 0 if at.size else left_S[s] - len(new)
    if any(map(len, rows)):
      yield rows


def text_losses(
  config: ModelConfig,
  params: ParamTree,
  tokens: Tokens,
  policy: CachePolicy,
) -> Iterator[Float[np.ndarray, 'S n']]:
  """Losses -log p(x_t | what the cache keeps of x_<t) of texts (S, T), in pieces (S, n).

  There are T - 1 losses in all, in nats. Up to 16 tokens, but not more than the cache's recent
  ones, are read together, which gives the losses of reading one at a time, up to rounding. Memory
  does not grow with the text. Raises a ValueError if T < 2, or if the cache or the vocabulary is
  too small.
  """
  tokens = np.asarray(checked_inputs(config, tokens, least=2))
  check_policy(config, policy, tokens.shape[1])
  model, count = (config, mesh_of(params), policy, params), tokens.shape[1] - 1
  carry, key = _begin(*model, tokens[:, :1]), jax.random.key(0)
  # With more than the recent tokens at once a token would miss some that the cache still has.
  together = min(_TOGETHER, policy.recent, count)
  piece = together * max(1, min(_SCORED, count) // together)
  # All pieces are scored by the same program; the losses of the last piece's padding are cut off.
  rest = np.pad(tokens[:, 1:], ((0, 0), (0, -count % piece)))
  counts_S = np.full(len(tokens), 1 + rest.shape[1], np.int32)
  for start in range(0, count, piece):
    given = rest[:, start : start + piece]
    carry, losses = _read(*model, None, together, carry, key, 1 + start, given, counts_S)
    yield np.asarray(losses)[:, : count - start]


def end_ids(eos_token_id: int | Sequence[int] | None) -> np.ndarray:
  """The ids that end a text; may be empty."""
  return np.asarray([] if eos_token_id is None else np.atleast_1d(eos_token_id), np.int64)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _begin(
  config: ModelConfig,
  mesh: Mesh | None,
  policy: CachePolicy,
  params: ParamTree,
  tokens_SxT: jax.Array | np.ndarray,
) -> _Carry:
  """Reads the beginning of texts, which fits the cache, in one forward pass."""
  model = functools.partial(apply, Transformer(config), params)
  with mesh_context(mesh), precise(config.dtype):
    batch, length = tokens_SxT.shape
    positions = policy.first_positions(length + config.sink_tokens)
    state = empty_state(config, policy, batch)
    h_SxTxE, _, state = model(jnp.asarray(tokens_SxT), None, state, positions, method='hidden')
    # The next token depends on the last one's logits only.
    return model(h_SxTxE[:, -1:], method='logits')[:, 0], state


# The carry is donated, since its caches are large: the caller must not use it again.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 4, 5), donate_argnums=(6,))
def _read(
  config: ModelConfig,
  mesh: Mesh | None,
  policy: CachePolicy,
  params: ParamTree,
  sampling: Sampling | None,
  together: int,
  carry: _Carry,
  key: jax.Array,
  start: int | jax.Array,
  given_SxT: jax.Array,
  counts_S: jax.Array,
) -> tuple[_Carry, jax.Array]:
  """Reads T tokens of each text from `start` on; returns the carry and the losses (S, T).

  With `sampling` the model chooses the tokens after the first counts_S of a text, one at a time,
  and the result has the tokens (S, T) instead of losses.
  """
  model = functools.partial(apply, Transformer(config), params)

  def step(carry, at):
    position, tokens_SxL = at
    logits_SxV, state = carry
    if sampling is not None:
      made_S = sampling.sample(logits_SxV, key, position - counts_S)
      tokens_SxL = jnp.where(position < counts_S, tokens_SxL[:, 0], made_S)[:, None]
    positions = policy.next_positions(state.tokens_read, together)
    h_SxLxE, _, state = model(tokens_SxL, None, state, positions, method='hidden')
    logits_SxLxV = model(h_SxLxE, method='logits')
    carry = logits_SxLxV[:, -1], state
    if sampling is not None:
      return carry, tokens_SxL
    before_SxLxV = jnp.concatenate([logits_SxV[:, None], logits_SxLxV[:, :-1]], 1)
    return carry, optax.softmax_cross_entropy_with_integer_labels(before_SxLxV, tokens_SxL)

  with mesh_context(mesh), precise(config.dtype):
    batch, length = given_SxT.shape
    pieces = jnp.swapaxes(given_SxT.reshape(batch, -1, together), 0, 1)
    carry, result = jax.lax.scan(step, carry, (start + jnp.arange(0, length, together), pieces))
  return carry, jnp.swapaxes(result, 0, 1).reshape(batch, length)
