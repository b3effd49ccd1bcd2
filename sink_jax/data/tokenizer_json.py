"""Reading a Hugging Face `tokenizer.json`, with the library's panics turned into errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import tokenizers


def parsed(serialized: str) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
  """The tokenizer of a tokenizer.json, which neither truncates nor pads, and its vocabulary.

  Raises:
    ValueError: the text is damaged, or of no use: it has no token, or cannot encode a text.
  """
  import tokenizers
  with panics_refused('not a tokenizer.json'):
    tokenizer = tokenizers.Tokenizer.from_str(serialized)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab()
    tokenizer.encode('a')
  if not vocabulary:
    raise ValueError('not a tokenizer.json with any token.')
  return tokenizer, vocabulary


@contextlib.contextmanager
def panics_refused(what: str) -> Iterator[None]:
  """Turns errors of the tokenizers library into ValueErrors that begin with `what`.

  The library raises bare Exceptions, and BaseExceptions where its Rust code panics.
  """
  try:
    yield
  except BaseException as error:
    if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
      raise
    raise ValueError(f'{what} ({" ".join(str(error).split())[:200]})') from None


def special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
  """The ids of a tokenizer's special tokens by their names, in the order of the ids."""
  return {token.content: id_ for id_, token in sorted(tokenizer.get_added_tokens_decoder().items())
          if token.special}
