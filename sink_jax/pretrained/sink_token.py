"""The token id that a learned sink token becomes where a run is exported."""

from __future__ import annotations

from sink_jax.data.dataset import DataConfig
from sink_jax.data.token_edits import FixedToken, RandomTokens
from sink_jax.data.tokenizer import TextTokenizer


def unused_token(tokenizer: TextTokenizer, data: DataConfig) -> int:
  """A token that no input of the training was: padding, or a BOS that it did not use.

  Documents are packed, so that nothing is padded, and no text has the id of a special token.

  Raises:
    ValueError: there is none; with the reason.
  """
  candidates = (tokenizer.pad_id, None if data.bos else tokenizer.bos_id)
  reasons = []
  for token in (token for token in candidates if token is not None):
    if token == tokenizer.eos_id:  # it ends every document
      reasons.append(f'{token} ends documents')
    elif edit := next((edit for edit in data.interventions if _writes(edit, token)), None):
      reasons.append(f'{edit!r} writes {token}')
    else:
      return token
  raise ValueError(f'training held each special token of its tokenizer ({", ".join(reasons)})')


def _writes(edit: object, token: int) -> bool:
  """Whether an edit of chunks may write a token."""
  if isinstance(edit, RandomTokens):
    return not edit.below or token < edit.below
  return not isinstance(edit, FixedToken) or edit.token == token
