"""Pages in Markdown, with pictures, made from the tables of runs: the paper's results, or any runs side by side."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from sink_jax.evaluate.plots import HeadMaps, head_maps
from sink_jax.io.paths import AnyPath
from sink_jax.io.terminal import Markdown, escaped, short
from sink_jax.pretrained.load import load_run
from sink_jax.report import claims, compare, figures, paper
from sink_jax.report.model_page import model_page, to_html
from sink_jax.report.runs import EMERGED, Runs, table
from sink_jax.train.checkpoint import CheckpointError

REMEDIES = {'text': 'Text', 'bigram': 'Bigram-Backcopy', 'trigger': 'Trigger averaging'}
HEADLINE = {'default': 'softmax', 'sigmoid-normalized': 'normalised sigmoid', 'sigmoid': 'sigmoid',
            'k-bias': 'softmax with a K bias'}
OLD_FORMULA = ('value-gate', 'head-norm', 'pseudo-mask')  # trained before their formulas were mended
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / 'templates'), trim_blocks=True, lstrip_blocks=True,
    keep_trailing_newline=True, undefined=jinja2.StrictUndefined, finalize=lambda value: '' if value is None else value)


class Page(NamedTuple):
  """Files that were written, and what the first screen says."""

  files: list[Path]
  summary: list[str]


def write(runs: Runs, out: Path, root: AnyPath | None = None, analyses: Sequence[Path] = (),
          evaluation: Path | None = None, maps: bool = True) -> Page:
  """Writes the results pages where a run is of the paper's tasks, else a page that compares the runs.

  Args:
    root: the folder below which the runs' own folders lie, for maps of their checkpoints.
    analyses: files that `python -m sink_jax analyses` wrote. evaluation: a folder of `evaluate`.
    maps: whether the page of runs has attention maps.
  """
  out.mkdir(parents=True, exist_ok=True)
  if set(runs.runs.task) & {'paper', 'synthetic', 'graft', 'sft', *REMEDIES} or runs.runs.empty and not evaluation:
    return _results(runs, out, analyses)
  return _side_by_side(runs, out, root if maps else None, evaluation)


def spread(values: Sequence[float] | pd.Series, digits: int = 1) -> str:
  """'27.0 (23.5 to 33.9), n = 5': the mean, the least and the largest of what is known; '-' for nothing."""
  known = [value for value in values if not math.isnan(value)]
  if not known or all(map(math.isinf, known)):
    return '-'
  if any(map(math.isinf, known)):  # steps of emergence, where some seeds have none
    some = [value for value in known if math.isfinite(value)]
    return f'{np.mean(some):,.{digits}f} in {len(some)} of {len(known)} seeds'
  mean = f'{np.mean(known):,.{digits}f}'
  return mean + (f' ({min(known):,.{digits}f} to {max(known):,.{digits}f}), n = {len(known)}' if len(known) > 1 else ', n = 1')


def agreement(pairs: pd.DataFrame) -> dict[str, Any]:
  """Rank correlation of the paper's Sink_1 and ours over trials, and how many lie on the same side of 10 %."""
  good = pairs[~pairs.crossed]
  rank = spearmanr(good.paper, good.ours).statistic if len(good) > 2 else math.nan
  return {'trials': len(good), 'rank': float(rank), 'same': int(((good.paper >= EMERGED) == (good.ours >= EMERGED)).sum())}


def _write(path: Path, template: str, **context: Any) -> Path:
  text = _TEMPLATES.get_template(template).render(context)
  path.write_text(re.sub(r'\n{3,}', '\n\n', text).strip() + '\n')
  return path


def _draw(out: Path, name: str, figure: Any) -> str:
  figures.save(figure, out / name)
  return name


# --- the paper's results ---

