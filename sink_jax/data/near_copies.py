"""Text that occurs twice: near copies among documents, and what a split has on both sides.

Texts are compared by the hashes of all their windows of 64 characters: two texts that share a
window share a passage, wherever it stands in them.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

WINDOW = 64  # characters
_SAMPLED = 16  # one of this many windows is compared in a search for near copies
_SHARED = 0.1  # documents with this share of the smaller one's windows in common go together
_TABLE_BITS = 22  # of a table of hash prefixes: 4 MiB, which fit into a cache of the CPU


def groups(texts: Mapping[str, str]) -> dict[str, str]:
  """Groups the documents {name: text}; returns {name: name of the first document of its group}.

  Two documents with a tenth of the windows of the smaller one in common, white space aside, are in
  one group, and so are all that are linked by such pairs. The result depends on the texts and their
  order alone.
  """
  names = list(texts)
  samples = [_sample(windows(' '.join(text.split()))) for text in texts.values()]
  # Disjoint sets: from a document, following these numbers leads to the first one of its group.
  first = list(range(len(names)))

  def root(i: int) -> int:
    # Every step also shortens the path, by pointing a document at its grandparent.
    while first[i] != i:
      first[i] = first[first[i]]
      i = first[i]
    return i

  for (a, b), common in _common(samples).items():
    if common >= _SHARED * min(len(samples[a]), len(samples[b])):
      # The lower number leads, so that a group has the name of its first document.
      low, high = sorted((root(a), root(b)))
      first[high] = low
  return {name: names[root(i)] for i, name in enumerate(names)}


def overlap(held: Iterable[str], training: Iterable[str]) -> float | None:
  """The share of the windows of held-out texts that occur in training texts as well.

  None where the held-out texts have no windows: none has 64 characters.
  """
  hashes = [windows(text) for text in held]
  known, counts = np.unique(np.concatenate([*hashes, np.zeros(0, np.uint64)]), return_counts=True)
  if not len(known):
    return None
  shift = np.uint64(64 - _TABLE_BITS)
  # A table of the first bits tells at once that most windows are unknown; the rest are searched.
  possible = np.zeros(1 << _TABLE_BITS, bool)
  possible[known >> shift] = True
  occurs = np.zeros(len(known), bool)
  for text in training:
    candidates = windows(text)
    candidates = candidates[possible[candidates >> shift]]
    # A hash above all known ones is placed behind the last of them, where there is nothing to
    # compare.
    positions = np.minimum(np.searchsorted(known, candidates), len(known) - 1)
    occurs[positions[known[positions] == candidates]] = True
  return float(counts[occurs].sum() / counts.sum())


def windows(text: str) -> np.ndarray:
  """Hashes (uint64) of all windows of 64 characters, in their order; none for a shorter text."""
  codes = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), np.uint32).astype(np.uint64)
  hashes = (codes + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
  size = 1
  # From the hashes of all windows of one size to those of twice that size: six passes for 64.
  while size < WINDOW:
    hashes ^= hashes >> np.uint64(29)
    # The factor is on the left half alone: a plain sum would be the same for exchanged halves. It
    # is odd, so that no bits are lost modulo 2**64.
    hashes = hashes[:-size] * np.uint64(0x94D049BB133111EB) + hashes[size:]
    size *= 2
  return hashes ^ hashes >> np.uint64(31)


def _sample(hashes: np.ndarray) -> np.ndarray:
  """One of sixteen hashes, sorted; chosen by their value, so that copies choose the same."""
  chosen = hashes[hashes % np.uint64(_SAMPLED) == 0]
  # With the smallest hash, so that a short text is never left without a window to compare.
  return np.unique(np.append(chosen, hashes.min()) if len(hashes) else chosen)


def _common(samples: Sequence[np.ndarray]) -> collections.Counter:
  """{(a, b): number of windows that documents a < b have in common}."""
  # Sorted by hash, the documents of a window stand next to each other.
  owners = np.repeat(np.arange(len(samples)), [len(s) for s in samples])
  hashes = np.concatenate([*samples, np.zeros(0, np.uint64)])
  order = np.argsort(hashes, kind='stable')
  hashes, owners = hashes[order], owners[order].tolist()
  bounds = np.flatnonzero(np.diff(hashes, prepend=hashes[:1] + np.uint64(1))).tolist()
  common: collections.Counter[tuple[int, int]] = collections.Counter()
  for start, stop in itertools.pairwise([*bounds, len(owners)]):
    if stop - start > 1:
      common.update(itertools.combinations(owners[start:stop], 2))
  return common
