"""Setup that all tests share: the CPU as the default device, checks of annotations, and options."""

import collections
import gc
import importlib.metadata
import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

# Must be set before anything imports jax. Another value, such as JAX_PLATFORMS=cuda, is respected.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

# Compilation takes most of the time. So XLA generates code without optimisation, and in one part
# because programs are small. With jax 0.10 it also uses its older generator of loops, which is
# nearly twice as fast. The steps of XLA before code generation are unchanged.
_flags = [
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  '--xla_cpu_parallel_codegen_split_count=1',
  '--xla_cpu_enable_concurrency_optimized_scheduler=false',
]
if importlib.metadata.version('jaxlib').startswith('0.10.'):  # later versions fail on this flag
  _flags.append('--xla_cpu_use_fusion_emitters=false')
os.environ.setdefault('XLA_FLAGS', ' '.join(_flags))

# Recording the Python lines of each operation takes a tenth of the lowering time.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')

# Small models are compiled again and again, also by subprocesses. All share the compiled programs
# in a cache, which the next run of the tests uses too. Files older than two weeks are deleted.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _home = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
  _cache = _home / 'sink_jax-tests' / importlib.metadata.version('jax')
  for _file in _cache.glob('*'):
    if _file.stat().st_mtime < time.time() - 14 * 24 * 3600:
      _file.unlink()
  os.environ |= {
    'JAX_COMPILATION_CACHE_DIR': str(_cache),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }

# In tests marked typed, every function of these rooms checks its arguments and its result. The hook
# decorates functions while their modules load. It is the innermost decorator, so under jit it
# checks the trace.
TYPED = ['sink_jax.attention', 'sink_jax.kernels', 'sink_jax.models', 'sink_jax.evaluate']
if importlib.util.find_spec('beartype'):
  import jaxtyping

  import tests.typed  # noqa: F401, the hook looks it up by name

  jaxtyping.install_import_hook(TYPED, 'tests.typed.checked')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  if importlib.util.find_spec('beartype'):
    typed = item.get_closest_marker('typed') and not item.get_closest_marker('untyped')
    jaxtyping.config.update('jaxtyping_disable', not typed)
  return (yield)


def pytest_addoption(parser):
  parser.addoption('--full', action='store_true', help='also run the tests marked full')
  parser.addoption('--rounds', type=int, default=1, help='how often tests of faults harm a run')


def pytest_configure(config):
  try:
    from hypothesis import settings
  except ImportError:
    return
  # The first example includes the compilation time, so a deadline per example would mean nothing.
  # Every run draws the same examples, so that a failing test keeps failing.
  settings.register_profile('sink_jax', deadline=None, derandomize=True)
  settings.load_profile('sink_jax')
  # For files from elsewhere: each must be read within 10 seconds.
  settings.register_profile(
    'hostile',
    deadline=10_000,
    derandomize=not config.getoption('--full'),
    max_examples=10_000 if config.getoption('--full') else 50,
  )


@pytest.fixture
def rounds(request):
  return request.config.getoption('--rounds')


# JAX keeps every program that it has lowered, with more than a megabyte for each, and four memory
# mappings, of which Linux allows a process 65,530. Programs are compiled twice as fast where memory
# is used again.
_KEPT = 300
_lowered: list[str] = []


def pytest_sessionstart():
  import jax  # only here: the environment is set above

  def count(event, _, **__):
    if event.endswith('jaxpr_to_mlir_module_duration'):
      _lowered.append(event)

  jax.monitoring.register_event_duration_secs_listener(count)


@pytest.fixture(autouse=True)
def _forgets_programs():
  yield
  if len(_lowered) > _KEPT:
    sys.modules['jax'].clear_caches()
    gc.collect()
    _lowered.clear()


def pytest_collection_finish(session):
  """Exempts long-lived objects from garbage collection: tests, and modules of large packages.

  Tracing makes many small objects. Each collection would otherwise scan the long-lived ones again.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


# Each of these files takes long. If one started last, the other process would wait for it.
FIRST = (
  'test_readme.py',
  'test_types.py',
  'test_faults.py',
  'test_bucket.py',
  'test_notebook.py',
  'test_flash.py',
  'test_parity.py',
  'test_loop.py',
  'test_oracle.py',
)


def pytest_collection_modifyitems(config, items):
  items.sort(key=lambda item: item.path.name not in FIRST)
  if config.getoption('--full'):
    return
  skip = pytest.mark.skip(reason='exhaustive: run with --full')
  cases = collections.Counter()
  for item in items:
    every = item.get_closest_marker('every')
    if every:
      test = item.nodeid.partition('[')[0]
      cases[test] += 1
    if item.get_closest_marker('full') or every and (cases[test] - 1) % every.args[0]:
      item.add_marker(skip)
