"""A page to explore the heads of a model: one file, which opens without a network."""

from __future__ import annotations

import json
from importlib import resources
from string import Template

import matplotlib
import numpy as np
from matplotlib.colors import to_hex

from sink_jax.evaluate.explored import Explored, pack

_FOLDER = resources.files('sink_jax.report')
_COLOURS = 64  # steps of cividis, which is the same for all common kinds of colour vision


def with_explorer(page: str, explored: Explored) -> str:
  """An HTML page of `to_html` with the heads to explore before its first section.

  The colours of attention are its only 8-bit numbers. The tables of the page become sortable.
  """
  colours = matplotlib.colormaps['cividis'](np.linspace(0, 1, _COLOURS))
  data = {
    'numbers': explored.numbers,
    'texts': explored.texts,
    'colours': [to_hex(rgba) for rgba in colours],
    'steps': explored.steps,
  }
  part = Template((_FOLDER / 'explorer.html').read_text('utf-8')).substitute(
    data=pack(json.dumps(data).encode()),
    maps=explored.packed,
    script=(_FOLDER / 'explorer.js').read_text('utf-8'),
  )
  before, section, after = page.partition('<h2>')
  return f'{before}{part}{section}{after}'
