"""Probes a model for attention sinks, and writes and prints the numbers."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection
from textwrap import fill
from typing import Any

import numpy as np

from sink_jax.analyses.maps import maps, of_report
from sink_jax.analyses.models import InputOptions, Model, make_inputs
from sink_jax.analyses.runner import ANALYSES
from sink_jax.attention import AnyArray
from sink_jax.cli.results import ReadModel, load, to_json, writable_folder
from sink_jax.evaluate import EPSILON, plots, sink_report
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.probe import probe
from sink_jax.io import compile_cache
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_count
from sink_jax.report.model_page import model_page, sentences, to_html
from sink_jax.train.provenance import provenance
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
  chosen = {
    field.name: getattr(options, field.name)
    for field in dataclasses.fields(InputOptions)
    if field.name in given
  }
  if options.workdir is not None:
    return _with_page(*_trained(options, chosen, to_path(options.workdir)))
  assert options.checkpoint is not None  # one of the two is given
  # Such as evaluation-Pythia-14M-step1000.
  name = re.sub(r'[^\w.-]', '-', os.path.basename(os.path.abspath(options.checkpoint)))
  out = writable_folder(options.out or f'evaluation-{name}')
  run = load(options)
  inputs = make_inputs(run, InputOptions(**chosen))
  return _with_page(
    *_probed(
      run,
      inputs.tokens,
      options,
      options.dtype,
      options.epsilon or EPSILON,
      out,
      {'bos': inputs.description['bos'], 'inputs': inputs.description},
      parameters=parameter_count(run.config),
    )
  )


def _with_page(
  result: dict[str, Any], paths: list[AnyPath]
) -> tuple[dict[str, Any], list[AnyPath]]:
  """Writes index.html next to the other files."""
  page = paths[0].parent / 'index.html'
  write_atomically(page, to_html(model_page(page.parent), page.parent))
  return result, [*paths, page]


def _trained(
  options: Options, given: dict[str, Any], workdir: AnyPath
) -> tuple[dict[str, Any], list[AnyPath]]:
  """Probes a run on the probe tokens that it stores, by default all of them."""
  for name in {'inputs', 'source', 'bos', 'seed'} & set(given):
    raise ValueError(f'--{name}: a run is probed on the tokens that it stores; leave it out.')
  experiment = read_experiment(workdir, options.plugins)
  out = writable_folder(options.out or workdir / 'evaluation')
  run = load(options)
  tokens = run.probe_tokens
  if tokens is None:
    raise ValueError(f'{workdir} has no probe_tokens.npy to probe the run on.')
  for name, stored in zip(('sequences', 'length'), tokens.shape):
    if given.get(name, stored) > stored:
      raise ValueError(
        f'--{name}={given[name]}: the run stores {tokens.shape[0]} sequences of '
        f'{tokens.shape[1]} tokens; choose up to {stored}.'
      )
  tokens = tokens[: given.get('sequences'), : given.get('length')]
  settings, config = experiment.probe, read_config(workdir)
  data = config['data']
  return _probed(
    run,
    tokens,
    options,
    given.get('dtype', settings.dtype),
    options.epsilon or settings.epsilon,
    out,
    {
      'bos_before_documents': data['bos'],
      'interventions': data['interventions'],
      'inputs': f'the first sequences of probe_tokens.npy ({data["source"]})',
    },
    config=config,
  )


def _probed(
  run: Run,
  tokens: AnyArray,
  options: Options,
  dtype: str,
  epsilon: float,
  out: AnyPath,
  protocol: dict[str, Any],
  **more: Any,
) -> tuple[dict[str, Any], list[AnyPath]]:
  """Probes a model on tokens (S, T), and writes the numbers, with `more` of them, and pictures."""
  report = probe(run, tokens, dtype=dtype, batch_size=options.at_a_time(tokens.shape[1]))
  result = {
    'protocol': {**report.protocol, **protocol},
    'epsilon': epsilon,
    'step': report.protocol['step'],
    'summary': report.summary(epsilon),
    'importance_1': report.head_importance().tolist(),
    'raw_importance_1': report.raw_importance[..., 0].mean(0).tolist(),
    'bias_slot': None if report.extra_key is None else report.extra_key.mean(0).tolist(),
    **more,
    'provenance': provenance(),
  }
  out.mkdir(parents=True, exist_ok=True)
  paths = [
    out / name for name in ('sink_report.json', 'importance.png', 'norms.png', 'attention_maps.png')
  ]
  numbers, importance, lengths, heads = paths
  report.plot(importance, epsilon)
  analysed = Model(run, InputOptions(), Inputs(np.asarray(tokens), {}))
  for analysis, rows, path in (
    ('norms', of_report(report), lengths),
    ('maps', maps(analysed), heads),
  ):
    plots.save(
      ANALYSES[analysis].picture([{'model': run.name or 'model'} | row for row in rows]), path
    )
  write_atomically(numbers, to_json(result))
  return result, paths


def as_text(result: dict[str, Any]) -> str:
  """Formats a result for a terminal."""
  text = sink_report.as_text(result['summary'], result['protocol'], result['epsilon'])
  return '\n'.join([text, *(fill(sentence, 100) for sentence in sentences(result))])
