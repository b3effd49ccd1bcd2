"""The notebooks of launch/ run from the first cell to the last, as in a fresh kernel on Colab."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sink_jax.pretrained.hub import PACKAGED

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / 'launch').glob('*.ipynb'))}
# A cell shows the value of its last expression.
KERNEL = '''
import ast, sys
import matplotlib; matplotlib.use('agg')
scope = {'__name__': '__main__'}
for source in eval(sys.stdin.read()):
  body = ast.parse(source).body
  last = body.pop().value if isinstance(body[-1], ast.Expr) else None
  exec(compile(ast.Module(body, []), 'cell', 'exec'), scope)
  if last is not None:
    value = eval(compile(ast.Expression(last), 'cell', 'eval'), scope)
    if hasattr(value, '_repr_png_'):
      print('PICTURE', len(value._repr_png_()))
    elif value is not None:
      print(repr(value)[:500])
'''


def cells(name):
  return [''.join(cell['source']) for cell in NOTEBOOKS[name]['cells'] if cell['cell_type'] == 'code']


def run(name, folder, **changes):
  """Output of the cells in an empty folder. They may clone this repository and use its packages."""
  sources = cells(name)
  changes = {'https://github.com/OWNER/sink_jax': f'file://{ROOT}'} | changes
  for old, new in changes.items():
    assert any(old in source for source in sources), old
    sources = [source.replace(old, new) for source in sources]
  done = subprocess.run([sys.executable, '-P', '-c', KERNEL], input=repr(sources), text=True, cwd=folder,
                        capture_output=True, timeout=600, env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.full
@pytest.mark.skipif(PACKAGED['SmolLM2-135M-Instruct'].find() is None, reason='launch/smollm2.txt is not installed')
def test_a_published_model_is_measured(tmp_path):
  shown = run('measure', tmp_path)
  pictures = [int(line.split()[1]) for line in shown.splitlines() if 'PICTURE' in line]
  assert len(pictures) == 2 and min(pictures) > 5000
  assert 'Sink_1 to Sink_4: [0.7' in shown and "HeadGate(scale=2)'}: Sink_1 = 7" in shown


@pytest.mark.full
def test_trainings_are_compared(tmp_path):
  shown = run('compare', tmp_path, **{'STEPS = 1200': 'STEPS = 40'})
  assert 'text-k-bias\ntext-sigmoid\ntext-softmax\n' in shown


def test_results_are_read():
  done = subprocess.run([sys.executable, '-P', '-c', KERNEL], input=repr(cells('results')[1:]), text=True, cwd=ROOT,
                        capture_output=True, timeout=300, env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert done.returncode == 0 and 'default' in done.stdout, done.stderr


def test_committed_outputs_are_small_and_of_no_machine():
  for name, notebook in NOTEBOOKS.items():
    text = json.dumps(notebook)
    assert len(text) < 400_000 and '/home/' not in text and str(ROOT) not in text, name
    assert all(cell['outputs'] for cell in notebook['cells'][2:] if cell['cell_type'] == 'code'), name
    assert f'/launch/{name}.ipynb' in text  # its badge
