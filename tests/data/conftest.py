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


def write_corpus(folder, seed=0, letters=(50, 400), **domains):
  """A folder with so many documents of each domain, of random letters."""
  random = np.random.default_rng(seed)
  for domain, count in domains.items():
    (folder / domain).mkdir()
    for i in range(count):
      ids = random.integers(97, 123, random.integers(*letters)).astype(np.uint8)
      (folder / domain / f'{i:02}.txt').write_text(f'{domain} {i} {ids.tobytes().decode()}')
  return TextFolder(path=str(folder))


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
  return write_corpus(tmp_path_factory.mktemp('corpus'), prose=60, verse=40)


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
