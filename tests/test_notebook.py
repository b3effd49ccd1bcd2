"""The notebooks of launch/ run from the first cell to the last, with --full also as in Colab."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sink_jax.pretrained.hub import PACKAGED

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {
  path.stem: json.loads(path.read_text()) for path in sorted((ROOT / 'launch').glob('*.ipynb'))
}
# A cell shows the value of its last expression.
KERNEL = """
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
"""

# A kernel of Jupyter, with what a user has imported before.
EXECUTE = """
import sys
import nbclient, nbformat
path, imports = sys.argv[1:]
notebook = nbformat.read(path, 4)
notebook.cells.insert(0, nbformat.v4.new_code_cell(imports))
nbclient.NotebookClient(notebook, timeout=600).execute()
for output in sum((cell.outputs for cell in notebook.cells if cell.cell_type == 'code'), []):
  print(output.get('text') or output.data.get('text/plain'), *output.get('data', ()))
"""
VERSIONS = """
import json
from importlib import metadata
print(json.dumps({each.name: metadata.version(each.name) for each in metadata.distributions()}))
"""


@pytest.fixture(scope='module')
def colab(tmp_path_factory):
  """The Python of a fresh environment that sees the packages of Colab."""
  if not os.environ.get('COLAB_PYTHON'):
    pytest.skip('bash launch/test.sh --full found no Python 3.13')
  folder = tmp_path_factory.mktemp('colab') / 'env'
  subprocess.run([os.environ['COLAB_PYTHON'], '-m', 'venv', folder], check=True)
  [site] = folder.glob('lib/python*/site-packages')
  (site / 'colab.pth').write_text(os.environ['COLAB'])

  def run(*words, cwd):
    environment = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
    done = subprocess.run(
      [folder / 'bin/python', *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  return run


def cells(name):
  return [
    ''.join(cell['source']) for cell in NOTEBOOKS[name]['cells'] if cell['cell_type'] == 'code'
  ]


def run(name, folder, **changes):
  """Output of the cells in an empty folder. They may clone this repository and use its packages."""
  sources = cells(name)
  changes = {'https://github.com/OWNER/sink_jax': f'file://{ROOT}'} | changes
  for old, new in changes.items():
    assert any(old in source for source in sources), old
    sources = [source.replace(old, new) for source in sources]
  done = subprocess.run(
    [sys.executable, '-P', '-c', KERNEL],
    input=repr(sources),
    text=True,
    cwd=folder,
    capture_output=True,
    timeout=600,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.full
@pytest.mark.skipif(
  PACKAGED['SmolLM2-135M-Instruct'].find() is None, reason='launch/smollm2.txt is not installed'
)
def test_a_published_model_is_measured(tmp_path):
  shown = run('measure', tmp_path)
  pictures = [int(line.split()[1]) for line in shown.splitlines() if 'PICTURE' in line]
  assert len(pictures) == 2 and min(pictures) > 5000
  assert 'Sink_1 to Sink_4: 7' in shown and "HeadGate(scale=2)'}: Sink_1 = 7" in shown


@pytest.mark.full
def test_colab_measures_and_trains_with_the_versions_it_has(tmp_path, colab):
  before = json.loads(colab('-c', VERSIONS, cwd=tmp_path))
  shown = {}
  for name, old, new in (('measure', '', ''), ('compare', 'STEPS = 1200', 'STEPS = 20')):
    text = (ROOT / f'launch/{name}.ipynb').read_text().replace(old, new)
    text = text.replace('https://github.com/OWNER/sink_jax', f'file://{ROOT}')
    (tmp_path / 'notebook.ipynb').write_text(text)
    imports = 'import numpy, pandas, matplotlib.pyplot, jax, transformers; jax.devices()'
    shown[name] = colab('-c', EXECUTE, 'notebook.ipynb', imports, cwd=tmp_path)
  after = json.loads(colab('-c', VERSIONS, cwd=tmp_path))
  assert before['jax'] == '0.7.2' and before == {name: after[name] for name in before}
  assert 'Successfully installed' in shown['measure'] and 'sink_jax-' in shown['measure']
  assert 'Sink_1 to Sink_4: 7' in shown['measure'] and shown['measure'].count('image/png') == 2
  assert 'text-k-bias' in shown['compare'] and shown['compare'].count('image/png') == 2


@pytest.mark.parametrize('there, extra', [(True, ''), (False, '[gpu]')])
def test_a_gpu_gets_no_second_plugin(monkeypatch, capsys, there, extra):
  version, calls = metadata.version, []

  def pip(command, **_):
    calls.append(command[1:])
    return subprocess.CompletedProcess(command, 0, 'Collecting a\nSuccessfully installed a-1\n', '')

  def version_of(name):
    if name == 'tyro' or name == 'jax' and not there:
      raise metadata.PackageNotFoundError
    return version(name)

  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(shutil, 'which', lambda name: name)
  monkeypatch.setattr(subprocess, 'run', pip)
  monkeypatch.setattr(metadata, 'version', version_of)
  runpy.run_path('launch/notebook.py')
  assert calls == [['-m', 'pip', 'install', f'.{extra}']]
  assert capsys.readouterr().out == 'Successfully installed a-1\n'


def test_a_kernel_with_another_version_is_stopped(monkeypatch):
  monkeypatch.chdir(ROOT)
  runpy.run_path('launch/notebook.py')  # nothing to install, nothing to say
  monkeypatch.setattr(sys.modules['numpy'], '__version__', '1.0')
  with pytest.raises(RuntimeError, match='Restart, then run all.*numpy 1.0'):
    runpy.run_path('launch/notebook.py')


@pytest.mark.full
def test_trainings_are_compared(tmp_path):
  shown = run('compare', tmp_path, **{'STEPS = 1200': 'STEPS = 40'})
  assert 'text-k-bias\ntext-sigmoid\ntext-softmax\n' in shown


def test_results_are_read():
  done = subprocess.run(
    [sys.executable, '-P', '-c', KERNEL],
    input=repr(cells('results')[1:]),
    text=True,
    cwd=ROOT,
    capture_output=True,
    timeout=300,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == 0 and 'validation loss (nats)' in done.stdout, done.stderr


def test_committed_outputs_are_small_and_of_no_machine():
  for name, notebook in NOTEBOOKS.items():
    text = json.dumps(notebook)
    assert len(text) < 400_000 and '/home/' not in text and str(ROOT) not in text, name
    assert all(cell['outputs'] for cell in notebook['cells'][2:] if cell['cell_type'] == 'code'), (
      name
    )
    assert f'/launch/{name}.ipynb' in text  # its badge
