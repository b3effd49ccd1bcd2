"""launch/sink_jax.ipynb runs from its first cell to its last, as in a fresh kernel on Colab."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sink_jax.data.tokenizer import Bytes
from tests.pretrained import tiny

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / 'launch' / 'sink_jax.ipynb').read_text())
CELLS = [''.join(cell['source']) for cell in NOTEBOOK['cells'] if cell['cell_type'] == 'code']
# What a cell shows is its last expression.
KERNEL = '''
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
'''


def run(cells, folder):
  """What cells print in a folder, where the notebook may clone this repository and has its packages."""
  cells = [cell.replace("REPOSITORY = ''", f"REPOSITORY = 'file://{ROOT}'") for cell in cells]
  done = subprocess.run([sys.executable, '-P', '-c', KERNEL], input=repr(cells), text=True, cwd=folder,
                        capture_output=True, timeout=300, env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.full
def test_it_runs_from_start_to_end_in_an_empty_folder(tmp_path):
  short = [source.replace('--config.steps=1200', '--config.steps=40') for source in CELLS]
  assert short != CELLS
  shown = run(short, tmp_path)
  pictures = [int(line.split()[1]) for line in shown.splitlines() if 'PICTURE' in line]
  assert len(pictures) == 2 and min(pictures) > 5000
  assert 'Sink_1 = ' in shown and 'probed on texts of' in shown
  clone = tmp_path / 'sink_jax'
  assert (clone / 'lengths.png').exists() and (clone / 'notebook-run' / 'status.json').exists()


@pytest.mark.full
def test_a_checkpoint_is_probed_on_text_in_the_clone_that_holds_the_notebook(tmp_path):
  clone = ['git', 'clone', '--quiet', '--depth=1', f'file://{ROOT}', 'clone']
  subprocess.run(clone, cwd=tmp_path, check=True)
  tiny.write(tmp_path / 'model', tiny.LLAMA | {'vocab_size': 258})
  Bytes().open().save(tmp_path / 'model')
  first, second, model, *_ = CELLS
  chosen = [model.replace("TEXTS = '', []", f'TEXTS = {str(tmp_path / "model")!r}, {texts}')
            for texts in ('[]', "['some text ' * 9]")]
  # The first cells may run twice, and begin in the folder of the notebook.
  folder = tmp_path / 'clone' / 'launch'
  shown = run([first, second, first, second, 'print("IN", os.getcwd())', *chosen], folder)
  assert f'IN {(tmp_path / "clone").resolve()}\n' in shown
  inputs = [line.split('probed on ')[1] for line in shown.splitlines() if 'probed on' in line]
  assert inputs == ['texts of the Python standard library', 'TEXTS'] and 'some text some' in shown
