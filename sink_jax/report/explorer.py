"""A page to explore the heads of a model: one file, which opens without a network."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import UInt8
from matplotlib.colors import to_hex

_FOLDER = resources.files('sink_jax.report')
_COLOURS = 64  # steps of cividis, which is the same for all common kinds of colour vision


@dataclasses.dataclass(frozen=True, eq=False)
class Explored:
  """What the page shows of N layers of H heads, P = T (T + 1) / 2 for T tokens.

  Attributes:
    numbers: those of the page, which card.json has too: `blocks`, from 1; `importance` [N][H][k] of
      the first tokens; `epsilons`, and `sink_rates` [k][epsilon] in percent; by layer and head
      `entropy`, as a share of uniform attention's, `value_ratio` and `key_ratio`, of the first
      token's norm to the others', and `distance`, in tokens, within which a head keeps 95 % of its
      attention.
    texts: the tokens of each text as words.
    roots_SxNxHxP: square roots of the attention weights, 255 for 1, of the lower triangles by rows.
  """

  numbers: dict[str, Any]
  texts: Sequence[Sequence[str]]
  roots_SxNxHxP: UInt8[np.ndarray, 'S N H P']


def with_explorer(page: str, explored: Explored) -> str:
  """An HTML page of `to_html` with the heads to explore before its first section.

  The colours of attention are its only 8-bit numbers. The tables of the page become sortable.
  """
  packed = zlib.compress(explored.roots_SxNxHxP.tobytes(), 9)
  colours = matplotlib.colormaps['cividis'](np.linspace(0, 1, _COLOURS))
  data = {
    'numbers': explored.numbers,
    'texts': explored.texts,
    'colours': [to_hex(rgba) for rgba in colours],
    'maps': base64.b64encode(packed).decode(),
  }
  part = Template((_FOLDER / 'explorer.html').read_text('utf-8')).substitute(
    data=json.dumps(data).replace('<', '\\u003c'),  # a token may be '</script>'
    script=(_FOLDER / 'explorer.js').read_text('utf-8'),
  )
  before, section, after = page.partition('<h2>')
  return f'{before}{part}{section}{after}'
