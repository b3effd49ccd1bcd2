"""Sink_1 by domain of the text, for several thresholds (Figure 9).

The 17 domains of the Pile make little difference at epsilon = 0.2 and 0.3, some at 0.4. The
Pile comes as JSONL whose domain is in 'meta.pile_set_name', or as a folder for each domain.
"""

from __future__ import annotations

import numpy as np

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.loaded_models import LoadedModel, check_length
from sink_jax.analyses.options import Options
from sink_jax.evaluate import inputs as data_inputs
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.probe import probe
from sink_jax.models.run import Run
from sink_jax.paper.numbers import PILE

_NAMES = 12  # of models in a legend beside one panel


def make_inputs(model: LoadedModel, options: Options) -> Inputs:
  """Takes up to options.sequences sequences of every domain of the source.

  The source is read to its end, or until all 17 domains of the Pile have their sequences.
  description['missing'] lists the domains of the Pile that have none.

  Raises:
    ValueError: a source of a single domain.
  """
  # Before the source is opened: a corpus may take long to read.
  check_length(model.run, options.length)
  source = data_inputs.open_source(options.source)
  # drawn=False: the error for a missing tokenizer must not propose random tokens, which have no
  # domain.
  inputs = data_inputs.by_domain(model.text_tokenizer(drawn=False), source,
                                 sequences=options.sequences, length=options.length,
                                 bos=options.bos or 'tokenizer', domains=PILE)
  names = [domain['domain'] for domain in inputs.description['domains'] if domain['sequences']]
  if len(names) < 2:
    raise ValueError(
        f'{source!r} has one domain, {names[0]!r}. Domains are the first sub-folders of a folder, '
        "or a field of JSONL: --source=\"Jsonl(path='...', domain_field='meta.pile_set_name')\".")
  known = set(map(_key, names))
  missing = [name for name in PILE if _key(name) not in known]
  # A corpus without any domain of the Pile is another corpus, which misses none of them.
  return data_inputs.Inputs(inputs.tokens, inputs.description | {
      'missing': missing if len(missing) < len(PILE) else []}, inputs.tokenizer)


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures Sink_1 of one model in percent of heads, by epsilon and domain.

  Returns:
    domains (D,): those with any sequence, the Pile's in the paper's order. sequences (D,): how
    many each has. epsilons (E,). sink_1 (E, D). missing: domains of the Pile without a document
    that is long enough.
  """
  report = probe(run, inputs.tokens, dtype=options.dtype,
                 batch_size=options.at_a_time(inputs.tokens.shape[1]))
  # The sequences of a domain lie together, in the order of description['domains'], where a domain
  # that has none is listed as well.
  parts, start = {}, 0
  for domain in inputs.description['domains']:
    if domain['sequences']:
      parts[domain['domain']] = report.importance[start:start + domain['sequences'], ..., 0]
      start += domain['sequences']
  # Domains that the Pile does not have follow those that it has, by name.
  order = {_key(name): i for i, name in enumerate(PILE)}
  names = sorted(parts, key=lambda name: (order.get(_key(name), len(PILE)), name))
  return {'model': run.name, 'inputs': inputs.description, 'epsilons': list(options.epsilons),
          'domains': names, 'sequences': [len(parts[name]) for name in names],
          'missing': inputs.description['missing'],
          'sink_1': [[float(100 * (parts[name] > epsilon).mean(dtype=np.float64))
                      for name in names] for epsilon in options.epsilons]}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws bars of Sink_1 in percent by domain, one per model, and a panel per epsilon (PNG)."""
  names = list(dict.fromkeys(name for result in results for name in result['domains']))
  epsilons = results[0]['epsilons']
  figure, axes = plots.canvas(min(15.0, max(5.5, 2 + 0.3 * len(names) * (1 + len(results)))),
                              0.9 + 2.4 * len(epsilons), len(epsilons))
  width = 0.8 / len(results)
  for e, ax in enumerate(axes[:, 0]):
    for i, result in enumerate(results):
      centres = [names.index(name) + width * (i - (len(results) - 1) / 2)
                 for name in result['domains']]
      ax.bar(centres, result['sink_1'][e], 0.92 * width,
             color=plots.COLOURS[i % len(plots.COLOURS)], label=model_name(result))
    ax.set_ylim(0, 104)
    ax.grid(alpha=0.25, axis='y')
    plots.label(ax, f'ε = {epsilons[e]:g}', '', f'{plots.SINK_1} (% of heads)')
    last = e == len(epsilons) - 1
    ax.set_xticks(range(len(names)), labels=names if last else [], fontsize=9)
    if last and len(names) > 4:
      ax.tick_params(axis='x', rotation=60)
  # Twelve names fit beside one panel, and a column of the legend runs beside all of them.
  axes[0, 0].legend(fontsize=9, frameon=False, loc='upper left', bbox_to_anchor=(1, 1),
                    ncols=-(-len(results) // (_NAMES * len(epsilons))))
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates Sink_1 in percent with a row per domain, then the domains that are missing."""
  table = [['Sink_1 in %', 'model', 'sequences', *(f'ε={e:g}' for e in results[0]['epsilons'])]]
  for result in results:
    for d, name in enumerate(result['domains']):
      table.append([name, model_name(result), str(result['sequences'][d]),
                    *(f'{rates[d]:.2f}' for rates in result['sink_1'])])
    table += [[name, model_name(result), 'missing', *('-' for _ in result['epsilons'])]
              for name in result['missing']]
  return table


def _key(name: str) -> str:
  """The letters and digits of a domain's name: corpora write 'Pile-CC' as 'pile_cc'."""
  return ''.join(filter(str.isalnum, name)).casefold()
