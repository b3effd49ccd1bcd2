"""PNGs of a page, which holds them in itself, so that their size is its own."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping

from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sink_jax.evaluate import plots

_COLOURS = 128  # with a palette a picture takes a third of the space


def png(figure: Figure) -> bytes:
  """A picture with a palette."""
  raw = io.BytesIO()
  plots.save(figure, raw)
  return with_palette(raw)


def with_palette(raw: io.BytesIO) -> bytes:
  """The same picture in a third of the space."""
  return _encoded(Image.open(raw))


def shrunk(pictures: Mapping[str, bytes], limit: int) -> Mapping[str, bytes]:
  """Pictures by name, made smaller together until they take about `limit` bytes at most."""
  while (total := sum(map(len, pictures.values()))) > limit:
    # A picture's bytes grow with its area, so that the root of the ratio nearly suffices.
    scale = max(0.5, min(0.9, (limit / total) ** 0.5))
    pictures = {name: _scaled(picture, scale) for name, picture in pictures.items()}
  return pictures


@dataclasses.dataclass(frozen=True)
class Tile:
  """A part of a picture. share: of its width."""

  png: bytes
  share: float


def tiles(picture: bytes) -> tuple[int, list[Tile]]:
  """The width of a picture in pixels, and its panels and legend, or all of it in one."""
  image = Image.open(io.BytesIO(picture))
  width = image.width
  panels = json.loads(image.info.get(plots.PANELS, '[]'))
  if not panels:
    return width, [Tile(picture, 1.0)]
  height = image.height
  return width, [Tile(_encoded(image.crop((round(left * width), round(top * height),
                                           round(right * width), round(bottom * height)))),
                      right - left) for left, top, right, bottom in panels]


def _scaled(picture: bytes, scale: float) -> bytes:
  image = Image.open(io.BytesIO(picture))
  size = [max(1, round(scale * side)) for side in image.size]
  # Resampling mixes colours, which a palette cannot hold: the picture is RGB here, and gets a
  # palette anew.
  small = image.convert('RGB').resize(size, Image.Resampling.LANCZOS)
  small.info = image.info
  return _encoded(small)


def _encoded(image: Image.Image) -> bytes:
  """A PNG with a palette, and with the places of panels where they are known."""
  known = PngInfo()
  if plots.PANELS in image.info:
    known.add_text(plots.PANELS, image.info[plots.PANELS])
  small = io.BytesIO()
  # Without transparency, which the median cut of `quantize` cannot take.
  image.convert('RGB').quantize(_COLOURS).save(small, 'png', optimize=True, pnginfo=known)
  return small.getvalue()
