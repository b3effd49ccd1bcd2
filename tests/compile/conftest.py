"""Compiling tests run only under bash launch/test.sh --compile; other tests here only lower.

A test with the argument `target` runs for each target of the run, a test with `tpu` for each of its
TPUs.
"""

from tests.compile import targets

CHOICES = {'target': targets.TARGETS, 'tpu': targets.TPUS, 'h200': ('h200',)}


def pytest_generate_tests(metafunc):
  for name in CHOICES.keys() & set(metafunc.fixturenames):
    metafunc.parametrize(
      name, [target for target in targets.asked_for() if target in CHOICES[name]]
    )


def pytest_collection_modifyitems(items):
  if not targets.asked_for():
    items[:] = [
      item for item in items if not CHOICES.keys() & set(getattr(item, 'fixturenames', ()))
    ]
