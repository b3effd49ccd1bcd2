"""The shape of the code base: one-way imports, flax in its rooms only, short files."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'sink_jax'
FILES = sorted(PACKAGE.rglob('*.py'))

# A module may import from its own room and from rooms before it.
ROOMS = ['command', 'arguments', 'places', 'compile_cache', 'slot', 'attention', 'kernels', 'models',
         'evaluate', 'data', 'train', 'plan', 'benchmark', 'pretrained', 'load', 'convert', 'analyses',
         'report', 'sweep']
# Command lines stand on top of everything, wherever their file is.
COMMANDS = {'evaluate/__main__.py', 'report/__main__.py', 'train/__main__.py',
            'sweep/__main__.py', 'plan/__main__.py', 'analyses/__main__.py', 'export.py',
            'generate.py'}


def imports(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      yield node.module


def room(path):
  return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
  name = str(path.relative_to(PACKAGE))
  if name == '__init__.py' or name in COMMANDS:
    return
  for module in imports(path):
    if module.startswith('sink_jax.'):
      other = module.split('.')[1]
      assert ROOMS.index(other) <= ROOMS.index(room(path)), f'{name} imports {module}'
    top = module.split('.')[0]
    assert top not in ('tensorflow', 'torch', 'configs', 'tests'), f'{name} imports {module}'
    if top == 'flax':
      assert room(path) == 'models', f'Linen lives in models/, but {name} imports it'
    if top == 'ml_collections':
      assert False, f'configs end at the command line, but {name} imports ml_collections'
    if top == 'pickle' or module == 'shelve':
      assert False, f'{name} imports {module}'


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_they_are(path):
  text = path.read_text()
  assert len(text.splitlines()) <= 350
  assert path.stat().st_size == 0 or ast.get_docstring(ast.parse(text))
  assert path.stem not in ('utils', 'helpers', 'misc', 'common')
  assert not {n.func.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)
              and isinstance(n.func, ast.Name)} & {'eval', 'exec', '__import__'}


def test_every_public_name_can_be_imported_and_is_documented():
  import sink_jax as sj

  for name in sj.__all__:
    assert getattr(sj, name).__doc__, f'{name} has no docstring'
  with pytest.raises(AttributeError, match='it exports'):
    sj.sink_rates
