"""The page of the search for a baseline: what was tried, what it met, and how the runs went."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.evaluate import plots
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.paper.baseline import CRITERIA, DESK, Found, find, hidden_ratio, met_by_setting
from sink_jax.paper.report import without_paths
from sink_jax.report.images import png
from sink_jax.report.jsontext import finite, rounded, to_json
from sink_jax.report.parts import Parts
from sink_jax.report.records import RunRecord

TITLE = 'The search for a baseline'
_HEAD = ('run', 'seed', 'steps', 'training', 'valid loss', 'Sink_1 %', 'Sink_* %',
         'raw mass on token 1', 'value ratio', 'hidden ratio', 'max / median', 'meets')


def baseline_report(runs: Sequence[RunRecord], out: str | AnyPath) -> str:
  """Writes index.html, report.md, report.json and curves.png, and returns the text.

  Raises:
    ValueError: there is no run of the search among the runs.
    OSError: `out` cannot be written.
  """
  found = find(runs)
  lines = summary(found)
  picture = _curves([it for it in found if it.kind == 'softmax' and it.run.probe])
  page = Parts(TITLE)
  counts = met_by_setting(found)
  rows = [[criterion.words, str(len(of)), str(sum(seeds > 0 for seeds, _ in of))]
          for criterion in CRITERIA
          for of in [[met[criterion.key] for met in counts.values() if criterion.key in met]]]
  page.paragraph(f'{sum(row[2] != "0" for row in rows)} of {len(rows)} criteria are met by a '
                 f'setting; {len(found)} runs of {len(counts)} settings are there.')
  page.table(['wanted', 'settings run', 'settings that meet it'], rows)
  page.items(lines)
  page.picture('curves.png', picture, _CAPTION)
  page.table(_HEAD, [_row(it) for it in found])
  record = rounded(finite({'criteria': {it.key: it.words for it in CRITERIA}, 'summary': lines,
                           'runs': [without_paths(it.as_dict()) for it in found]}))
  page.write(to_path(out), to_json(record))
  return '\n'.join(lines)


def summary(found: Sequence[Found]) -> list[str]:
  """What was found, in sentences: of each criterion, and of each setting."""
  counts = met_by_setting(found)
  lines = []
  for criterion in CRITERIA:
    of = {name: met[criterion.key] for name, met in counts.items() if criterion.key in met}
    yes = [f'{name} ({seeds} of {n} seeds)' if n > 1 else name
           for name, (seeds, n) in of.items() if seeds]
    no = [f'{name} (0 of {n} seeds)' for name, (seeds, n) in of.items() if n > 1 and not seeds]
    words = (f'met by {", ".join(yes)}' if yes else 'met by none within this budget') if of else (
        'not run')
    words += f', not by {", ".join(no)}' if no else ''
    # The budget has the setting that was chosen: its seeds are another look at one of them.
    tried = len(set(of) - {DESK})
    lines.append(f'({criterion.key}) {criterion.words}: {words}; {tried} '
                 f'setting{"s were" if tried != 1 else " was"} tried.')
  searched = [it for it in found if it.setting != DESK]
  seconds = sum(it.seconds or 0 for it in searched)
  lines.append(f'The {len(searched)} runs of the search trained for '
               f'{seconds / 60:.0f} process-minutes, start-ups aside.')
  left = [f'{it.setting}-{it.kind}, seed {it.seed} ({it.run.status} at step {it.run.step:,})'
          for it in found if it.run.status != 'done']
  lines += [f'Not at their last step: {"; ".join(left)}.'] if left else []
  return lines


def _row(it: Found) -> list[str]:
  probe = it.run.probe
  number = lambda value, form='.2f': '-' if value is None else format(value, form)
  row = [f'{it.setting}-{it.kind}', str(it.seed), f'{it.run.step:,}',
         '-' if it.seconds is None else f'{it.seconds:.0f} s',
         number((it.run.losses or {}).get('valid'), '.3f')]
  if probe is None:
    return [*row, *['-'] * 6, it.run.status]
  largest = max((block.max_over_median or 0 for block in probe.activations), default=None)
  met = it.met
  verdict = ', '.join(f'({key})' if yes else f'not ({key})' for key, yes in met.items())
  return [*row, number(probe.sink_1, '.1f'), number(probe.sink_extra_key, '.1f'),
          number(probe.raw_mass_1, '.3f'), number(probe.value_ratio), number(hidden_ratio(probe)),
          number(largest, '.0f'), verdict or it.run.status]


_CAPTION = ('Sink_1 and the largest hidden norm ratio of the softmax runs while they trained; a '
            'line for each setting, thinner for further seeds.')


def _curves(found: Sequence[Found]) -> bytes:
  figure, axes = plots.canvas(12, 4.2, 1, 2)
  names = list(dict.fromkeys(it.setting for it in found))
  for ax, key in ((axes[0, 0], 'sink_1'), (axes[0, 1], 'hidden_ratio')):
    seen = set()
    for it in found:
      assert it.run.probe is not None, 'only probed runs are drawn'
      curves = it.run.probe.curves
      i = names.index(it.setting)
      style = ('-', '--', ':')[i // len(plots.COLOURS) % 3]
      values = [float('nan') if value is None else value for value in getattr(curves, key)]
      ax.plot(curves.step, values, style, color=plots.COLOURS[i % len(plots.COLOURS)],
              linewidth=0.8 if it.setting in seen else 1.8,
              label=None if it.setting in seen else it.setting)
      seen.add(it.setting)
    ax.grid(alpha=0.25)
  plots.label(axes[0, 0], 'A sink on the first token', 'step', f'{plots.SINK_1} (% of heads)')
  plots.label(axes[0, 1], 'Massive activations', 'step', 'largest hidden norm ratio of a block')
  axes[0, 1].legend(fontsize=8, frameon=False, loc='upper left', bbox_to_anchor=(1, 1))
  return png(figure)
