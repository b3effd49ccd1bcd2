"""launch/sink_jax.ipynb runs from its first cell to its last, as in a fresh kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / 'launch' / 'sink_jax.ipynb').read_text())


def cells(kind):
  return [''.join(cell['source']) for cell in NOTEBOOK['cells'] if cell['cell_type'] == kind]


def test_it_is_stored_without_outputs():
  assert NOTEBOOK['nbformat'] == 4
  for cell in NOTEBOOK['cells']:
    assert set(cell) - {'outputs', 'execution_count'} == {'cell_type', 'metadata', 'source'}
    assert not cell.get('outputs') and cell.get('execution_count') is None


def test_it_runs_from_start_to_end(tmp_path):
  # Where the notebook lies in a clone; what a cell shows is its last expression.
  folder = tmp_path / 'launch'
  folder.mkdir()
  (tmp_path / 'configs').symlink_to(ROOT / 'configs')
  script = folder / 'cells.py'
  script.write_text('''
import ast, sys
scope = {'__name__': '__main__'}
for source in eval(sys.stdin.read()):
  body = ast.parse(source).body
  last = body.pop().value if isinstance(body[-1], ast.Expr) else None
  exec(compile(ast.Module(body, []), 'cell', 'exec'), scope)
  if last is not None:
    value = eval(compile(ast.Expression(last), 'cell', 'eval'), scope)
    if hasattr(value, '_repr_png_'):
      print('PICTURE', len(value._repr_png_()))
''')
  done = subprocess.run([sys.executable, script], input=repr(cells('code')), text=True,
                        cwd=folder, capture_output=True, timeout=300,
                        env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert done.returncode == 0, done.stderr
  pictures = [int(line.split()[1]) for line in done.stdout.splitlines() if 'PICTURE' in line]
  assert len(pictures) == 2 and min(pictures) > 5000
  assert 'Sink_1 = ' in done.stdout and 'Sink_1 to Sink_4' in done.stdout
  assert (folder / 'lengths.png').exists() and (folder / 'notebook-run' / 'status.json').exists()


def test_what_it_names_exists():
  text = '\n'.join(cells('markdown'))
  assert 'python -m sink_jax.analyses --list' in text
  assert (ROOT / 'configs' / 'quickstart.py').exists()
