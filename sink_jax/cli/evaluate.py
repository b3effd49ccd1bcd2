"""Probes a model for attention sinks, and writes and prints the numbers."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection
from textwrap import fill
from typing import Any, NamedTuple

from sink_jax.analyses.maps import maps, of_report
from sink_jax.analyses.models import InputOptions, Model, make_inputs, stored_inputs
from sink_jax.analyses.runner import ANALYSES
from sink_jax.cli.results import ReadModel, writable_folder
from sink_jax.evaluate import EPSILON, sink_report
from sink_jax.evaluate.sink_report import SinkReport
from sink_jax.io import compile_cache
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.models.sizes import parameter_count
from sink_jax.pictures.maps import grid
from sink_jax.pictures.style import Row, png
from sink_jax.report.files import recorded, to_json, write_files
from sink_jax.report.html_page import to_html
from sink_jax.report.model_page import NUMBERS, model_page, sentences
from sink_jax.train.workdir import read_config, read_experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReadModel, InputOptions):
  """Probes a model for attention sinks: a run trained here, or a published model.

      python -m sink_jax evaluate --workdir=runs/quickstart/text-softmax
      python -m sink_jax evaluate --checkpoint=Pythia-160M

  A run is probed on the inputs stored with it, a published model on text, random tokens or one
  repeated token. Writes index.html, sink_report.json and pictures.
  """

  #: folder of a run instead; by default all tokens that it stores, in the dtype of its probes.
  workdir: str | None = None
  out: str | None = None  # folder to write to; by default WORKDIR/evaluation or evaluation-NAME.
  epsilon: float | None = None  # threshold of the sink rate; by default that of the run, or 0.3.

  def __post_init__(self):
    ReadModel.__post_init__(self)
    InputOptions.__post_init__(self)
    if self.epsilon is not None and not 0 < self.epsilon < 1:
      raise ValueError(f'--epsilon={self.epsilon:g} must lie between 0 and 1; the paper uses 0.3.')


def main(options: Options, given: Collection[str]) -> None:
  """Probes the model, writes the report, and prints its summary."""
  compile_cache.enable()
  result, paths = evaluate(options, given)
  print(as_text(result), *paths, sep='\n')


def evaluate(options: Options, given: Collection[str] = ()) -> tuple[dict[str, Any], list[AnyPath]]:
  """Probes the model that a person names, and writes the results below --out.

  Args:
    given: names of the options of inputs that apply; the others are the model's.

  Returns:
    What sink_report.json holds, and the paths of the files written.

  Raises:
    ValueError: no such model, inputs that it cannot take, or more than a run has stored.
    CheckpointError: a run has no usable checkpoint.
  """
  names = {field.name for field in dataclasses.fields(InputOptions)} & set(given)
  chosen = {name: getattr(options, name) for name in names}
  prepare = _published if options.workdir is None else _trained
  out, model, epsilon, about = prepare(options, chosen)
  inputs = model.inputs()
  report = model.report(inputs.tokens)
  of_inputs = {'bos': inputs.description['bos'], 'inputs': inputs.description}
  result = recorded(
    {
      'protocol': report.protocol | of_inputs,
      'epsilon': epsilon,
      'step': report.protocol['step'],
      'summary': report.summary(epsilon),
      'importance_1': report.head_importance().tolist(),
      'raw_importance_1': report.raw_importance[..., 0].mean(0).tolist(),
      'bias_slot': None if report.extra_key is None else report.extra_key.mean(0).tolist(),
      **about,
    }
  )
  pictures = _pictures(report, epsilon, maps(model))
  page = to_html(model_page(result, pictures), pictures)
  return result, write_files(out, {NUMBERS: to_json(result), **pictures, 'index.html': page})


class _Asked(NamedTuple):
  """What a person asks for. out: folder to write to; about: what else is recorded of the model."""

  out: AnyPath
  model: Model
  epsilon: float
  about: dict[str, Any]


def _published(options: Options, chosen: dict[str, Any]) -> _Asked:
  """A published model with the inputs that the options describe."""
  assert options.checkpoint is not None
  # Such as evaluation-Pythia-14M-step1000.
  name = re.sub(r'[^\w.-]', '-', os.path.basename(os.path.abspath(options.checkpoint)))
  out = writable_folder(options.out or f'evaluation-{name}')
  run = options.load()
  inputs = InputOptions(**chosen)
  model = Model(run, inputs, make_inputs(run, inputs))
  about = {'parameters': parameter_count(run.config)}
  return _Asked(out, model, options.epsilon or EPSILON, about)


def _trained(options: Options, chosen: dict[str, Any]) -> _Asked:
  """A run with the probe tokens that it stores, by default all of them."""
  assert options.workdir is not None
  for name in {'inputs', 'source', 'bos', 'seed'} & set(chosen):
    raise ValueError(f'--{name}: a run is probed on the tokens that it stores; leave it out.')
  workdir = to_path(options.workdir)
  settings = read_experiment(workdir, options.plugins).probe
  out = writable_folder(options.out or workdir / 'evaluation')
  run = options.load()
  inputs = stored_inputs(run, chosen.get('sequences'), chosen.get('length'))
  asked: dict[str, Any] = {'dtype': settings.dtype} | chosen
  model = Model(run, InputOptions(**asked), inputs)
  about = {'config': read_config(workdir)}
  return _Asked(out, model, options.epsilon or settings.epsilon, about)


def _pictures(report: SinkReport, epsilon: float, of_maps: list[Row]) -> dict[str, bytes]:
  """The pictures of a page, {name: PNG file}."""
  name = {'model': report.protocol['run'] or 'model'}
  figures = {
    'importance': grid(report.head_rows(epsilon), 'importance'),
    'attention_maps': ANALYSES['maps'].picture([name | row for row in of_maps]),
    'norms': ANALYSES['norms'].picture([name | row for row in of_report(report)]),
  }
  return {f'{key}.png': png(figure) for key, figure in figures.items()}


def as_text(result: dict[str, Any]) -> str:
  """Formats a result for a terminal."""
  text = sink_report.as_text(result['summary'], result['protocol'], result['epsilon'])
  return '\n'.join([text, *(fill(sentence, 100) for sentence in sentences(result))])
