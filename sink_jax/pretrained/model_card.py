"""The README.md of an exported run: what it is, what it was trained with, and what was probed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from sink_jax.evaluate import EPSILON
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.train.metrics import read_metrics
from sink_jax.train.provenance import code
from sink_jax.train.workdir import read_config, read_status

_RATIOS = {'value_ratio': 'values', 'key_ratio': 'keys', 'hidden_ratio': 'hidden states'}


def model_card(workdir: str | os.PathLike, step: int | None, hf: dict[str, Any],
               notes: Sequence[str]) -> str:
  """The text of the card, Markdown with the header that the Hugging Face hub reads.

  Args:
    workdir: of the run. step: of the checkpoint. hf: config.json. notes: how the run became it.
  """
  folder = to_path(workdir)
  trained = read_status(folder).get('code')
  return '\n'.join([
      '---', 'library_name: transformers', 'pipeline_tag: text-generation', 'tags: [sink_jax]',
      '---', '', f'# {folder.name}', '',
      f'A model that was trained with sink_jax, at step {step}, as a `{hf["architectures"][0]}` of '
      f'{_source(hf)}.', '', *(f'- {note}' for note in notes),
      f'- trained with: {trained or "unknown"}', f'- exported with: {code()}', '',
      *_probe(folder, step), '## Config of the training', '', '```json',
      json.dumps(read_config(folder), indent=2, ensure_ascii=False), '```', ''])


def _source(hf: dict[str, Any]) -> str:
  """Where the class is, and how it is loaded."""
  if 'auto_map' not in hf:
    return 'transformers'
  file = hf['auto_map']['AutoModelForCausalLM'].split('.')[0]
  return (f'{file}.py here, which `AutoModelForCausalLM.from_pretrained(..., '
          'trust_remote_code=True)` loads; it states the formula and is slow')


def _probe(workdir: AnyPath, step: int | None) -> list[str]:
  """The section on attention sinks: the last probe up to the step."""
  rows = [row for row in read_metrics(workdir, 'probe') if step is None or row['step'] <= step]
  title = ['## Attention sinks', '']
  if not rows:
    return [*title, 'The run was not probed up to this step.', '']
  row = rows[-1]
  lines = [*title, f'Probed at step {row["step"]}: Sink_1 = {_number(row["sink_1"])} % of heads '
           f'(epsilon = {EPSILON:g}).']
  if row.get('sink_bias_slot') is not None:  # its part is played by the extra key
    lines.append(f'Of the extra key or the learned sink token: {_number(row["sink_bias_slot"])} %.')
  lines += ['', 'Norm of the first token over the mean of the others, by block:', '']
  for key, name in _RATIOS.items():
    # Hidden states have one number more: that of the embedding comes first.
    lines.append(f'- {name}: {", ".join(map(_number, row.get(key) or [])) or "not measured"}')
  return [*lines, '']


def _number(x: float | None) -> str:
  return 'none' if x is None else f'{x:.4g}'
