"""The plan command compiles for slices of several hosts."""

import os
import subprocess
import sys

from sink_jax.plan import compiler
from sink_jax.plan.chips import CHIPS, parse

SLICES = {'v5e': 'v5e:4x4', 'v5p': 'v5p:2x2x4', 'v6e': 'v6e:4x4', 'v7x': 'v7x:2x2x2'}


def plan(*arguments):
  """Runs the plan command for a model of two small layers."""
  sizes = dict(size='tiny', vocab_size=512, heads=4, d_model=512, ffn_hidden=1024)
  return subprocess.run(
    [
      sys.executable,
      '-P',
      '-m',
      'sink_jax',
      'plan',
      *(f'--config.model.{key}={value}' for key, value in sizes.items()),
      *arguments,
    ],
    capture_output=True,
    text=True,
    env=os.environ,
  )


def test_a_plan_has_memory_an_estimate_and_totals(tpu):
  # On a mesh of data and fsdp, blocks laid out one after another crash libtpu 0.0.42.1, hence
  # remat.
  shown = plan(
    f'--topology={SLICES[tpu]}',
    '--config.mesh.fsdp=4',
    '--config.batch_size=16',
    '--config.data.context=512',
    '--config.model.remat=blocks',
  )
  assert shown.returncode == 0, shown.stderr
  for words in (
    'attention by splash',
    'training in all',
    'validation in all',
    'probe in all',
    'not measured',
    'chip-hours',
    '--config.mesh.fsdp=4',
  ):
    assert words in shown.stdout


def test_one_chip_and_two_slices_have_their_devices(tpu):
  one = parse(f'{tpu}:' + 'x'.join('1' * CHIPS[tpu].dimensions))
  assert len(compiler.topology_devices(one.compiler_name)) == one.devices
  devices = compiler.topology_devices(parse(SLICES[tpu]).compiler_name, 2)
  assert len(devices) == parse(SLICES[tpu], 2).devices
  assert {device.slice_index for device in devices} == {0, 1}
