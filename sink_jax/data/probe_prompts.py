"""Probe prompts: the beginnings of validation documents, kept while a cache is built."""

from __future__ import annotations

import os

import numpy as np

from sink_jax.io.files import named_in_errors

_KEPT = 512  # prompts for each length and domain


class ProbePrompts:
  """Keeps, for every length up to `longest`, the first 512 documents at least that long.

  They then serve a probe of 64 tokens as well as one of the whole context: short documents do not
  crowd out the long ones that come after them.
  """

  def __init__(self, longest: int):
    self._longest = longest
    self._kept_at_least = np.zeros(longest + 1, np.int64)  # prompts kept, by their least length
    self._prompts: list[np.ndarray] = []

  def add(self, tokens: np.ndarray) -> np.ndarray | None:
    """Offers the ids of a document, and returns its prompt (uint32) if that is kept."""
    length = min(len(tokens), self._longest)
    if not length or self._kept_at_least[length] >= _KEPT:
      return None
    # A prompt serves probes of every length up to its own.
    self._kept_at_least[:length + 1] += 1
    self._prompts.append(np.array(tokens[:length], np.uint32))
    return self._prompts[-1]

  @staticmethod
  def save(path: str | os.PathLike, domains: list[ProbePrompts], pad_id: int) -> None:
    """Writes the prompts of all domains: tokens (n, longest), lengths (n,), domains (n,)."""
    prompts = [prompt for domain in domains for prompt in domain._prompts]
    tokens = np.full((len(prompts), max(map(len, prompts), default=0)), pad_id, np.uint32)
    for row, prompt in zip(tokens, prompts, strict=True):
      row[:len(prompt)] = prompt
    with named_in_errors(path):
      np.savez(path, tokens=tokens, lengths=np.array([len(p) for p in prompts], np.int64),
               domains=np.repeat(np.arange(len(domains)),
                                 [len(domain._prompts) for domain in domains]))
