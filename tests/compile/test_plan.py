"""The plan command, compiling for slices of several hosts."""

import dataclasses
import json
import os
import subprocess
import sys

from sink_jax.plan import compiler
from sink_jax.plan.chips import CHIPS, GIB, parse
from sink_jax.plan.records import plan_from_json

SLICES = {'v5e': 'v5e:4x4', 'v5p': 'v5p:2x2x4', 'v6e': 'v6e:4x4', 'v7x': 'v7x:2x2x2'}


def plan(*arguments):
  """Runs the plan command for a model of two small layers."""
  return subprocess.run(
      [sys.executable, '-P', '-m', 'sink_jax.plan', '--size=tiny', '--vocab=512',
       '--config.model.heads=4', '--config.model.d_model=512', '--config.model.ffn_hidden=1024',
       *arguments], capture_output=True, text=True, env=os.environ)


def test_a_plan_counts_what_the_devices_exchange(tpu, tmp_path, note):
  file = tmp_path / 'plan.json'
  shown = plan(f'--topology={SLICES[tpu]}', '--data=4', '--fsdp=4', '--batch_size=16',
               '--context=512', f'--json={file}')
  assert shown.returncode == 0, shown.stderr
  planned = plan_from_json(json.loads(file.read_text()))
  note(target=tpu, **dataclasses.asdict(planned.cost.roofline))
  axes = {row.axes for row in planned.cost.collectives}
  assert 'fsdp' in axes and any('data' in name for name in axes)
  assert max(planned.peaks.values()) < CHIPS[tpu].usable and planned.cost.unknown_loops == 0
  assert list(planned.peaks) == ['training', 'validation', 'probe']
  assert planned.attention == 'splash'
  # Products of the model and, at most, of a part of the loss that is padding.
  assert planned.model_flops <= planned.cost.flops < 1.5 * planned.model_flops
  assert 'Computed, not measured' in shown.stdout


def test_one_chip_alone_can_be_planned(tpu):
  alone = parse(f'{tpu}:' + 'x'.join('1' * CHIPS[tpu].dimensions))
  assert len(compiler.topology_devices(alone.compiler_name)) == alone.devices


def test_what_does_not_fit_comes_with_options_to_change(tpu):
  shown = plan(f'--topology={SLICES[tpu]}', '--batch_size=65536', '--context=2048', '--data=-1',
               '--remat=none')
  assert shown.returncode == 1
  assert 'error: training needs' in shown.stderr and '--remat=blocks' in shown.stderr
  assert f'of {CHIPS[tpu].usable / GIB:.2f}' in shown.stderr
