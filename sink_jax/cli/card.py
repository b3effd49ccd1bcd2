"""Writes the sink card of a model."""

from __future__ import annotations

import dataclasses
import shlex
import sys

from sink_jax.cli.results import ReadModel, writable_folder
from sink_jax.io.terminal import say


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReadModel):
  """Writes one page: where a model's sinks are, whether they matter, and what to do about them.

      sink-jax card --checkpoint=SmolLM2-135M-Instruct --out=card

  It prints what each part will compute, and how long it took. A card that was killed goes on when
  it is started again: OUT/parts keeps the parts that are done until the card is complete.
  """

  out: str | None = None  # folder to write to.
  #: where text comes from; by default the documentation in Python's standard library, and for the
  #: first and the third part also code of it and Python's manual.
  source: str = ''
  #: caches on texts of 2,048 tokens instead of 512, where the source has 8 of them; more sequences
  #: and controls.
  full: bool = False


def main(options: Options) -> None:
  """Measures the model, writes the page, and prints its sentences."""
  from sink_jax.devices import keep_freed_memory
  from sink_jax.io import compile_cache
  from sink_jax.analyses.card import card, cost
  from sink_jax.analyses.card_parts import check_parts, remove_parts

  folder = writable_folder(options.out)
  check_parts(folder / 'parts')
  compile_cache.enable()
  keep_freed_memory()
  run = options.load()
  inputs = {'source': options.source, 'dtype': options.dtype}
  say(cost(run, options.source, full=options.full))
  made = card(run, full=options.full, say=say, parts=folder / 'parts', **inputs)
  paths = made.write(folder, f'sink-jax card {shlex.join(sys.argv[2:])}')
  remove_parts(folder / 'parts')
  print(made, *paths, sep='\n')
