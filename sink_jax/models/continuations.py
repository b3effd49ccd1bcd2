"""Continuations of texts, all returned at once: as token ids, padded or not, or as strings."""

from __future__ import annotations

from collections.abc import Sequence
import numpy as np
from jaxtyping import Bool, Integer

from sink_jax.models.arrays import AnyArray
from sink_jax.models.generate import (
  Model,
  Tokens,
  checked_tokens,
  first_token_lacking,
  stream,
  stream_texts,
)
from sink_jax.models.run_tokenizer import RunTokenizer

Mask = Integer[AnyArray, 'S T'] | Bool[AnyArray, 'S T'] | Sequence


def generate(run: Model, tokens: Tokens, length: int, *, mask: Mask | None = None, **options,
             ) -> Integer[np.ndarray, 'S n']:
  """Continues texts (S, T) by `length` tokens (S, length), or by fewer if all texts end earlier.

  Args:
    mask: (S, T), 1 for the tokens of a text and 0 for padding on its left or its right, as
      transformers' attention_mask. Padding does not change what follows a text. With a mask, even
      one of ones, a seed draws other tokens than without.
    options: those of `sink_jax.models.generate.stream`.

  Raises:
    ValueError: as `stream` raises it, or the mask has another shape, a gap, or no token of a text.
  """
  if mask is None:
    return np.concatenate(list(stream(run, tokens, length, **options)), 1)
  rows = _continued(run, _unpadded(run, tokens, np.asarray(mask)), length, options)
  width = max(map(len, rows))
  # A row that is shorter than another has ended with such an id, which follows it as in `stream`.
  return np.stack([np.pad(row, (0, width - len(row)), constant_values=np.atleast_1d(
      options['eos_token_id'])[0]) if len(row) < width else row for row in rows])


def generate_texts(run: Model, tokenizer: RunTokenizer, texts: Sequence[str], length: int, *,
                   bos: str = 'tokenizer', **options) -> list[str]:
  """Continues texts by `length` tokens or up to their end, and returns what follows each.

  Args:
    bos: how a text begins, see `sink_jax.tokenize`.
    options: those of `sink_jax.models.generate.stream`; `eos_token_id` is the tokenizer's own by
      default, and with None no token ends a text.

  Raises:
    ValueError: as `stream` raises it, or there is no text, or an empty one without a BOS.
  """
  if isinstance(texts, str):
    raise ValueError('texts must be several, such as [text].')
  options = {'eos_token_id': tokenizer.eos_ids or None} | options
  ids = [tokenizer.with_prefix(tokenizer.encode(text), bos).tolist() for text in texts]
  if not ids or not all(ids):
    raise ValueError('there is no text, or one is empty and no BOS stands before it: write '
                     "something, or take bos='force'.")
  if bos != 'none':
    before = first_token_lacking(run, np.asarray([text[0] for text in ids]))
    ids = [[*before, *text] for text in ids]
  ends = options['eos_token_id']
  ends = set() if ends is None else set(np.atleast_1d(ends).tolist())
  return [tokenizer.decode([i for i in row.tolist() if i not in ends])
          for row in _continued(run, ids, length, options)]


def _continued(run, texts, length, options) -> list[Integer[np.ndarray, 'n']]:
  """What follows each text: `length` tokens, or fewer, of which the last ends it."""
  pieces = stream_texts(run, texts, length, **options)
  return [np.concatenate(row)[:length] for row in zip(*pieces, strict=True)]


def _unpadded(run: Model, tokens: Tokens, mask: np.ndarray) -> list[list[int]]:
  """The tokens of each text, without padding and with the first token of the run."""
  tokens_SxT = np.asarray(checked_tokens(run, tokens))
  if mask.shape != tokens_SxT.shape or not np.isin(mask, (0, 1)).all():
    raise ValueError('mask must hold 1 for a token and 0 for padding, in the shape of the tokens, '
                     f'{tokens_SxT.shape}; it is {mask.dtype} of shape {mask.shape}.')
  texts = []
  for row, (tokens_T, kept_T) in enumerate(zip(tokens_SxT, mask.astype(bool))):
    places = np.flatnonzero(kept_T)
    if not places.size or np.ptp(places) >= places.size:
      raise ValueError(f'row {row} of mask has {"a gap" if places.size else "no token"}: padding '
                       'stands on the left or on the right of a text.')
    texts.append(tokens_T[kept_T])
  before = first_token_lacking(run, np.asarray([text[0] for text in texts]))
  return [[*before, *text.tolist()] for text in texts]
