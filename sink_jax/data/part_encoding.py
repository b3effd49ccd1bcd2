"""Conversations to token ids, part by part, and what the edges of chunks do to them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sink_jax.data.documents import Document, Part
from sink_jax.data.tokenizer import TextTokenizer


class Encoded(NamedTuple):
  """The ids of a document (T,), without BOS and EOS.

  lengths: tokens of each part of a conversation (P,); None for other documents.
  """
  ids: np.ndarray
  lengths: np.ndarray | None = None


def encoded(documents: Sequence[str | tuple[Part, ...]], encoder: TextTokenizer) -> list[Encoded]:
  """The ids of documents, int32, each given as its text or its parts.

  The parts are tokenized apart, as a prompt and its answer are when a model is used: no token spans
  two of them. In the text of a template the names of special tokens become these tokens; in that of
  a message they stay letters.
  """
  texts = [document for document in documents if isinstance(document, str)]
  of_texts = iter(_arrays(texts, encoder))
  of_parts = iter(_encoded_parts([d for d in documents if not isinstance(d, str)], encoder))
  return [Encoded(next(of_texts)) if isinstance(document, str) else next(of_parts)
          for document in documents]


def _encoded_parts(conversations: Sequence[tuple[Part, ...]], encoder: TextTokenizer) -> list[Encoded]:
  split = _Splitter(encoder)
  pieces = [[split(part) for part in parts] for parts in conversations]
  # A template repeats its texts, and each is tokenized once; what begins a conversation apart from
  # what goes on in it.
  firsts = dict.fromkeys(parts[0][0] for parts in pieces if isinstance(parts[0][0], str))
  others = dict.fromkeys(piece for parts in pieces for part in parts for piece in part
                         if isinstance(piece, str))
  ids_of_first = dict(zip(firsts, _arrays(list(firsts), encoder), strict=True))
  ids_of = dict(zip(others, _continuing(list(others), encoder), strict=True))
  result = []
  for parts in pieces:
    ids = [[np.array([piece]) if isinstance(piece, int) else ids_of[piece] for piece in part]
           for part in parts]
    if isinstance(first := parts[0][0], str):
      ids[0][0] = ids_of_first[first]
    result.append(Encoded(np.concatenate(list(itertools.chain(*ids))).astype(np.int32),
                          np.array([sum(map(len, of_part)) for of_part in ids])))
  return result


class _Splitter:
  """Splits parts into texts and the ids of special tokens."""

  def __init__(self, encoder: TextTokenizer):
    self._eos_id, self._special = encoder.eos_id, encoder.special_tokens
    # The longest name first: one may begin with another.
    names = sorted(self._special, key=len, reverse=True)
    self._names = re.compile(f'({"|".join(map(re.escape, names))})') if names else None

  def __call__(self, part: Part) -> list[str | int]:
    if part.text is None:
      return [self._eos_id]
    if not (part.is_template and self._names):
      return [part.text]
    return [self._special.get(piece, piece) for piece in self._names.split(part.text) if piece]


def _arrays(texts: list[str], encoder: TextTokenizer) -> list[np.ndarray]:
  return [np.asarray(ids, np.int32) for ids in encoder.encode_batch(texts)]


def _continuing(texts: list[str], encoder: TextTokenizer) -> list[np.ndarray]:
  """The ids of texts that go on where another text ends."""
  if not texts:
    return []
  alone = _arrays(texts, encoder)
  # Tokenizers made with sentencepiece put a space before whatever they are given, which does not
  # belong into the middle of a text. Behind a line break they put none.
  lead, a, both = _arrays(['\n', 'a', '\na'], encoder)
  if len(both) == len(lead) + len(a) and (both[len(lead):] == a).all():
    return alone
  behind = _arrays(['\n' + text for text in texts], encoder)
  return [b[len(lead):] if len(b) > len(lead) and (b[:len(lead)] == lead).all() else ids
          for b, ids in zip(behind, alone, strict=True)]


def answer_weights(document: Document, lengths: np.ndarray) -> np.ndarray:
  """1 for the tokens of answers and of what ends them, 0 for all others (T,), int32."""
  return np.repeat(np.array([part.is_answer for part in document.parts], np.int32), lengths)


# What is counted of the conversations of a domain; it stands in the manifest of their cache, and
# so in data.json.
#   conversations, turns, answers: those in the stream. long: conversations that no chunk can hold
#     whole; dropped: those of them that were left out of the stream.
#   turns_cut: turns that end in a later chunk than they begin in, which goes on without the
#     template's text before the turn. templates_cut: those that lose a part of that text itself, or
#     of what follows the message, to the other chunk.
COUNTS = ('conversations', 'turns', 'answers', 'long', 'dropped', 'turns_cut', 'templates_cut')


def counted(parts: Sequence[Part], lengths: np.ndarray, start: int, chunk: int) -> dict[str, int]:
  """What `COUNTS` has of one conversation that is in the stream.

  Args:
    lengths: tokens of each part (P,). start: tokens of the stream before the first part.
    chunk: tokens of a chunk.
  """
  ends = start + np.cumsum(lengths)
  edges = np.arange(-(-(start + 1) // chunk) * chunk, int(ends[-1]), chunk)
  # The parts of the tokens on both sides of each edge. 'right', since a part that ends at a
  # position does not hold the token there.
  before, behind = (np.searchsorted(ends, edges - side, 'right') for side in (1, 0))
  cut = [(parts[i], parts[j]) for i, j in zip(before, behind, strict=True)
         if parts[i].turn == parts[j].turn]
  return {'conversations': 1, 'turns': parts[-1].turn + 1, 'answers': answers(parts),
          'turns_cut': len({a.turn for a, _ in cut}),
          'templates_cut': len({a.turn for a, b in cut if a.is_template and b.is_template})}


def answers(parts: Iterable[Part]) -> int:
  """The answers of a conversation."""
  return len({part.turn for part in parts if part.is_answer})