def _results(runs: Runs, out: Path, analyses: Sequence[Path]) -> Page:
  full = table(runs)
  of_paper = full[full.task == 'paper']
  # One budget and protocol: that with most runs.
  groups = of_paper[of_paper.status != 'not expressible'].groupby(['budget', 'protocol'], dropna=False).size()
  budget, protocol = groups.idxmax() if len(groups) else ('', '')
  shown = of_paper[of_paper.budget.eq(budget) & of_paper.protocol.eq(protocol)]
  beside = paper.beside(shown)
  pairs = _pairs(beside, shown)
  judged = [(claim, claims.judge(claim, shown)) for claim in claims.read()]
  context = {'claims': judged, 'verdicts': claims.VERDICTS, 'budget': budget, 'agreement': agreement(pairs), 'shown': shown, 'full': full,
             'beside': beside, 'spread': spread, 'cell': escaped, 'short': short, 'paper': paper, 'pictures': {}}
  pictures: dict[str, str] = context['pictures']
  if len(known := shown[shown.sink_1.notna()]):
    trials = {trial: name for trial, name in HEADLINE.items() if trial in set(known.trial)} or {known.trial.iloc[0]: known.trial.iloc[0]}
    pictures['dynamics'] = _draw(out, 'dynamics.png', figures.panels(
        runs, shown, trials, 'A sink emerges; a K bias takes it'))
  if len(pairs):
    agreed = context['agreement']
    pictures['scatter'] = _draw(out, 'scatter.png', figures.scatter(
        pairs, f'{agreed["same"]} of {agreed["trials"]} trials lie on the same side of {EMERGED} %\n'
        f'(rank correlation {agreed["rank"]:.2f})', EMERGED))
  for figure in paper.figures().itertuples():
    if drawn := _figure(figure, runs, shown, full):
      pictures[figure.key] = _draw(out, f'{figure.key}.png', drawn)
  pictures |= {f'analysis {path.stem}': os.path.relpath(path.with_suffix('.png'), out)
               for path in analyses if path.with_suffix('.png').exists()}
  tasks = _remedies(full, out)
  grafts = full[full.task.eq('graft')]
  if len(grafts):
    pictures['grafts'] = _draw(out, 'grafts.png', figures.curves(
        runs, grafts, {t: t for t in sorted(set(grafts.trial)) if not t.startswith('desk-')}, ['sink_1'],
        title='Sink_1 after a graft onto the trained default'))
  context |= {'sentences': _three(context), 'tasks': tasks, 'grafts': compare.against(grafts, 'continued'), 'compare': compare,
              'tuning': _tuning(full), 'made': _made(full), 'analyses': [os.path.relpath(path, out) for path in analyses],
              'not_said': full.valid[full.valid != ''].value_counts()}
  files = [_write(out / 'README.md', 'results.md', **context)]
  if tasks:
    files.append(_write(out / 'remedies.md', 'remedies.md', tasks=tasks, compare=compare, cell=escaped, old=OLD_FORMULA,
                        full=full))
  drawn = {name for name in pictures.values() if '/' not in name} | {task['picture'] for task in tasks}
  return Page([*files, *(out / name for name in sorted(drawn))], context['sentences'])


def _pairs(beside: pd.DataFrame, shown: pd.DataFrame) -> pd.DataFrame:
  """The paper's Sink_1 and ours by trial; crossed: none of its runs is valid, and ours is of the invalid ones."""
  rates = beside[beside.metric.eq('sink_1') & beside.paper.notna()].drop_duplicates('trial')
  every = shown.groupby('trial').sink_1.mean()
  pairs = rates.assign(ours=rates['mean'].fillna(rates.trial.map(every)), crossed=rates['mean'].isna())
  return pairs.loc[pairs.ours.notna(), ['trial', 'paper', 'ours', 'crossed']]


