"""Pictures of reports are drawn where a test looks at them."""

import io

import pytest
from PIL import Image

from sink_jax.paper import drawing


def _pixel() -> bytes:
  raw = io.BytesIO()
  Image.new('RGB', (1, 1)).save(raw, 'png')
  return raw.getvalue()


PIXEL = _pixel()


@pytest.fixture(autouse=True)
def _pictures_of_one_pixel(monkeypatch):
  """Saves the half second that a picture takes in reports that tests make for their numbers.

  Fixtures of a module come before this one, so that the whole report of test_paper_report.py, of
  which every picture is looked at, is drawn.
  """
  monkeypatch.setattr(drawing, 'png', lambda figure: PIXEL)
