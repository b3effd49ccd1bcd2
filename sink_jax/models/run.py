"""A model with its parameters, ready to be called: logits, records, generated texts and losses.

Generation and losses share a cache of bounded size and one loop over positions, `_read`: it reads the tokens
of the texts, and after their end the tokens that the model generates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Integer

from sink_jax.attention import AnyArray
from sink_jax.foreign import Tensor, TokenMask, standard_promotion, texts_in
from sink_jax.kernels.shard import mesh_context, mesh_of
from sink_jax.models.arrays import ParamTree, check_ids, checked_inputs, precise
from sink_jax.models.config import ModelConfig
from sink_jax.models.decode import CachePolicy, DecodeState, check_policy, empty_state
from sink_jax.models.layers import apply
from sink_jax.models.record import GraftReport, Record, RecordOptions
from sink_jax.models.transformer import Transformer

# Tokens of a text that are read at once; with positions='cache' each layer holds as many rotated copies of
# the keys.
_TOGETHER = 16
_SCORED = 128  # about how many tokens are scored between two transfers to the host
# The size of a cache is a multiple of this, so that texts of different lengths share a program.
_CACHE_STEP = 64
_COLDEST = 1e-6  # temperature; below it the most likely token is taken

# Token ids, or the features of a model of continuous inputs.
ModelInputs = Integer[AnyArray, 'S T'] | Float[AnyArray, 'S T F'] | Sequence | Tensor
Tokens = Integer[AnyArray, 'S T'] | Sequence | Tensor
# Logits (S, V) of the last token that was read, and the state after it.
_Carry = tuple[jax.Array, DecodeState]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """A trained or imported model with its parameters.

  If its activations are float32, its matrix products are too, also on GPUs and TPUs.

  Attributes:
    config, params: the model, and its parameters, nested dicts of arrays as `Transformer` makes them.
    name, folder: of the workdir or checkpoint that the model was loaded from.
    step: the number of training steps done; None if unknown.
    bos: how the inputs of a published model begin: 'tokenizer' if its tokenizer prepends a BOS,
      otherwise 'none', as for a run, which is trained on pieces of packed text.
    probe_tokens: the fixed probe inputs (S, T) of a training run; otherwise None.
    first_token: the id with which every training sequence began; None if they began differently.
    read_tokenizer, make_tokens: functions that read `tokenizer`, and make probe inputs (S, T) of
      plain text for a published model, set by the function that loads the run.
    graft: what `sink_jax.graft` changed in the model; None if nothing was grafted.
  """

  config: ModelConfig
  params: ParamTree
  name: str = ''
  step: int | None = None
  bos: str = 'none'
  probe_tokens: AnyArray | None = None
  folder: str | None = None
  first_token: int | None = None
  read_tokenizer: Callable[[Run], Any] | None = dataclasses.field(default=None, repr=False)
  make_tokens: Callable[[Run], AnyArray] | None = dataclasses.field(default=None, repr=False)
  graft: GraftReport | None = None

  @functools.cached_property
  def tokenizer(self) -> Any:
    """The `data.tokenizer.TextTokenizer` of the model, read when it is first used."""
    if self.read_tokenizer is None:
      raise ValueError(f'{self.name or "the model"} was not loaded from a folder, so no tokenizer '
                       'is known: pass token ids.')
    return self.read_tokenizer(self)

  @standard_promotion()
  def logits(self, tokens: ModelInputs) -> Float[Array, 'S T V']:
    """Returns the next-token logits (S, T, V), float32, for tokens (S, T).

    Raises a ValueError for ids outside the vocabulary, more tokens than learned positions, or a
    checkpoint without an unembedding.
    """
    tokens = checked_inputs(self.config, tokens)
    return record(self.config, None, mesh_of(self.params), self.params, tokens)

  @standard_promotion()
  def record(self, tokens: ModelInputs, options: RecordOptions = RecordOptions()) -> Record:
    """Runs the model on ids (S, T), or continuous features (S, T, F), and returns what it recorded.

    options: what is recorded besides importance and norms. Raises the errors of `logits`.
    """
    tokens = checked_inputs(self.config, tokens)
    return record(self.config, options, mesh_of(self.params), self.params, tokens)

  @standard_promotion()
  def generate(self, tokens: Tokens, length: int, *, mask: TokenMask | None = None, **options,
               ) -> Integer[np.ndarray, 'S n']:
    """Continues texts (S, T) by `length` tokens (S, length), or by fewer if all texts end earlier.

    If the run has a first token, texts that do not begin with it get it in front;
    `dataclasses.replace(run, first_token=None)` reads them as they are. Errors and options are those of
    `models.run.stream_texts`: policy, temperature, top_k, top_p, seed and eos_token_id. If a text ends early,
    the first eos_token_id fills its row.

    Args:
      mask: (S, T), 1 for the tokens of a text and 0 for padding on its left or its right, as
        transformers' attention_mask. It changes neither what follows a text nor what a seed draws.
    """
    tokens = np.asarray(checked_inputs(self.config, tokens))
    texts = texts_in(None, mask, *tokens.shape)
    texts = self.begun(tokens if texts is None else texts.rows(tokens))
    rows = [np.concatenate(row) for row in zip(*stream_texts(self, texts, length, **options))]
    width, fill = max(map(len, rows)), [*_end_ids(options.get('eos_token_id')), 0][0]
    return np.stack([np.pad(row, (0, width - len(row)), constant_values=fill) for row in rows])

  @standard_promotion()
  def generate_texts(self, texts: Sequence[str], length: int, *, bos: str = 'tokenizer',
                     special: bool = False, **options) -> list[str]:
    """Continues texts by `length` tokens or up to their end, and returns what follows each.

    Options are those of `generate`; `eos_token_id` is the tokenizer's by default, None for no end.
    bos, special: how a text begins, and whether names of special tokens in it are these tokens, see
      `sink_jax.tokenize`.
    """
    if isinstance(texts, str):
      raise ValueError('texts must be several, such as [text].')
    tokenizer = self.tokenizer
    settings: dict[str, Any] = {'eos_token_id': tokenizer.eos_ids or None} | options
    ids = [tokenizer.with_prefix(tokenizer.encode(text, special=special), bos) for text in texts]
    pieces = stream_texts(self, ids if bos == 'none' else self.begun(ids), length, **settings)
    rows, ends = map(np.concatenate, zip(*pieces)), _end_ids(settings['eos_token_id'])
    return [tokenizer.decode(row[~np.isin(row, ends)].tolist()) for row in rows]

  def begun(self, texts: Sequence | np.ndarray) -> list[np.ndarray]:
    """Texts with the first token of the run in front, unless they begin with it."""
    first = self.first_token
    return [np.asarray(text) if first is None or list(text[:1]) == [first] else
            np.concatenate([[first], text]) for text in texts]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def record(config: ModelConfig, options: RecordOptions | None, mesh: Mesh | None, params: ParamTree,
           inputs: AnyArray) -> Any:
  """`Run.record` of parameters that lie on a mesh, None for one device; `Run.logits` without options.

  Equal configs and options share a compiled program.
  """
  with mesh_context(mesh), precise(config.dtype):
    # Only logits need the unembedding, which a checkpoint may lack.
    results = apply(Transformer(config), params, inputs, options, unembed=options is None)
    results = results if options is None else results[1]
    if mesh is None or jax.process_count() == 1:
      return results
    # Replicated over the devices, since a process can read only its devices.
    return jax.lax.with_sharding_constraint(results, PartitionSpec())


class Sampling(NamedTuple):
  """How the next token is chosen; calls with equal values share a compiled program."""

  temperature: float = 0.0  # 0 takes the most likely token, 1 samples from the model's distribution
  top_k: int | None = None  # the number of most likely tokens that are sampled from; None for all
  # Samples from the fewest most likely tokens of this total probability, at this temperature and among those
  # of top_k (nucleus sampling, arXiv:1904.09751); None for all.
  top_p: float | None = None

  def check(self, vocab_size: int) -> None:
    if not 0 <= self.temperature < math.inf:
      raise ValueError(f'temperature = {self.temperature} must be a number from 0 on.')
    if self.top_k is not None and not 1 <= self.top_k <= vocab_size:
      raise ValueError(f'top_k = {self.top_k} must be between 1 and {vocab_size}.')
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f'top_p = {self.top_p} must be above 0, and at most 1.')

  def sample(self, logits_SxV: jax.Array, key: jax.Array, number_S: jax.Array) -> jax.Array:
    """The next token (S,) of each text; random numbers depend only on the row and the number of a token."""
    if self.temperature < _COLDEST:
      return jnp.argmax(logits_SxV, -1)
    logits_SxV = logits_SxV / self.temperature
    fold = jax.random.fold_in
    keys_S = jax.vmap(lambda row, n: fold(fold(key, row), n))(jnp.arange(len(number_S)), number_S)
    draw = jax.vmap(jax.random.categorical)
    if self.top_k is None and self.top_p is None:
      return draw(keys_S, logits_SxV)
    best_SxK, ids_SxK = jax.lax.top_k(logits_SxV, self.top_k or logits_SxV.shape[-1])
    if self.top_p is not None:
      p_SxK = jax.nn.softmax(best_SxK, -1)
      # A token is left out if the likelier ones suffice; the likeliest never is.
      best_SxK = jnp.where(jnp.cumsum(p_SxK, -1) - p_SxK < self.top_p, best_SxK, -jnp.inf)
    return jnp.take_along_axis(ids_SxK, draw(keys_S, best_SxK)[:, None], -1)[:, 0]


def stream_texts(run: Run, texts: Sequence[Sequence[int] | np.ndarray], length: int, *,
                 policy: CachePolicy | None = None, temperature: float = 0.0, top_k: int | None = None,
                 top_p: float | None = None, seed: int = 0, eos_token_id: int | Sequence[int] | None = None,
                 chunk: int = 32) -> Iterator[list[Integer[np.ndarray, 'n']]]:
  """Continues S texts of different lengths by `length` tokens, in pieces.

  The tokens up to the length of the shortest text are read at once. Longer texts are then read token by
  token, while shorter ones already generate, so nothing is padded.

  Args:
    texts: token ids, one or more of each.
    policy: what the cache keeps; everything by default.
    temperature, top_k, top_p, seed: see `Sampling`; the most likely token by default.
    eos_token_id: an id that ends a text, or several; nothing follows it.
    chunk: the largest number of tokens in a piece, which the device makes between two transfers.

  Returns:
    An iterator over lists of S arrays with new tokens; a shorter text gets its first ones earlier.

  Raises:
    ValueError: there is no text or an empty one, an id or option is out of range, or positions do not
    suffice.
  """
  counts_S, config = np.asarray([len(text) for text in texts], np.int32), run.config
  if not counts_S.size or not counts_S.all():
    raise ValueError('there is no text, or one without a token: write something, or put BOS before '
                     "it, as bos='force' does.")
  if min(length, chunk) < 1 or not 0 <= seed < 2**32:
    raise ValueError(f'length = {length} and chunk = {chunk} must be at least 1, and seed = {seed} between 0 and '
                     f'{2**32 - 1}.')
  sampling, ends = Sampling(temperature, top_k, top_p), _end_ids(eos_token_id)
  sampling.check(config.vocab_size)
  check_ids(ends, config.vocab_size, 'eos_token_id')
  at_once, total = int(counts_S.min()), int(counts_S.max()) + length
  size = total + config.sink_tokens
  if at_once + length < total:
    # The shortest length is rounded down to its three leading bits, so that lengths from 2^n to 2^(n+1) share
    # four programs for this part, but a prefix is not cut. Caches of equal size share the programs for the rest.
    prefix = max(config.attention_of(layer).mask.prefix or 0 for layer in config.pattern if not layer.mamba)
    at_once = max(at_once & -1 << max(0, at_once.bit_length() - 3), min(at_once, prefix - config.sink_tokens))
    size = -(-size // _CACHE_STEP) * _CACHE_STEP
  policy = policy or CachePolicy(size, positions='text')
  check_policy(config, policy, total, at_once)
  given_SxT = np.zeros((len(texts), total + chunk), np.int32)
  for row, text in zip(given_SxT, texts, strict=True):
    row[:len(text)] = text
  check_ids(given_SxT, config.vocab_size)

  def pieces(chunk: int) -> Iterator[list[np.ndarray]]:
    # Learned sink tokens, which `Transformer` puts before the text, take entries as well.
    start, mesh = min(at_once, policy.size - config.sink_tokens), mesh_of(run.params)
    read = functools.partial(_read, config, mesh, policy)
    carry = _begin(config, mesh, policy, run.params, given_SxT[:, :start])
    key, together = jax.random.key(seed), min(_TOGETHER, policy.recent)
    while start + together <= counts_S.min():  # one program for all lengths
      carry, _ = read(None, together, run.params, carry, key, start,
                      given_SxT[:, start:start + together], counts_S)
      start += together
    left_S, chunk = np.full(len(counts_S), length), min(chunk, total - start)
    while left_S.any():
      carry, tokens_SxT = read(sampling, 1, run.params, carry, key, start,
                               given_SxT[:, start:start + chunk], counts_S)
      rows = []
      for s, tokens_T in enumerate(np.asarray(tokens_SxT)):
        # The first tokens of a piece may still belong to the given text.
        new = tokens_T[max(0, counts_S[s] - start):][:left_S[s]]
        at = np.flatnonzero(np.isin(new, ends))
        rows.append(new[:at[0] + 1] if at.size else new)
        left_S[s] = 0 if at.size else left_S[s] - len(new)
      start += chunk
      if any(map(len, rows)):
        yield rows

  return pieces(chunk)


def text_losses(run: Run, tokens: Tokens, policy: CachePolicy,
                ) -> Iterator[Float[np.ndarray, 'S n']]:
  """Losses -log p(x_t | what the cache keeps of x_<t) of texts (S, T), in pieces (S, n).

  There are T - 1 losses in all, in nats. Up to 16 tokens, but not more than the cache's recent ones, are read
  together, which gives the losses of reading one at a time, up to rounding. Memory does not grow with the
  text. Raises a ValueError if T < 2, or if the cache or the vocabulary is too small.
  """
  config, tokens = run.config, np.asarray(checked_inputs(run.config, tokens, least=2))
  check_policy(config, policy, tokens.shape[1])
  mesh, key, count = mesh_of(run.params), jax.random.key(0), tokens.shape[1] - 1
  carry = _begin(config, mesh, policy, run.params, tokens[:, :1])
  # With more than the recent tokens at once a token would miss some that the cache still has.
  together = min(_TOGETHER, policy.recent, count)
  piece = together * max(1, min(_SCORED, count) // together)
  # All pieces are scored by the same program; the losses of the last piece's padding are cut off.
  rest = np.pad(tokens[:, 1:], ((0, 0), (0, -count % piece)))
  counts_S = np.full(len(tokens), 1 + rest.shape[1], np.int32)
  for start in range(0, count, piece):
    carry, losses = _read(config, mesh, policy, None, together, run.params, carry, key, 1 + start,
                          rest[:, start:start + piece], counts_S)
    yield np.asarray(losses)[:, :count - start]


def _end_ids(eos_token_id: int | Sequence[int] | None) -> np.ndarray:
  """The ids that end a text; may be empty."""
  return np.asarray([] if eos_token_id is None else np.atleast_1d(eos_token_id), np.int64)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _begin(config: ModelConfig, mesh: Mesh | None, policy: CachePolicy, params: ParamTree,
           tokens_SxT: jax.Array | np.ndarray) -> _Carry:
  """Reads the beginning of texts, which fits the cache, in one forward pass."""
  with mesh_context(mesh), precise(config.dtype):
    batch, length = tokens_SxT.shape
    return apply(Transformer(config), params, jnp.asarray(tokens_SxT),
                 state=empty_state(config, policy, batch),
                 positions=policy.first_positions(length + config.sink_tokens))


# The carry is donated, since its caches are large: the caller must not use it again.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=(6,))
def _read(config: ModelConfig, mesh: Mesh | None, policy: CachePolicy, sampling: Sampling | None,
          together: int, params: ParamTree, carry: _Carry, key: jax.Array, start: int | jax.Array,
          given_SxT: jax.Array, counts_S: jax.Array) -> tuple[_Carry, jax.Array]:
  """Reads T tokens of each text from `start` on; returns the carry and the losses (S, T).

  With `sampling` the model chooses the tokens after the first counts_S of a text, one at a time, and the
  result has the tokens (S, T) instead of losses.
  """
  def step(carry, at):
    position, tokens_SxL = at
    logits_SxV, state = carry
    if sampling is not None:
      made_S = sampling.sample(logits_SxV, key, position - counts_S)
      tokens_SxL = jnp.where(position < counts_S, tokens_SxL[:, 0], made_S)[:, None]
    logits_SxLxV, state = apply(
        Transformer(config), params, tokens_SxL, state=state,
        positions=policy.next_positions(state.tokens_read, together))
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