def _figure(figure: Any, runs: Runs, shown: pd.DataFrame, full: pd.DataFrame) -> Any:
  """The picture of a figure of the paper from training runs; None without any."""
  ours = [trial for trial in figure.trials if len(shown[shown.trial.eq(trial) & shown.sink_1.notna()])]
  names = {trial: trial for trial in ours}
  if figure.kind == 'mask':
    return figures.masks() if figure.number == '5' else None
  if figure.kind == 'fine-tuning' and len(tuned := full[full.task == 'sft']):
    tuned = tuned[tuned.protocol == tuned.protocol.mode()[0]]
    return figures.curves(runs, tuned, {t: t for t in sorted(set(tuned.trial))}, ['train_loss', 'grad_norm'],
                          title='Fine-tuning (Figure 30)')
  title = f'Figure {figure.number} {figure.half}'.strip()
  if not ours:
    return None
  if figure.kind in ('dynamics', 'learning rates'):
    return figures.curves(runs, shown, names, ['train_loss', *['valid_loss'] * (figure.kind == 'dynamics'), 'sink_1'], title=title)
  if figure.kind == 'ratios':
    return figures.curves(runs, shown, names, ['hidden_ratio'], 'block', title)
  if figure.kind == 'sweep':
    x = 'window' if figure.number == '6' else 'unique_tokens'
    return figures.sweep(shown, ours, x, ['sink_1', 'valid_loss'])
  if figure.kind == 'window map':
    return figures.sweep(shown, ours, 'window', ['window_absolute', 'window_relative'])
  return None


def _remedies(full: pd.DataFrame, out: Path) -> list[dict[str, Any]]:
  """What each task's page shows: the comparison with softmax, its picture and its sentence."""
  tasks = []
  for key, title in REMEDIES.items():
    of = full[full.task.eq(key)]
    of = of.assign(trial=of.trial.str.replace(rf'^({key}|desk)-', '', regex=True).replace('default', 'softmax'))
    rows = compare.against(of, 'softmax')
    if rows.empty:
      continue
    sinks = rows[rows.metric == 'sink_1']
    by = {verdict: sorted(names) for verdict, names in sinks.groupby('verdict').trial}
    measures = {metric: (compare.MEASURES[metric].heading, compare.MEASURES[metric].ratio) for metric in ('sink_1', 'valid_loss')}
    acts = sum(len(by.get(verdict, ())) for verdict in ('removed', 'moved to the extra key', 'lower'))
    tasks.append({'key': key, 'title': title, 'rows': rows, 'by': by, 'seeds': of[of.trial == 'softmax'].seed.nunique(),
                  'softmax': of[of.trial.eq('softmax') & of.valid.eq('')], 'heads': of.heads.min(), 'count': len(sinks), 'acts': acts,
                  'picture': _draw(out, f'remedies-{key}.png', figures.forest(
                      rows, f'{title}: {acts} of {len(sinks)} remedies lower Sink_1\n(difference from softmax by seed, 99 %)', measures))})
  return tasks


def _tuning(full: pd.DataFrame) -> pd.DataFrame:
  """Sigmoid without normalisation against softmax in fine-tuning, by protocol."""
  tuned = full[full.task == 'sft']
  measures = {'train_loss': compare.Measure('training loss, nats', 0.02), 'sink_1': compare.MEASURES['sink_1']}
  found = [compare.against(of, 'sft-softmax', measures).assign(protocol=protocol) for protocol, of in tuned.groupby('protocol')]
  return pd.concat(found) if found else pd.DataFrame()


