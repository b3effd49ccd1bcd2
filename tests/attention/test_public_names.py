"""Public names of `sink_jax`: every component has one, in the package and in the documents."""

import dataclasses
import re

import pytest

import sink_jax as sj
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import registry
from tests.documents import TEXTS
from tests.train.runs import run_python


def test_every_component_is_a_public_name():
  classes = {
    name: cls
    for base in COMPONENTS.values()
    for name, cls in registry(base).items()
    if cls.__module__.startswith('sink_jax.')
  }
  assert len(classes) > 40 and set(classes) < set(sj.__all__) and dir(sj) == sj.__all__
  for name, cls in classes.items():
    assert getattr(sj, name) is cls


def test_no_name_costs_an_import_before_it_is_used():
  program = """
import sys
import sink_jax as sj
assert 'jax' not in sys.modules and 'numpy' not in sys.modules
assert 'Window' in dir(sj) and 'attend' in sj.__all__ and not hasattr(sj, 'Windw')
"""
  run_python('-c', program)
  namespace = {}
  exec('from sink_jax import *', namespace)
  assert namespace['Window'] is sj.Window and set(sj.__all__) <= set(namespace)


def test_an_unknown_name_lists_those_that_exist():
  with pytest.raises(AttributeError, match=r"no 'Windw'; it exports .*Prefix, .*Window, .*attend"):
    sj.Windw


@pytest.mark.parametrize('component', COMPONENTS)
def test_the_table_lists_every_component(component):
  """A failure message ends with the line to paste into the table of docs/attention.md."""
  page = TEXTS['docs/attention.md']
  head, values = re.search(rf'^(\| `{component}`[^|]*\|) (.*) \|$', page, re.M).groups()
  listed = re.findall(r'`(\w+)', values)
  classes = {
    name: cls
    for name, cls in registry(COMPONENTS[component]).items()
    if cls.__module__.startswith('sink_jax.')
  }
  # Names keep the order of the table, and new ones come last.
  names = [name for name in listed if name in classes]
  names += [name for name in classes if name not in names]
  line = f'{head} {", ".join(f"`{_signature(classes[name])}`" for name in names)} |'
  assert f'{head} {values} |' == line, f'paste into docs/attention.md:\n{line}'


def _signature(cls):
  fields = ', '.join(f'{field.name}=' for field in dataclasses.fields(cls))
  return f'{cls.__name__}({fields})' if fields else cls.__name__
