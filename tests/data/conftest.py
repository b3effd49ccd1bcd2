"""A small corpus of two domains, and a cache in which every text is packed once in a session."""

import functools

import numpy as np
import pytest

from sink_jax.data import build
from sink_jax.data.dataset import DataConfig, open_packed
from sink_jax.data.sources import TextFolder

SHARD = 3000  # characters, which give the corpus eight shards


@pytest.fixture(scope='session')
def cache_folder(tmp_path_factory):
  return tmp_path_factory.mktemp('cache')


@pytest.fixture(autouse=True)
def one_cache(cache_folder, monkeypatch):
  monkeypatch.setenv('SINK_JAX_CACHE', str(cache_folder))


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
  """60 documents in 'prose' and 40 in 'verse', 50 to 400 letters each."""
  folder, random = tmp_path_factory.mktemp('corpus'), np.random.default_rng(0)
  for domain, count in (('prose', 60), ('verse', 40)):
    (folder / domain).mkdir()
    for i in range(count):
      letters = random.integers(97, 123, random.integers(50, 400)).astype(np.uint8)
      text = f'{domain} {i} ' + letters.tobytes().decode()
      (folder / domain / f'{i:02}.txt').write_text(text)
  return TextFolder(path=str(folder))


@pytest.fixture(scope='session')
def config(corpus):
  """Makes configs of the corpus; its rows have 17 tokens."""
  return functools.partial(DataConfig, source=corpus, context=16, valid_fraction=0.2)


@pytest.fixture(scope='session')
def packed(config, tmp_path_factory):
  """The corpus, packed into eight shards."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(build, 'SHARD_CHARACTERS', SHARD)
    return open_packed(config(), str(tmp_path_factory.mktemp('packed')))[0]