def _three(context: Mapping[str, Any]) -> list[str]:
  """What was run, what reproduces, and what cannot be said."""
  shown, full, agreed = context['shown'], context['full'], context['agreement']
  begun = full[~full.status.isin(['not run', 'not expressible'])]
  if begun.empty:
    return ['Nothing was run yet: the tables below have the numbers of the paper only.', '', '']
  mine = shown[shown.status.eq('done')]
  ran = f'{len(begun)} runs' + (f', {len(mine)} of them of {mine.trial.nunique()} experiments of the paper at the budget '
                                f'"{context["budget"]}" ({short(mine.tokens.median())} tokens, {mine.heads.median():.0f} heads, '
                                f'{mine.groupby("trial").seed.nunique().min()} to {mine.groupby("trial").seed.nunique().max()} seeds each'
                                f'; the paper: {paper.SIZE})' if len(mine) else '')
  count = pd.Series([verdict.verdict for _, verdict in context['claims']]).value_counts()
  head = pd.Series([verdict.verdict for claim, verdict in context['claims'] if claim.headline]).value_counts()
  of = {key: int(count.get(key, 0)) for key in claims.VERDICTS}
  rates = [f'{shown.sink_1[shown.trial.eq(trial) & shown.valid.eq("")].mean():.0f} % with {name}' for trial, name in HEADLINE.items()
           if len(shown[shown.trial.eq(trial) & shown.valid.eq('') & shown.sink_1.notna()])]
  reproduced = (f'{of[claims.REPRODUCED]} of {sum(of.values())} claims ({head.get(claims.REPRODUCED, 0)} of the {head.sum()} below), '
                f'and {of[claims.NOT_REPRODUCED]} do not')
  if rates:
    reproduced += f'; Sink_1 is {", ".join(rates)}'
  if agreed['trials']:
    reproduced += (f'; {agreed["same"]} of {agreed["trials"]} experiments lie on the same side of {EMERGED} % as in the paper '
                   f'(rank correlation {agreed["rank"]:.2f})')
  bad, stored = begun.valid[begun.valid != ''].value_counts(), int((~begun.known.astype(bool)).sum())
  unsaid = (f'{of[claims.OPEN]} claims are open with these seeds, and {of[claims.NOT_TESTABLE]} are not testable here. '
            f'{int(bad.sum())} runs are no evidence and crossed out in every picture' +
            (f' ({", ".join(f"{n} {why}" for why, n in bad.items())})' if len(bad) else '') +
            (f'; of {stored} runs no entropy was stored, so that more may be' if stored else ''))
  return [f'**What was run:** {ran}.', f'**What reproduces:** {reproduced}.', f'**What cannot be said:** {unsaid}.']


def _made(full: pd.DataFrame) -> pd.DataFrame:
  """How the runs were made, a row for each task and code: number, dates, hardware, one command."""
  keys = ['task', 'code', 'hardware']
  return full[full.code.notna()].groupby(keys, dropna=False).agg(
      runs=('run', 'size'), first=('date', 'min'), last=('date', 'max'), command=('command', 'first')).reset_index()


# --- any runs side by side ---

def _side_by_side(runs: Runs, out: Path, root: AnyPath | None, evaluation: Path | None) -> Page:
  full = table(runs)
  full = full.assign(trial=full.trial.replace('', None).fillna(full.run.str.replace(r'-seed-\d+$', '', regex=True)))
  runs = runs._replace(metrics=runs.metrics.drop(columns='trial').merge(full[['run', 'trial']], on='run'))
  groups, words = [], []
  for i, (content, of) in enumerate(full.groupby(full.content.fillna(''), sort=False)):
    key, names = f'{i + 1}', {trial: trial for trial in dict.fromkeys(of.trial)}
    begun = of[of.sink_1.notna() | of.valid_loss.notna()]
    pictures = []
    if len(begun):
      pictures.append((_draw(out, f'curves-{key}.png', figures.curves(
          runs, of, names, ['sink_1', 'valid_loss', 'train_loss', 'value_ratio'])),
          'Thin lines are seeds, thick lines their means; dotted lines are Sink_* of an extra key; grey dashed lines that end in a cross '
          'are of runs that are no evidence.'))
    drawn, missing = _maps(of, root) if root else ({}, [])
    if drawn:
      pictures.append((_draw(out, f'attention-{key}.png', figures.attention_maps(drawn)),
                       'The head of each trial (its first seed) with the most attention to the first token, mean of the probe sequences; '
                       'the column * is the extra key.'))
    found = [(trial, finding(of[of.trial == trial])) for trial in names]
    settings = [json.loads(text) if isinstance(text, str) else {} for text in of.settings]
    shared = {k: v for k, v in (settings[0] if settings else {}).items() if all(s.get(k) == v for s in settings)} | {}
    different = {trial: {k: v for k, v in s.items() if k not in shared and k != 'seed'} for trial, s in zip(of.trial, settings)}
    groups.append({'title': next((s for s in of.source if isinstance(s, str)), 'unknown data'), 'table': of, 'pictures': pictures,
                   'findings': found, 'notes': missing, 'shared': shared, 'different': different})
    sinks = [trial for trial, _ in found if len(v := of[of.trial.eq(trial) & of.valid.eq('')]) and (v.sink_1 >= EMERGED).all()]
    words.append(f'{groups[-1]["title"]}: a sink stands on the first token in every seed of {len(sinks)} of {len(found)} trials'
                 + (f' ({", ".join(sinks)}).' if sinks else '.'))
  if full.empty:
    words = ['There are no runs yet.']
  text = _write(out / 'report.md', 'runs.md', groups=groups, words=words, spread=spread, cell=escaped, short=short, full=full,
                model=Markdown(model_page(evaluation)) if evaluation else '', emerged=EMERGED)
  for name in re.findall(r'\]\(([\w.-]+\.png)\)', text.read_text()):
    if evaluation and (evaluation / name).exists():
      (out / name).write_bytes((evaluation / name).read_bytes())
  (out / 'index.html').write_text(to_html(text.read_text(), out))
  return Page([out / 'index.html', text, *(out / name for group in groups for name, _ in group['pictures'])], words)


