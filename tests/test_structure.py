"""The shape of the code: imports between rooms run one way, files and functions are short."""

import ast
import collections
import graphlib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from tests.planted_faults import FAULTS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'sink_jax'
FILES = sorted(PACKAGE.rglob('*.py'))

# A module may import from its room and from earlier rooms.
ROOMS = [
  'arguments',
  'component',
  'io',
  'devices',
  'shapes',
  'foreign',
  'pictures',
  'attention',
  'kernels',
  'models',
  'data',
  'evaluate',
  'pretrained',
  'train',
  'plan',
  'benchmark',
  'report',
  'analyses',
  'sweep',
  'cli',
]
COLUMNS = 100  # of a line, also of a comment, a docstring or a string
FUNCTION_LINES = 60
# Of a room: names, numbers, strings and operators, over all of its lines.
TOKENS_A_LINE = 7.5
TOKENS_A_LINE_OF_TESTS = 8.5
LAYOUT = {
  tokenize.COMMENT,
  tokenize.NL,
  tokenize.NEWLINE,
  tokenize.INDENT,
  tokenize.DEDENT,
  tokenize.ENCODING,
  tokenize.ENDMARKER,
}
BANNED = {'tensorflow', 'torch', 'configs', 'tests', 'pickle', 'shelve'}


def name_of(path):
  parts = ('sink_jax', *path.relative_to(PACKAGE).with_suffix('').parts)
  return '.'.join(parts).removesuffix('.__init__')


MODULES = {name_of(path): path for path in FILES}


def room_of(path):
  """The room of a file; '' for the package's __init__, which only names the public API."""
  if path.name == '__main__.py':
    return 'cli'
  first = path.relative_to(PACKAGE).parts[0].removesuffix('.py')
  return '' if first == '__init__' else first


def imports(path):
  """The modules that a file imports, also inside functions; of ours the exact file."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      for alias in node.names:
        inner = f'{node.module}.{alias.name}'
        yield inner if inner in MODULES else node.module


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
  room = room_of(path)
  for module in imports(path):
    top = module.split('.')[0]
    assert top not in BANNED, f'{path} imports {module}'
    assert top != 'flax' or room == 'models' or module.startswith('flax.traverse_util'), (
      f'Linen lives in models/, but {path} imports it'
    )
    assert top != 'ml_collections' or room in ('train', 'sweep', 'cli'), (
      f'configs end at sweeps and commands, but {path} imports ml_collections'
    )
    if module.startswith('sink_jax.'):
      other = room_of(MODULES[module])
      assert not room or ROOMS.index(other) <= ROOMS.index(room), f'{path} imports {module}'


def test_no_module_imports_itself_through_others():
  graph = {name: {m for m in imports(path) if m in MODULES} for name, path in MODULES.items()}
  graphlib.TopologicalSorter(graph).prepare()  # the error names the modules of a cycle


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_they_are(path):
  text = path.read_text()
  assert len(text.splitlines()) <= 600
  assert ast.get_docstring(ast.parse(text))
  assert path.stem not in ('utils', 'helpers', 'misc', 'common')
  assert not {
    n.func.id
    for n in ast.walk(ast.parse(text))
    if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
  } & {'eval', 'exec', '__import__'}


def files_by_room():
  """{folder: its Python files} of the package, of its tests, and of what lies next to them."""
  rooms = {name: sorted((ROOT / name).rglob('*.py')) for name in ('configs', 'docs', 'launch')}
  for path in [*FILES, *sorted((ROOT / 'tests').rglob('*.py'))]:
    rooms.setdefault(str(path.parent.relative_to(ROOT)), []).append(path)
  return rooms


def count_tokens(text):
  """The tokens of a file without its layout; a formatted string is one, as before Python 3.12."""
  count = depth = 0
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    kind = tokenize.tok_name[token.type]
    count += depth == 0 and token.type not in LAYOUT
    depth += (kind == 'FSTRING_START') - (kind == 'FSTRING_END')
  return count


@pytest.mark.parametrize(('room', 'files'), files_by_room().items(), ids=files_by_room())
def test_code_is_easy_to_read(room, files):
  lines = tokens = 0
  wide, long = [], []
  for path in files:
    text, name = path.read_text(), path.relative_to(ROOT)
    for number, line in enumerate(text.splitlines(), 1):
      lines += 1
      if len(line) > COLUMNS:
        wide.append(f'{name}:{number}')
    tokens += count_tokens(text)
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if node.end_lineno - node.lineno + 1 > FUNCTION_LINES:
          long.append(f'{name}:{node.lineno} {node.name}')
  assert not wide, f'lines of more than {COLUMNS} columns'
  assert not long, f'functions of more than {FUNCTION_LINES} lines'
  most = TOKENS_A_LINE_OF_TESTS if room.startswith('tests') else TOKENS_A_LINE
  assert tokens <= most * lines, f'{room}: a thought a line, names for intermediate results'


def test_the_layout_is_that_of_the_formatter():
  formatter = [sys.executable, '-m', 'ruff', 'format', '--check', str(ROOT)]
  checked = subprocess.run(formatter, capture_output=True, text=True, check=False)
  assert checked.returncode == 0, f'{checked.stdout}{checked.stderr}python -m ruff format .'


def test_no_two_public_classes_share_a_name():
  """`Options` alone is in every command."""
  files = collections.defaultdict(list)
  for path in FILES:
    for node in ast.parse(path.read_text()).body:
      if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
        files[node.name].append(str(path.relative_to(PACKAGE)))
  del files['Options']
  assert not {name: paths for name, paths in files.items() if len(paths) > 1}


def test_planted_faults_fit_the_code_and_their_tests_exist():
  assert len({fault.name for fault in FAULTS}) == len(FAULTS)
  for fault in FAULTS:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault
    file, name = fault.test.partition('[')[0].split('::')
    assert re.search(rf'^def {name}\(', (ROOT / file).read_text(), re.MULTILINE), fault
