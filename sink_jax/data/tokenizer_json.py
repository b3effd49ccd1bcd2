"""Reading a Hugging Face `tokenizer.json`, with the library's panics turned into errors."""

from __future__ import annotations

import contextlib
import json
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


def cut(tokenizer: tokenizers.Tokenizer, size: int) -> tokenizers.Tokenizer:
  """The tokenizer without its tokens of the ids from `size` on.

  These are added tokens, or of BPE what its last merges make: a text that had them gets the tokens
  that they are made of.

  Raises:
    ValueError: there are others among them, without which some texts could not be read.
  """
  import tokenizers
  with panics_refused('it cannot be written'):
    whole = json.loads(tokenizer.to_str())
  model, added = whole['model'], {token['content'] for token in whole['added_tokens']}
  own = model['vocab']  # in Unigram a list of (token, score), whose indices are the ids
  ids = own if isinstance(own, dict) else {token: i for i, (token, _) in enumerate(own)}
  kept, merges = {token for token, id_ in ids.items() if id_ < size}, []
  for merge in model.get('merges', ()):
    first, second = merge if isinstance(merge, list) else merge.split(' ')
    made = first + second.removeprefix(model.get('continuing_subword_prefix') or '')
    added.add(made)  # it can go: its parts stay
    if {first, second, made} <= kept:
      merges.append(merge)
  if needed := sorted(ids.keys() - kept - added, key=ids.__getitem__):
    raise ValueError(f'{needed[0]!r} has the id {ids[needed[0]]}, and is neither an added token '
                     'nor made of others')
  model['vocab'] = ({token: ids[token] for token in ids if token in kept}
                    if isinstance(own, dict) else own[:size])
  if 'merges' in model:
    model['merges'] = merges
  whole['added_tokens'] = [token for token in whole['added_tokens'] if token['id'] < size]
  with panics_refused('what is left is no tokenizer'):
    left = tokenizers.Tokenizer.from_str(json.dumps(whole))
  if not left.get_vocab():
    raise ValueError('no token is left')
  return left
