"""A small corpus of two domains, and a separate cache folder for each test."""

import numpy as np
import pytest

from sink_jax.data.sources import TextFolder


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
  folder = tmp_path / 'cache'
  monkeypatch.setenv('SINK_JAX_CACHE', str(folder))
  return folder


@pytest.fixture
def corpus(tmp_path):
  """60 documents in 'prose' and 40 in 'verse', 50 to 400 letters each."""
  random = np.random.default_rng(0)
  for domain, count in (('prose', 60), ('verse', 40)):
    (tmp_path / 'corpus' / domain).mkdir(parents=True)
    for i in range(count):
      letters = random.integers(97, 123, random.integers(50, 400)).astype(np.uint8)
      text = f'{domain} {i} ' + letters.tobytes().decode()
      (tmp_path / 'corpus' / domain / f'{i:02}.txt').write_text(text)
  return TextFolder(path=str(tmp_path / 'corpus'))
