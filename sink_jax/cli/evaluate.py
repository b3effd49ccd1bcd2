"""Probes a model for attention sinks: a run trained here, or a published model.

    python -m sink_jax evaluate --workdir=runs/quickstart/text-softmax
    python -m sink_jax evaluate --checkpoint=Pythia-160M --out=pythia

A run is probed on the inputs stored with it, a published model on text, random tokens or one
repeated token. Writes sink_report.json and pictures (importance per head, attention maps, norm
ratios, and the training curves of a run).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sink_jax.analyses.options import INPUTS, InputOptions, check_given
from sink_jax.analyses.options import Options as AnalysisOptions
from sink_jax.cli import command
from sink_jax.cli.one_model import ModelOptions
from sink_jax.evaluate.threshold import EPSILON
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.tables import text_table

if TYPE_CHECKING:  # they import jax
  from sink_jax.models.arrays import AnyArray
  from sink_jax.models.run import Run

_TOKENS_AT_A_TIME = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, InputOptions):
  """The options of a probe, and those of the inputs of a published model.

  Attributes:
    workdir: folder of a run instead. All tokens that it stores are probed, in the dtype of its own
      probes, where --sequences, --length and --dtype do not say otherwise.
    out: folder to write to; a published model needs one. By default WORKDIR/evaluation.
    epsilon: threshold of the sink rate; by default the run's own, or 0.3.
  """

  workdir: str | None = None
  out: str | None = None
  epsilon: float | None = None

  def __post_init__(self):
    ModelOptions.__post_init__(self)
    InputOptions.__post_init__(self)
    if self.epsilon is not None and not 0 < self.epsilon < 1:
      raise ValueError(f'--epsilon={self.epsilon:g}: importance lies between 0 and 1; the paper '
                       'uses 0.3.')
    given = self.given & {field.name for field in dataclasses.fields(InputOptions)}
    if self.workdir is not None:
      self.unused('is for published models: a run is probed on the inputs stored with it. Other '
                  'inputs: python -m sink_jax analyses.',
                  *sorted(given - {'sequences', 'length', 'dtype'}))
    elif not self.out:
      raise ValueError('--out is needed: the folder to write to.')
    else:
      check_given(given, (*INPUTS, 'dtype', 'fsdp'), 'a probe of a published model', self.inputs)


def main(options: Options) -> None:
  """Probes the model, writes the report, and prints its summary."""
  from sink_jax.io import compile_cache

  compile_cache.enable()
  result, paths = evaluate(options)
  print(as_text(result), *paths, sep='\n')


def evaluate(options: Options) -> tuple[dict[str, Any], list[AnyPath]]:
  """Probes the model that a person names, and writes the results below --out.

  Returns:
    What sink_report.json holds, and the paths of the files written.

  Raises:
    ValueError: no such model, inputs that it cannot take, or more than a run has stored.
    CheckpointError: a run has no usable checkpoint.
    OSError: the results cannot be written.
  """
  if options.workdir is not None:
    return _trained(to_path(options.workdir), options)
  assert options.out  # required with --checkpoint
  return _published(to_path(options.out), options)


def _trained(workdir: AnyPath, options: Options) -> tuple[dict[str, Any], list[AnyPath]]:
  """Probes a run on the probe tokens that it stores, all of them where no part is asked for."""
  from sink_jax.evaluate import plots
  from sink_jax.pretrained.load import load_run
  from sink_jax.train.experiment import ProbeConfig
  from sink_jax.train.metrics_log import read_metrics
  from sink_jax.train.run_dir import read_config

  out = to_path(options.out) if options.out else workdir / 'evaluation'
  config, run = read_config(workdir), load_run(workdir)
  tokens = run.probe_tokens
  if tokens is None:
    raise ValueError('The run has no probe_tokens.npy, so there is nothing to probe it on.')
  given = command.given_of(options, InputOptions)
  for name, stored in zip(('sequences', 'length'), tokens.shape):
    if given.get(name, stored) > stored:
      raise ValueError(f'--{name}={given[name]}: the run stores {tokens.shape[0]} sequences of '
                       f'{tokens.shape[1]} tokens; choose up to {stored}.')
  tokens = tokens[:given.get('sequences'), :given.get('length')]
  settings = ProbeConfig(**config['probe'])
  epsilon = settings.epsilon if options.epsilon is None else options.epsilon
  data = config['data']
  protocol = {'bos_before_documents': data['bos'], 'interventions': data['interventions'],
              'inputs': f'the first sequences of probe_tokens.npy ({data["source"]})'}
  result, paths = _probed(run, tokens, given.get('dtype', settings.dtype), epsilon, out, protocol,
                          config=config)
  paths.append(out / 'training_curves.png')
  # The curves were thresholded in training, by the epsilon of the config, whatever is asked for
  # now.
  plots.training_curves(read_metrics(workdir), paths[-1], settings.epsilon)
  return result, paths


def _published(out: AnyPath, options: Options) -> tuple[dict[str, Any], list[AnyPath]]:
  """Probes a published model on the inputs that the options ask for."""
  from sink_jax.analyses.loaded_models import make_inputs
  from sink_jax.models.sizes import parameter_count

  model = options.load()
  inputs = make_inputs(model, AnalysisOptions(**command.given_of(options, InputOptions)))
  protocol = {'bos': inputs.description['bos'], 'inputs': inputs.description}
  epsilon = EPSILON if options.epsilon is None else options.epsilon
  return _probed(model.run, inputs.tokens, options.dtype, epsilon, out, protocol,
                 parameters=parameter_count(model.run.config))


def _probed(run: Run, tokens: AnyArray, dtype: str, epsilon: float, out: AnyPath,
            protocol: dict[str, Any], **more: Any) -> tuple[dict[str, Any], list[AnyPath]]:
  """Probes a model on tokens (S, T), and writes the numbers, with `more` of them, and pictures."""
  from sink_jax.evaluate import plots
  from sink_jax.evaluate.probe import probe
  from sink_jax.io.files import write_atomically
  from sink_jax.report.jsontext import to_json
  from sink_jax.train.provenance import provenance

  report = probe(run, tokens, dtype=dtype, batch_size=max(1, _TOKENS_AT_A_TIME // tokens.shape[1]))
  result = {
      'protocol': {**report.protocol, **protocol},
      'epsilon': epsilon,
      'step': report.protocol['step'],
      'summary': report.summary(epsilon),
      'importance_1': report.head_importance().tolist(),
      'raw_importance_1': report.raw_importance[..., 0].mean(0).tolist(),
      'bias_slot': None if report.bias_slot is None else report.bias_slot.mean(0).tolist(),
      'fields': {
          'summary.sink': 'Sink_k in percent, k = 1, 2, ...',
          'importance_1': 'importance of the first token, a list of heads per block, mean over '
                          'sequences',
          'raw_importance_1': 'the same of the weights that multiply the values',
          'bias_slot': 'mean weight of the extra key or learned sink token, likewise',
      },
      **more, 'provenance': provenance(),
  }
  out.mkdir(parents=True, exist_ok=True)
  paths = [out / name for name in ('sink_report.json', 'importance.png', 'norm_ratios.png',
                                   'attention_maps.png')]
  numbers, importance, ratios, maps = paths
  report.plot(importance, epsilon)
  report.plot_norm_ratios(ratios)
  plots.attention_maps(run, tokens, maps)
  write_atomically(numbers, to_json(result))
  return result, paths


def as_text(result: dict[str, Any]) -> str:
  """Formats a result for a terminal."""
  summary, protocol = result['summary'], result['protocol']
  star = '' if protocol['scores'] == 'attention weights' else '*'
  ratios = [pair for pair in zip(summary['value_ratio'], protocol['blocks']) if pair[0] is not None]
  # A ratio is None where the others' values have no norm; with all of them None there is no line.
  ratio, block = min(ratios, default=(None, None))
  rows = [
      ('Sink_1', f'{summary["sink_1"]:.1f} %{star}', f'of heads give the first token more than '
       f'{result["epsilon"]:g}'),
      ('largest importance', f'{summary["largest_importance"]:.3f}{star}',
       'of the first token, over heads'),
      ('mean importance', f'{summary["mean_importance"]:.3f}{star}',
       'of the first token, over heads'),
      ('raw mass', f'{summary["raw_mass_1"]:.3f}', 'on the first token, '
       f'of {summary["raw_row_mass"]:.3f} in a row'),
  ]
  if ratio is not None:
    rows.append(('value norm ratio', f'{ratio:.2f}',
                 f'first token to the others, smallest in block {block}'))
  if summary['sink_bias_slot'] is not None:
    # Beside Sink_1: an extra key takes the sink of the first token over (Table 4).
    rows.insert(1, ('Sink_*', f'{summary["sink_bias_slot"]:.1f} %', 'the extra key; '
                    f'{summary["sink_bias_slot_released"]:.1f} % as the official implementation, '
                    'sail-sg/Attention-Sink, counts'))
  step = '' if protocol['step'] is None else f', step {protocol["step"]}'
  head = (f'{protocol["run"]}{step}: {protocol["sequences"]} sequences of '
          f'{protocol["length"]} tokens, {protocol["dtype"]}')
  note = ['* of proxy scores: the rows of this attention do not sum to one'] if star else []
  return '\n'.join([head, *text_table(['metric', 'value', 'meaning'], rows, left=(0, 2)), *note])
