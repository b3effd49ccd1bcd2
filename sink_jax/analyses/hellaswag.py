"""Sink_1 beside the accuracy of HellaSwag, by family and scale (Figure 10).

Within a family both grow with the model; across families, more sinks do not mean a better
model.
"""

from __future__ import annotations

from pathlib import Path

from sink_jax.analyses import scale
from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.lm_eval_adapter import hellaswag_accuracy
from sink_jax.analyses.options import Options
from sink_jax.data.inputs import Inputs
from sink_jax.evaluate import plots
from sink_jax.models.run import Run


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures Sink_1 as `scale.measure` does, and the accuracy of HellaSwag.

  Questions begin without BOS, as in the version of lm-evaluation-harness that the paper's time had,
  unless options.bos asks for one; the inputs of Sink_1 have another default.

  Returns:
    The result of `scale.measure`, that of `hellaswag_accuracy`, and 'hellaswag', its protocol:
    bos, file and limit.

  Raises:
    ValueError: no tokenizer, no lm_eval, or no questions; several epsilons.
  """
  if inputs.tokenizer is None:
    raise ValueError(f'{run.name}: HellaSwag is text, and the model has no tokenizer for it.')
  answers = hellaswag_accuracy(run, inputs.tokenizer, bos=options.bos or 'none',
                               file=options.hellaswag, limit=options.limit, say=options.say)
  # The name of the file alone, since results are published and the paths of a machine are not.
  protocol = {'bos': options.bos or 'none', 'file': Path(options.hellaswag).name,
              'limit': options.limit}
  return scale.measure(run, inputs, options) | answers | {'hellaswag': protocol}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws Sink_1, acc and acc_norm against the number of parameters, a line per family (PNG)."""
  figure, axes = plots.canvas(12.0, 4.0, columns=3)
  for ax, key, title, y in zip(
      axes[0], ('sink_1', 'acc', 'acc_norm'),
      (f'Sink, ε = {results[0]["epsilon"]:g}', 'HellaSwag', 'HellaSwag, normalised by length'),
      (f'{plots.SINK_1} (% of heads)', 'Acc (%)', 'Acc_Norm (%)')):
    scale.panel(ax, results, key, title, y)
    if key != 'sink_1':
      ax.axhline(25, color='#777777', linewidth=1, linestyle=':')  # one of four by chance
  axes[0, 0].legend(fontsize=9, frameon=False)
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates Sink_1 and both accuracies with their standard errors, with a row per model."""
  return [['model', 'parameters', 'Sink_1 in %', 'acc in %', 'acc_norm in %', 'questions'],
          *([model_name(r), f'{r["parameters"]:,}', f'{r["sink_1"]:.2f}',
             f'{r["acc"]:.2f} ± {r["acc_stderr"]:.2f}',
             f'{r["acc_norm"]:.2f} ± {r["acc_norm_stderr"]:.2f}', str(r['questions'])]
            for r in results)]