def finding(of: pd.DataFrame) -> str:
  """What the runs of one trial say, with n."""
  good, bad = of[of.valid.eq('') & of.sink_1.notna()], of.valid[of.valid != ''].value_counts()
  left = '; '.join(f'{n} of {len(of)} runs {why}' for why, n in bad.items())
  if good.empty:
    return f'Nothing can be said: {left or "not probed"}.'
  n, sinks = len(good), good[good.sink_1 >= EMERGED]
  star, proxy = good.sink_star.dropna(), bool(good.proxy.any())
  words = f'A sink in {len(sinks)} of {n} seeds: Sink_1{"*" * proxy} {spread(good.sink_1)} %'
  if len(sinks) and np.isfinite(steps := sinks.emergence_step).any():
    words += f', at {EMERGED} % or more from step {spread(steps[np.isfinite(steps)], 0)}'
  parts = [words + '.']
  if len(sinks):
    parts.append(f'The value of the first token is {sinks.value_ratio.mean():.2f} times as long as those of the others.')
  if proxy and good.raw_row_mass.notna().any():
    parts.append(f'The weights give the first token {good.raw_mass_1.mean():.3f} of {good.raw_row_mass.mean():.3f} in a row.')
  if len(star):
    parts.append(f'The extra key has Sink_* {spread(star)} %.')
  parts.append(f'Validation loss {spread(good.valid_loss, 3)}.' if good.valid_loss.notna().any() else '')
  return ' '.join(filter(None, parts + [f'Left out: {left}.' if left else '']))


def _maps(of: pd.DataFrame, root: AnyPath) -> tuple[dict[str, tuple[HeadMaps, bool]], list[str]]:
  """Maps of the first run of each trial, and a line about each that has no checkpoint to load."""
  maps, missing = {}, []
  for trial, runs in of.groupby('trial', sort=False):
    first = runs.sort_values(['valid', 'seed']).iloc[0]
    try:
      run = load_run(root / first.run)
      if run.probe_tokens is None:
        raise ValueError('it has no probe_tokens.npy')
      maps[f'{trial}, seed {first.seed:.0f}'] = head_maps(run, run.probe_tokens), not math.isnan(first.sink_star)
    # A run may have no checkpoint yet, or none any more.
    except (ValueError, OSError, CheckpointError) as error:
      missing.append(f'No attention map of {first.run}: {" ".join(str(error).split())}')
  return maps, missing
