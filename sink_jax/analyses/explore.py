"""What the page to explore the heads of a model shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from sink_jax.analyses.models import Model
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.evaluate.explored import Explored, explored, kept
from sink_jax.io.paths import to_path

_TEXTS = 4  # with maps


def explore(model: Model) -> Explored:
  """Measures a model on the texts of its options, with the maps of the first four.

  A training run that kept maps is not measured: the steps of its probe are shown.
  """
  folder = model.run.folder
  if folder and (found := kept(to_path(folder) / 'maps')):
    steps, ids = found
    try:
      tokenizer = model.run.tokenizer
    except (ValueError, OSError):  # a synthetic task has none
      tokenizer = None
    return dataclasses.replace(steps, texts=[_words(tokenizer, ids)])
  inputs = model.inputs()
  report = model.report(inputs.tokens)
  measured, ids_SxT = explored(model.run, report, inputs.tokens[:_TEXTS], model.options.dtype)
  texts = [_words(inputs.tokenizer, ids_T) for ids_T in ids_SxT]
  return dataclasses.replace(measured, texts=texts)


def _words(tokenizer: TextTokenizer | None, ids: Iterable[int]) -> list[str]:
  return [tokenizer.decode([int(i)]) if tokenizer else str(i) for i in ids]
