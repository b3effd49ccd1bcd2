"""Pages with pictures, made from tables of runs: the paper's results, or any runs side by side."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sink_jax.evaluate.plots import HeadMaps, head_maps, save
from sink_jax.io.paths import AnyPath, inside
from sink_jax.io.terminal import code, escaped, short
from sink_jax.report import claims, compare, events, figures, paper, sections
from sink_jax.report.model_page import model_page, to_html
from sink_jax.report.runs import EMERGED, Runs, table
from sink_jax.report.sections import HEADLINE
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.load import load_run

REMEDIES = {'lm': 'Text', 'bigram': 'Bigram-Backcopy', 'trigger': 'Trigger averaging'}
_COURSE = {
  'sink_1': 1,
  'sink_star': 1,
  'valid_loss': 3,
  'max_over_median': 0,
  'value_ratio': 2,
}  # digits
_TUNING = {'train_loss': compare.Measure('training loss, nats', 0.02)}
Page = tuple[list[AnyPath], list[str]]  # files that were written, and the first sentences


def write(
  runs: Runs,
  out: AnyPath,
  root: AnyPath | None = None,
  analyses: Sequence[AnyPath] = (),
  evaluation: AnyPath | None = None,
) -> Page:
  """Writes the results pages if a run has a task of the paper, else a page that compares the runs.

  Args:
    root: the folder of the runs' workdirs, whose checkpoints give the maps; None draws none.
    analyses: files that `python -m sink_jax analyses` wrote.
    evaluation: a folder that `evaluate` wrote.
  """
  out.mkdir(parents=True, exist_ok=True)
  of_paper = set(runs.runs.task) & {'paper', 'synthetic', 'graft', 'sft', *REMEDIES}
  if of_paper or analyses or runs.runs.empty and not evaluation:
    if evaluation:
      raise ValueError(
        f'--evaluation={evaluation} begins a page of runs: leave it out with results and analyses.'
      )
    return _results(runs, out, analyses)
  return _side_by_side(runs, out, root, evaluation)


def spread(values: Sequence[float] | pd.Series, digits: int = 1, count: bool = True) -> str:
  """'27.0 (23.5 to 33.9), n = 5': the mean, least and largest of what is known; '-' for nothing."""
  known = [value for value in values if not math.isnan(value)]
  finite = [value for value in known if not math.isinf(value)]
  if not finite:
    return '-'
  form = f',.{digits}f'
  words = f'{np.mean(finite):{form}}'
  if len(finite) > 1:
    words += f' ({min(finite):{form}} to {max(finite):{form}})'
  if len(finite) < len(known):  # a step of emergence is infinite if no sink emerges
    return f'{words} in {len(finite)} of {len(known)} seeds'
  return words + f', n = {len(finite)}' * count


def finding(runs: pd.DataFrame) -> str:
  """Sentences about the runs of one trial, with n. runs: rows of `runs.table`."""
  good, bad = runs[runs.valid.eq('') & runs.sink_1.notna()], Counter(runs.valid[runs.valid != ''])
  left = ', '.join(f'{n} of {len(runs)} runs {why}' for why, n in bad.items())
  if good.empty:
    return f'Nothing can be said of a sink: {left or "not probed"}.'
  sinks, proxy, star = good[good.sink_1 >= EMERGED], bool(good.proxy.any()), good.sink_star.dropna()
  words = [
    f'A sink in {len(sinks)} of {len(good)} seeds: Sink_1{"*" * proxy} {spread(good.sink_1)} (in %)'
  ]
  if np.isfinite(steps := sinks.emergence_step).any():
    words[0] += (
      f', at {EMERGED} % or more from step {spread(steps[np.isfinite(steps)], 0, False)} on'
    )
  if len(star):
    words.append(f'The extra key has Sink_* {spread(star)} (in %)')
  if len(sinks):
    words.append(
      f'The first value is {sinks.value_ratio.mean():.2f} times as long as those of the others'
    )
  if proxy and good.raw_row_mass.notna().any():
    words.append(
      f'The weights give the first token {good.raw_mass_1.mean():.3f} of the '
      f'{good.raw_row_mass.mean():.3f} in a row'
    )
  if left:
    words.append(f'Left out: {left}')
  return '. '.join(words) + '.'


def render(path: AnyPath, template: str, **context: Any) -> AnyPath:
  templates = jinja2.Environment(
    loader=jinja2.PackageLoader('sink_jax.report'),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  names = {
    'cell': escaped,
    'code': code,
    'short': short,
    'spread': spread,
    'compare': compare,
    'paper': paper,
    'metric_name': claims.metric_name,
    'EMERGED': EMERGED,
    'quoted': functools.partial(json.dumps, ensure_ascii=False),
  }
  text = templates.get_template(template).render(names | context)
  path.write_text(re.sub(r'\n\s*\n+', '\n\n', text).strip() + '\n')
  return path


def _results(runs: Runs, out: AnyPath, analyses: Sequence[AnyPath]) -> Page:
  full = table(runs)
  # A run that was trained with other settings than most runs of its trial is not a seed of it.
  same = (
    full.settings.fillna('')
    .astype(str)
    .str.replace(r'"seed": \d+, |(, )?"seed": \d+|(?<=seed-)\d+', '', regex=True)
  )
  usual = same.groupby([full[key] for key in ('task', 'trial', 'budget', 'protocol')]).transform(
    lambda of: of.value_counts().index[0]
  )
  full['valid'] = full.valid.mask(full.valid.eq('') & same.ne(usual), 'of other settings')
  begun = full[~full.status.isin(['not run', 'not expressible'])]
  # The pages show one budget and protocol, which most runs have.
  every = full[full.task.eq('paper') & full.status.ne('not expressible')]
  counts = every[['budget', 'protocol']].value_counts()
  budget, protocol = counts.index[0] if len(counts) else ('', '')
  shown = full[full.task.eq('paper') & full.budget.eq(budget) & full.protocol.eq(protocol)]
  judged = [
    (claim, claims.judge(claim, pd.concat([shown, paper.open_models(analyses)])))
    for claim in claims.CLAIMS
  ]
  beside, good = paper.beside(shown), shown[shown.valid.eq('') & shown.sink_1.notna()]
  # A budget may make two trials the same experiment, such as fixed-1 and default: one of them is
  # counted.
  first = shown.assign(same=same).drop_duplicates('trial')
  different = first.trial[first.same.eq('') | ~first.same.duplicated()]
  dots, rank, alike = paper.agreement(beside[beside.trial.isin(different)])
  grafts = full[full.task.eq('graft')]
  tuned = full[full.task == 'sft']
  compared = full[full.budget.isin([budget, ''])] if budget else full
  tasks = [task for key in REMEDIES if (task := _remedies(key, compared))]

  drawn = {f'remedies-{task["key"]}': task['picture'] for task in tasks}
  probed = set(shown.trial[shown.sink_1.notna()])
  if trials := [trial for trial in HEADLINE if trial in probed]:
    rates = good.groupby('trial').sink_1.mean()
    sinks = ' and '.join(HEADLINE[trial] for trial in trials if rates.get(trial, 0) >= EMERGED)
    title = f'Mean Sink_1 of {EMERGED} % or more: {sinks or "in none"}'
    drawn['dynamics'] = figures.curves(runs, shown, trials, ['sink_1'], title=title)
  if len(timed := events.events(runs, shown)):
    drawn['events'] = figures.events(timed)
  if len(dots) > 2:  # fewer show no agreement
    bad = beside[
      beside.metric.eq('sink_1') & beside.value.notna() & beside.n.eq(0) & beside.invalid.gt(0)
    ]
    bad = bad.assign(crossed=True, mean=bad.trial.map(shown.groupby('trial').sink_1.mean()))
    title = f'{alike} of {len(dots)} experiments lie on the same side of {EMERGED} %'
    title += f'\n(rank correlation {rank:.2f})' * (rank == rank)
    drawn['scatter'] = figures.scatter(pd.concat([dots.assign(crossed=False), bad]), title)
  courses = _courses(runs, grafts)
  if len(grafts):
    trials = sorted(set(grafts.trial))[: len(figures.LINES)]  # one colour each; the table has all
    ends = sorted(
      (float(of['sink_1'].split()[-1]), trial)
      for trial, of in courses.items()
      if trial in trials and 'sink_1' in of
    )
    words = ' to '.join(
      f'{rate:.0f} % ({trial})' for rate, trial in dict.fromkeys(ends[:1] + ends[-1:])
    )
    drawn['grafts'] = figures.curves(
      runs,
      grafts,
      trials,
      [metric for metric in _COURSE if metric != 'sink_star'],
      title=f'After training Sink_1 is {words}' if words else 'Sink_1 after a graft',
    )
  drawn |= {
    item['key']: found for item in paper.FIGURES if (found := _figure(item, runs, shown, tuned))
  }
  for key, picture in drawn.items():
    save(picture, out / f'{key}.png')

  pictures = {key: f'{key}.png' for key in drawn}
  rows = {path.stem: json.loads(path.read_text()).get('rows', ()) for path in analyses}
  models = {name: list(dict.fromkeys(row['model'] for row in of)) for name, of in rows.items()}
  files = [
    render(
      out / 'README.md',
      'results.md',
      shown=shown,
      first_screen=sections.first_screen(shown, judged, (dots, rank, alike), pictures),
      order_of_events=sections.order_of_events(timed, pictures),
      learning_rates=sections.learning_rates(full[full.task == 'grid']),
      others=begun[~begun.task.isin(['paper', 'graft', 'grid', 'sft', *REMEDIES])],
      claims=judged,
      stored=(out / 'metrics.csv.gz').exists(),
      beside=beside,
      pictures=pictures,
      tasks=tasks,
      courses=courses,
      grafted=compare.against(grafts, 'continued'),
      tuning={
        key: compare.against(of, 'sft-softmax', _TUNING) for key, of in tuned.groupby('protocol')
      },
      made=begun[begun.code.notna()]
      .assign(hours=begun.tokens / begun.tokens_per_second / 3600)
      .groupby(['task', 'budget', 'hardware'], dropna=False)
      .agg(
        runs=('run', 'size'),
        hours=('hours', 'sum'),
        first=('date', 'min'),
        last=('date', 'max'),
        code=('code', _commits),
        command=('command', lambda of: min(of.dropna(), key=len, default=None)),
      ),
    )
  ]
  summary = [
    line.replace('*', '').replace('\\', '')
    for line in re.findall(
      r'^\*\*(?:Run|Reproduced|Not reproduced|Open).*', files[0].read_text(), re.MULTILINE
    )
  ]
  if tasks:
    files.append(render(out / 'remedies.md', 'remedies.md', tasks=tasks))
  see = pictures | {
    item['key']: os.path.relpath(path.with_suffix('.png'), out)
    for path in analyses
    for item in paper.TABLES + paper.FIGURES
    if item.get('analysis') == path.stem
  }
  files.append(
    render(
      out / 'reproduction.md', 'reproduction.md', coverage=paper.coverage(full, models), see=see
    )
  )
  return [*files, *(out / name for name in pictures.values())], summary


def _commits(codes: pd.Series) -> str:
  """The commits that made runs, eight digits of each, with a plus where files were changed."""
  words = (
    re.sub(r'commit ([0-9a-f]{8})[0-9a-f]*(, clean)?', r'\1', code).replace('-dirty', '+')
    for code in codes.dropna()
  )
  return ', '.join(dict.fromkeys(words))


def _courses(runs: Runs, grafts: pd.DataFrame) -> dict[str, dict[str, str]]:
  """{trial: {metric: 'its first to its last value', and 'n'}} of valid runs, means over them."""
  known = runs.metrics.run.isin(grafts.run[grafts.valid == '']) & runs.metrics.block.isna()
  of: pd.DataFrame = runs.metrics[known]
  ends = of.sort_values('step').groupby(['trial', 'metric', 'run']).value.agg(['first', 'last'])
  means = ends.groupby(['trial', 'metric']).mean()
  return {
    trial: {'n': str(grafts[(grafts.trial == trial) & (grafts.valid == '')].seed.nunique())}
    | {
      metric: (
        f'{means.loc[trial, metric]["first"]:,.{digits}f} to '
        f'{means.loc[trial, metric]["last"]:,.{digits}f}'
      )
      for metric, digits in _COURSE.items()
      if (trial, metric) in means.index
    }
    for trial in sorted(set(of.trial))
  }


def _figure(
  figure: dict[str, Any], runs: Runs, shown: pd.DataFrame, tuned: pd.DataFrame
) -> Figure | None:
  """A figure of the paper, drawn from training runs; None without any."""
  probed, kind = set(shown.trial[shown.sink_1.notna()]), figure['kind']
  title, names = paper.name_of(figure), [trial for trial in figure['trials'] if trial in probed]
  what, column = ('largest ratio', 'hidden_ratio') if kind == 'ratios' else ('Sink_1', 'sink_1')
  good = shown[shown.valid.eq('') & shown.trial.isin(names)]
  means = pd.Series(good.groupby('trial')[column].mean()).sort_values()
  title += f'\n{what} ' * bool(len(means)) + ' to '.join(
    f'{means[trial]:.3g} ({trial})' for trial in dict.fromkeys(means.index[[0, -1][: len(means)]])
  )
  if kind == 'fine-tuning' and len(tuned):
    tuned = tuned[
      tuned.protocol == max(tuned.protocol)
    ]  # 'paper', not 'answers', where there are both
    return figures.curves(
      runs, tuned, sorted(set(tuned.trial)), ['train_loss', 'grad_norm'], title=title
    )
  if not names:
    return None
  if kind == 'prefix':
    return figures.positions(shown, names, title)
  if kind in ('dynamics', 'learning rates'):
    losses = ['train_loss', 'valid_loss'] if kind == 'dynamics' else ['train_loss']
    return figures.curves(runs, shown, names, [*losses, 'sink_1'], title=title)
  if kind == 'ratios':
    return figures.curves(
      runs, shown, names, ['hidden_ratio'], 'block', title, figure.get('dotted', '')
    )
  if kind == 'window map':
    return figures.sweep(
      shown, names, 'window', ['window_absolute', 'window_relative'], paper.name_of(figure)
    )
  if figure['number'] == '6':
    return figures.sweep(shown, names, 'window', ['sink_1', 'valid_loss'], title)
  return figures.sweep(shown, names, 'unique_tokens', ['sink_1', 'train_loss', 'valid_loss'], title)


def _remedies(key: str, full: pd.DataFrame) -> dict[str, Any] | None:
  """The content of the pages about remedies on one task; None without a comparison."""
  of = full[full.task.eq(key)]
  of = of.assign(trial=of.trial.str.replace(rf'^{key}-', '', regex=True))
  rows = compare.against(of, 'softmax')
  if rows.empty:
    return None
  verdicts = rows[rows.metric == 'sink_1'].groupby('verdict').trial.apply(sorted).to_dict()
  acts = sum(
    len(verdicts.get(verdict, ())) for verdict in ('removed', 'moved to the extra key', 'lower')
  )
  count, title = rows.trial.nunique(), REMEDIES[key]
  picture = figures.forest(
    rows,
    f'{title}: {acts} of {count} remedies lower Sink_1\n(difference from softmax by seed, 99 %)',
    {metric: compare.MEASURES[metric] for metric in ('sink_1', 'valid_loss')},
  )
  softmax = of[of.trial.eq('softmax') & of.valid.eq('')]
  return {
    'key': key,
    'title': title,
    'rows': rows,
    'verdicts': verdicts,
    'acts': acts,
    'count': count,
    'picture': picture,
    'heads': of.heads.min(),
    'softmax': softmax,
  }


def _side_by_side(
  runs: Runs, out: AnyPath, root: AnyPath | None, evaluation: AnyPath | None
) -> Page:
  full = table(runs)
  # A folder that is not named after its trial holds a changed trial, or a run without a trial: the
  # folder names it. Softmax comes first.
  folder = full.run.str.replace(r'-seed-\d+$', '', regex=True)
  full['trial'] = folder.where(folder.str.replace(r'.*/', '', regex=True) != full.trial, full.trial)
  full = full.assign(other=full.attention != 'softmax').sort_values(['other', 'trial', 'seed'])
  groups, files, words = [], [], []
  for i, (_, of) in enumerate(full.groupby(full.content.fillna(''), sort=False)):
    title = re.sub(r'\(.*?\)', '', next(filter(pd.notna, of.source), 'Unknown data'))
    title += f' (data {i + 1})' * any(title == group['title'] for group in groups)
    key, names, drawn = re.split(r'\W', title)[0].lower(), list(dict.fromkeys(of.trial)), {}
    key += f'-{i}' * (f'curves-{key}.png' in files)
    if of[['sink_1', 'valid_loss', 'train_loss']].notna().to_numpy().any():
      drawn[f'curves-{key}.png'] = figures.curves(
        runs, of, names, ['sink_1', 'valid_loss', 'train_loss', 'value_ratio']
      )
    maps, missing = _maps(of, root) if root else ({}, [])
    if maps:
      drawn[f'attention-{key}.png'] = figures.attention_maps(maps)
    settings = {
      trial: {(key, str(value)) for key, value in json.loads(text).items() if key != 'seed'}
      for trial, text in zip(of.trial, of.settings)
      if isinstance(text, str)
    }
    shared = set.intersection(*settings.values()) if settings else set()
    probed = of[of.valid.eq('') & of.sink_1.notna()].groupby('trial').sink_1.min()
    sinks = [trial for trial in names if probed.get(trial, -1) >= EMERGED]
    words.append(
      f'{title}: a sink stands on the first token in every valid seed of {len(sinks)} of '
      f'{len(names)} trials' + f' ({", ".join(sinks)})' * bool(sinks) + '.'
      if len(probed)
      else f'{title}: no valid run was probed, so that nothing can be said of a sink.'
    )
    if bad := of.valid.ne('').sum():
      words[-1] += f' {bad} of {len(of)} runs are invalid and crossed out.'
    groups.append(
      {
        'title': title,
        'table': of,
        'pictures': list(drawn),
        'notes': missing,
        'shared': sorted(shared),
        'different': {trial: sorted(of_trial - shared) for trial, of_trial in settings.items()},
        'findings': {trial: finding(of[of.trial == trial]) for trial in names},
      }
    )
    for name, picture in drawn.items():
      save(picture, out / name)
    files += drawn
  model = model_page(evaluation) if evaluation else ''
  for name in re.findall(r'\]\(([\w.-]+\.png)\)', model):
    (out / name).write_bytes(inside(evaluation or out, name).read_bytes())
  words = words or ['There are no runs yet.']
  text = render(out / 'report.md', 'runs.md', groups=groups, words=words, full=full, model=model)
  (out / 'index.html').write_text(to_html(text.read_text(), out))
  return [out / 'index.html', text, *(out / name for name in files)], words


def _maps(of: pd.DataFrame, root: AnyPath) -> tuple[dict[str, tuple[HeadMaps, bool]], list[str]]:
  """Maps of the first run of each trial, and a line about each that has no checkpoint to load."""
  maps, missing = {}, []
  for trial, runs in of.groupby('trial', sort=False):
    first = runs.sort_values(['valid', 'seed']).iloc[0]
    try:
      folder = inside(root, str(first.run))
      run = load_run(folder if folder.is_dir() else root)  # of one workdir
      if run.probe_tokens is None:
        raise ValueError('it has no probe_tokens.npy')
      maps[f'{trial}, seed {first.seed:.0f}'] = (
        head_maps(run, run.probe_tokens),
        pd.notna(first.sink_star),
      )
    except (ValueError, OSError, CheckpointError) as error:  # no checkpoint yet, or none any more
      missing.append(f'No attention map of {first.run}: {" ".join(str(error).split())}')
  return maps, missing
