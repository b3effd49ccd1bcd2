"""Text that occurs twice: near copies among documents, and what a split has on both sides."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

WINDOW = 64  # characters
_SAMPLED = 16  # of so many windows one is compared, in a search for near copies
_SHARED = 0.1  # of the windows of the smaller document: these two go together
_TABLE_BITS = 22


def groups(texts: Mapping[str, str]) -> dict[str, str]:
  """{name: name of the first document of its group} for {name: text}.

  Two documents with a tenth of the windows of the smaller one in common, white space aside,
  are in one group, and so are all that are linked by such pairs. It depends on the texts and
  their order alone.
  """
  names = list(texts)
  samples = [_sample(windows(' '.join(text.split()))) for text in texts.values()]
  first = list(range(len(names)))  # of the group of each document, by way of others

  def root(i):
    while first[i] != i:
      first[i] = first[first[i]]
      i = first[i]
    return i

  for (a, b), common in _common(samples).items():
    if common >= _SHARED * min(len(samples[a]), len(samples[b])):
      low, high = sorted((root(a), root(b)))
      first[high] = low
  return {name: names[root(i)] for i, name in enumerate(names)}


def overlap(held: Iterable[str], training: Iterable[str]) -> float | None:
  """The share of the windows of held-out texts that occur in training texts, too.

  None where the held-out texts have no windows, that is, none has 64 characters.
  """
  hashes = [windows(text) for text in held]
  known, counts = np.unique(np.concatenate([*hashes, np.zeros(0, np.uint64)]), return_counts=True)
  if not len(known):
    return None
  shift = np.uint64(64 - _TABLE_BITS)
  possible = np.zeros(1 << _TABLE_BITS, bool)  # most windows need no search then
  possible[known >> shift] = True
  found = np.zeros(len(known), bool)
  for text in training:
    here = windows(text)
    here = here[possible[here >> shift]]
    places = np.minimum(np.searchsorted(known, here), len(known) - 1)
    found[places[known[places] == here]] = True
  return float(counts[found].sum() / counts.sum())


def windows(text: str) -> np.ndarray:
  """Hashes (uint64) of all windows of 64 characters, in their order."""
  codes = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), np.uint32).astype(np.uint64)
  hashes = (codes + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
  size = 1
  while size < WINDOW:  # of two windows, one twice as long
    hashes ^= hashes >> np.uint64(29)
    hashes = hashes[:-size] * np.uint64(0x94D049BB133111EB) + hashes[size:]
    size *= 2
  return hashes ^ hashes >> np.uint64(31)


def _sample(hashes):
  """Those that a text shares with its copies: chosen by their value, one at least."""
  chosen = hashes[hashes % np.uint64(_SAMPLED) == 0]
  return np.unique(np.append(chosen, hashes.min()) if len(hashes) else chosen)


def _common(samples: Sequence[np.ndarray]) -> collections.Counter:
  """{(a, b): windows that documents a < b have in common}."""
  owners = np.repeat(np.arange(len(samples)), [len(s) for s in samples])
  hashes = np.concatenate([*samples, np.zeros(0, np.uint64)])
  order = np.argsort(hashes, kind='stable')
  hashes, owners = hashes[order], owners[order].tolist()
  bounds = np.flatnonzero(np.diff(hashes, prepend=hashes[:1] + np.uint64(1))).tolist()
  common = collections.Counter()
  for start, stop in itertools.pairwise([*bounds, len(owners)]):
    if stop - start > 1:
      common.update(itertools.combinations(owners[start:stop], 2))
  return common
