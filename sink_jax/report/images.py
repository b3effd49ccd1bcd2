"""PNGs of a page, which holds them in itself, so that their size is its own."""

from __future__ import annotations

import io
from collections.abc import Mapping

from matplotlib.figure import Figure
from PIL import Image

from sink_jax.evaluate import plots

_COLOURS = 128  # with a palette a picture takes a third of the space


def png(figure: Figure) -> bytes:
  """A picture with a palette."""
  raw = io.BytesIO()
  plots.save(figure, raw)
  return with_palette(raw)


def with_palette(raw: io.BytesIO) -> bytes:
  """The same picture in a third of the space."""
  small = io.BytesIO()
  # Without transparency, which the median cut of `quantize` cannot take.
  image = Image.open(raw).convert('RGB')
  image.quantize(_COLOURS).save(small, 'png', optimize=True)
  return small.getvalue()


def shrunk(pictures: Mapping[str, bytes], limit: int) -> Mapping[str, bytes]:
  """Pictures by name, made smaller together until they take about `limit` bytes at most."""
  while (total := sum(map(len, pictures.values()))) > limit:
    # A picture's bytes grow with its area, so that the root of the ratio nearly suffices.
    scale = max(0.5, min(0.9, (limit / total) ** 0.5))
    pictures = {name: _scaled(picture, scale) for name, picture in pictures.items()}
  return pictures


def _scaled(picture: bytes, scale: float) -> bytes:
  image = Image.open(io.BytesIO(picture)).convert('RGB')
  size = [max(1, round(scale * side)) for side in image.size]
  small = io.BytesIO()
  # Resampling mixes colours, which a palette cannot hold: the picture is RGB here, and gets a
  # palette anew.
  image.resize(size, Image.Resampling.LANCZOS).quantize(_COLOURS).save(
      small, 'png', optimize=True)
  return small.getvalue()
