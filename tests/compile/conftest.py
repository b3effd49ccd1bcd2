"""Compiles run only where bash launch/test.sh --compile asks for them.

A test with the argument `target` goes through the targets of the run, with `tpu` through
its TPUs; `h200` skips where it is not one of them. Other tests here only lower, and run always.
"""

import json
import os

import pytest

from tests.compile import targets


def pytest_generate_tests(metafunc):
  for name, choices in (('target', targets.TARGETS), ('tpu', targets.TPUS)):
    if name in metafunc.fixturenames:
      chosen = [t for t in targets.asked_for() if t in choices]
      metafunc.parametrize(name, chosen or [pytest.param(None, marks=_skip(choices))], ids=str)


def pytest_collection_modifyitems(items):
  """Leaves one case of a test that has no target in this run, as a reminder."""
  reminders = set()

  def is_left(item):
    params = item.callspec.params if hasattr(item, 'callspec') else {}
    if None not in (params.get('target', ''), params.get('tpu', '')):
      return True
    is_first = item.function not in reminders
    reminders.add(item.function)
    return is_first

  items[:] = filter(is_left, items)


def _skip(choices):
  return pytest.mark.skip(reason=_reason(choices))


def _reason(choices):
  wanted = '' if len(choices) > 1 else f'={choices[0]}'
  return f'compiles for a device: bash launch/test.sh --compile{wanted}'


@pytest.fixture
def h200():
  if 'h200' not in targets.asked_for():
    pytest.skip(_reason(['h200']))
  return 'h200'


@pytest.fixture
def note(request):
  """A function of named numbers, which go to the output and to the file COMPILE_TABLE."""

  def write(**numbers):
    line = json.dumps({'test': request.node.name, **numbers})
    print(line)
    if path := os.environ.get('COMPILE_TABLE'):
      with open(path, 'a') as file:  # one write a line: processes do not mix theirs
        file.write(line + '\n')

  return write
