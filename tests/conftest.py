"""What all tests share: the CPU as the default device, and the option --full."""

import os

import pytest

# Before anything imports jax. Another value, such as JAX_PLATFORMS=cuda, is respected.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')


def pytest_addoption(parser):
  parser.addoption('--full', action='store_true', help='also run the tests marked full')


def pytest_configure(config):
  try:
    from hypothesis import settings
  except ImportError:
    return
  # The first example pays for the compilation, so a deadline per example says nothing.
  # The same examples on every run, so that a red test stays red.
  settings.register_profile('sink_jax', deadline=None, derandomize=True)
  settings.load_profile('sink_jax')


def pytest_collection_modifyitems(config, items):
  if config.getoption('--full'):
    return
  skip = pytest.mark.skip(reason='exhaustive: run with --full')
  for item in items:
    if item.get_closest_marker('full'):
      item.add_marker(skip)
