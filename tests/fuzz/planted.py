"""Parsers with a defect each, for the test that the harness finds every one of them."""

from __future__ import annotations

import os
import subprocess
import time

from hypothesis import strategies as st

from tests.fuzz.inputs import Input, Kind


def _evaluates(prepared, input, folder):
  eval(input.text)


def _writes_outside(prepared, input, folder):
  (folder / '..' / '..' / 'outside.txt').write_text(input.text)


def _eats_memory(prepared, input, folder):
  blocks = []
  while True:
    blocks.append(bytes(1 << 28))


def _raises(prepared, input, folder):
  {}[input.text]


def _runs_a_program(prepared, input, folder):
  subprocess.run(['true'])


def _imports(prepared, input, folder):
  __import__(input.text)


def _dies(prepared, input, folder):
  os.abort()


def _hangs(prepared, input, folder):
  time.sleep(60)


def _says_nothing(prepared, input, folder):
  raise ValueError


def _swallows(prepared, input, folder):
  try:
    eval(input.text)
  except BaseException as error:
    raise ValueError('not a number') from error


def _refuses(prepared, input, folder):
  raise ValueError('not a number')


def _kind(run):
  return Kind(lambda folder: None, lambda prepared: st.just(Input('fuzzed_module')), run)


KINDS = {f'planted-{run.__name__.strip("_")}': _kind(run) for run in (
    _evaluates, _writes_outside, _eats_memory, _raises, _runs_a_program, _imports, _dies, _hangs,
    _says_nothing, _swallows, _refuses)}
