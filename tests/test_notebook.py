"""launch/sink_jax.ipynb runs from its first cell to its last, as in a fresh kernel on Colab."""

import json
import os
import shutil
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
# In the place of pip, which would need a network: it installs what the wheel holds.
PIP = '''
import os, shutil, sys
assert sys.argv[1:-1] == ['install', '-q'] and sys.argv[-1] in ('.', '.[gpu]'), sys.argv
assert os.path.exists('pyproject.toml'), sys.argv
shutil.copytree('sink_jax', os.environ['SITE'] + '/sink_jax')
'''


@pytest.fixture
def machine(tmp_path):
  """A machine with the packages that sink_jax needs and without sink_jax: (run cells, site, clone).

  The clone is a repository, which the notebook may clone in turn.
  """
  clone, site = tmp_path / 'repository', tmp_path / 'site'
  for part in ('sink_jax', 'configs', 'launch/sink_jax.ipynb', 'pyproject.toml', 'README.md'):
    copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile
    (clone / part).parent.mkdir(parents=True, exist_ok=True)
    copy(ROOT / part, clone / part)
  git = ['git', '-c', 'user.name=a', '-c', 'user.email=a', '-c', 'init.defaultBranch=main']
  for command in (['init', '-q'], ['add', '.'], ['commit', '-q', '-m', 'all']):
    subprocess.run([*git, *command], cwd=clone, check=True)
  (site / 'pip').mkdir(parents=True)
  (site / 'pip' / '__init__.py').touch()  # so that it goes before that of the environment
  (site / 'pip' / '__main__.py').write_text(PIP)

  def run(sources, folder):
    cells = [source.replace("REPOSITORY = ''", f"REPOSITORY = 'file://{clone}'") for source in sources]
    done = subprocess.run(
        [sys.executable, '-P', '-c', KERNEL], input=repr(cells), text=True, cwd=folder,
        capture_output=True, timeout=300,
        env=os.environ | {'PYTHONPATH': str(site), 'SITE': str(site), 'PIP_TARGET': str(site)})
    assert done.returncode == 0, done.stderr
    return done.stdout

  return run, site, clone


@pytest.mark.full
def test_it_runs_from_start_to_end_in_an_empty_folder(machine, tmp_path):
  run, site, _ = machine
  (tmp_path / 'content').mkdir()
  colab = "import sys; sys.modules['grain'] = None"  # which is not there
  short = [source.replace('--config.steps=1200', '--config.steps=40') for source in CELLS]
  assert short != CELLS
  shown = run([colab, *short, 'print(sj.__file__)'], tmp_path / 'content')
  assert str(site / 'sink_jax' / '__init__.py') in shown and not (site / 'configs').exists()
  pictures = [int(line.split()[1]) for line in shown.splitlines() if 'PICTURE' in line]
  assert len(pictures) == 2 and min(pictures) > 5000
  assert 'Sink_1 = ' in shown and 'probed on texts of' in shown
  clone = tmp_path / 'content' / 'sink_jax'
  assert (clone / 'lengths.png').exists() and (clone / 'notebook-run' / 'status.json').exists()


@pytest.mark.full
def test_a_checkpoint_is_probed_on_text_in_the_clone_that_holds_the_notebook(machine, tmp_path):
  run, _, clone = machine
  tiny.write(tmp_path / 'model', tiny.LLAMA | {'vocab_size': 258})
  Bytes().open().save(tmp_path / 'model')
  first, second, model, *_ = CELLS
  chosen = [model.replace("TEXTS = '', []", f'TEXTS = {str(tmp_path / "model")!r}, {texts}')
            for texts in ('[]', "['some text ' * 9]")]
  # The first cells may run twice, and begin in the folder of the notebook.
  shown = run([first, second, first, second, 'print("IN", os.getcwd())', *chosen], clone / 'launch')
  assert f'IN {clone.resolve()}' in shown
  inputs = [line.split('probed on ')[1] for line in shown.splitlines() if 'probed on' in line]
  assert inputs == ['texts of the Python standard library', 'TEXTS'] and 'some text some' in shown
