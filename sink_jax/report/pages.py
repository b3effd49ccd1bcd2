"""Pages with pictures, made from tables of runs: the paper's results, or any runs side by side."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

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
from sink_jax.report.conditions import metric_name
from sink_jax.report.model_page import model_page, to_html
from sink_jax.report.paper_claims import CLAIMS
from sink_jax.report.runs import EMERGED, Runs, table
from sink_jax.report.sections import HEADLINE
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.load import load_run

REMEDIES = {'lm': 'Text', 'bigram': 'Bigram-Backcopy', 'trigger': 'Trigger averaging'}
_COURSE = {  # digits
  'sink_1': 1,
  'sink_star': 1,
  'valid_loss': 3,
  'max_over_median': 0,
  'value_ratio': 2,
}
_TUNING = {'train_loss': compare.Measure('training loss, nats', 0.02)}
Page = tuple[list[AnyPath], list[str]]  # files that were written, and the first sentences
Agreement = tuple[pd.DataFrame, float, int]  # of `paper.agreement`
# {trial: {metric: 'its first to its last value', and 'n'}} of valid runs, means over them.
Courses = dict[str, dict[str, str]]
Maps = dict[str, tuple[HeadMaps, bool]]  # as `figures.attention_maps` reads them


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
  good = _good(runs)
  bad = Counter(runs.valid[runs.valid != ''])
  left = ', '.join(f'{n} of {len(runs)} runs {why}' for why, n in bad.items())
  if good.empty:
    return f'Nothing can be said of a sink: {left or "not probed"}.'
  sinks, star = good[good.sink_1 >= EMERGED], good.sink_star.dropna()
  proxy = bool(good.proxy.any())
  rate = f'Sink_1{"*" * proxy} {spread(good.sink_1)} (in %)'
  words = [f'A sink in {len(sinks)} of {len(good)} seeds: {rate}']
  steps = sinks.emergence_step[np.isfinite(sinks.emergence_step)]
  if len(steps):
    words[0] += f', at {EMERGED} % or more from step {spread(steps, 0, False)} on'
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


def _good(runs: pd.DataFrame) -> pd.DataFrame:
  """Those runs that are valid and were probed."""
  return runs[runs.valid.eq('') & runs.sink_1.notna()]


def render(path: AnyPath, template: str, **context: Any) -> AnyPath:
  """Writes a template of this room, filled in, and returns its path."""
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
    'metric_name': metric_name,
    'EMERGED': EMERGED,
    'quoted': functools.partial(json.dumps, ensure_ascii=False),
  }
  text = templates.get_template(template).render(names | context)
  path.write_text(re.sub(r'\n\s*\n+', '\n\n', text).strip() + '\n')
  return path


def _results(runs: Runs, out: AnyPath, analyses: Sequence[AnyPath]) -> Page:
  """Writes the pages of the paper's trials, remedies, grafts and fine-tuning; see `write`."""
  full = table(runs)
  same = _settings_without_seeds(full)
  full['valid'] = _valid_with_usual_settings(full, same)
  begun = full[~full.status.isin(['not run', 'not expressible'])]
  of_task = lambda task: full[full.task == task]
  of_paper = of_task('paper')
  budget, protocol = _most_frequent(of_paper)
  shown = of_paper[of_paper.budget.eq(budget) & of_paper.protocol.eq(protocol)]
  measured = pd.concat([shown, paper.open_models(analyses)])
  judged = [(claim, claims.judge(claim, measured)) for claim in CLAIMS]
  beside = paper.beside(shown)
  different = _different(shown, same)
  agreement = paper.agreement(beside[beside.trial.isin(different)])
  grafts = of_task('graft')
  tuned = of_task('sft')
  courses = _courses(runs, grafts)
  compared = full[full.budget.isin([budget, ''])] if budget else full
  tasks = [task for key in REMEDIES if (task := _remedies(key, compared))]
  timed = events.events(runs, shown)

  drawn: dict[str, Figure | None] = {}
  for task in tasks:
    drawn[f'remedies-{task["key"]}'] = task['picture']
  drawn['dynamics'] = _dynamics(runs, shown)
  drawn['events'] = figures.events(timed) if len(timed) else None
  drawn['scatter'] = _scatter(shown, beside, agreement)
  drawn['grafts'] = _grafts(runs, grafts, courses)
  for item in paper.FIGURES:
    drawn[item['key']] = _figure(item, runs, shown, tuned)
  pictures = _saved(drawn, out)

  page = render(
    out / 'README.md',
    'results.md',
    shown=shown,
    first_screen=sections.first_screen(shown, judged, agreement, pictures),
    order_of_events=sections.order_of_events(timed, pictures),
    learning_rates=sections.learning_rates(of_task('grid')),
    others=begun[~begun.task.isin(['paper', 'graft', 'grid', 'sft', *REMEDIES])],
    claims=judged,
    stored=(out / 'metrics.csv.gz').exists(),
    beside=beside,
    pictures=pictures,
    tasks=tasks,
    courses=courses,
    grafted=compare.against(grafts, 'continued'),
    tuning={
      protocol: compare.against(of, 'sft-softmax', _TUNING)
      for protocol, of in tuned.groupby('protocol')
    },
    made=_made(begun),
  )
  files = [page]
  if tasks:
    files.append(render(out / 'remedies.md', 'remedies.md', tasks=tasks))
  files.append(_reproduction(full, out, analyses, pictures))
  return [*files, *(out / name for name in pictures.values())], _first_sentences(page)


def _saved(drawn: dict[str, Figure | None], out: AnyPath) -> dict[str, str]:
  """Saves the figures that there are; returns {key: name of the file}."""
  pictures = {}
  for key, figure in drawn.items():
    if figure is not None:
      pictures[key] = f'{key}.png'
      save(figure, out / pictures[key])
  return pictures


def _settings_without_seeds(full: pd.DataFrame) -> pd.Series:
  settings = full.settings.fillna('').astype(str)
  seeds = r'"seed": \d+, |(, )?"seed": \d+|(?<=seed-)\d+'
  return settings.str.replace(seeds, '', regex=True)


def _valid_with_usual_settings(full: pd.DataFrame, same: pd.Series) -> pd.Series:
  """The column `valid`: a run with other settings than most of its trial is not a seed of it."""
  trials = same.groupby([full[key] for key in ('task', 'trial', 'budget', 'protocol')])
  usual = trials.transform(lambda of: of.value_counts().index[0])
  differs = full.valid.eq('') & same.ne(usual)
  return full.valid.mask(differs, 'of other settings')


def _most_frequent(of_paper: pd.DataFrame) -> tuple[str, str]:
  """The budget and the protocol that the pages show, those of most runs."""
  expressible = of_paper[of_paper.status != 'not expressible']
  counts = expressible[['budget', 'protocol']].value_counts()
  return counts.index[0] if len(counts) else ('', '')


def _different(shown: pd.DataFrame, same: pd.Series) -> pd.Series:
  """Trials, one of those that a budget makes the same experiment, such as fixed-1 and default."""
  first = shown.assign(same=same).drop_duplicates('trial')
  return first.trial[first.same.eq('') | ~first.same.duplicated()]


def _dynamics(runs: Runs, shown: pd.DataFrame) -> Figure | None:
  """Sink_1 of the headline trials during training; None if none of them was probed."""
  probed = set(shown.trial[shown.sink_1.notna()])
  trials = [trial for trial in HEADLINE if trial in probed]
  if not trials:
    return None
  rates = _good(shown).groupby('trial').sink_1.mean()
  sinks = [HEADLINE[trial] for trial in trials if rates.get(trial, 0) >= EMERGED]
  names = ' and '.join(sinks) or 'in none'
  title = f'Mean Sink_1 of {EMERGED} % or more: {names}'
  return figures.curves(runs, shown, trials, ['sink_1'], title=title)


def _scatter(shown: pd.DataFrame, beside: pd.DataFrame, agreement: Agreement) -> Figure | None:
  """The paper's Sink_1 and ours, also of trials without a valid run; None of few trials."""
  dots, rank, alike = agreement
  if len(dots) < 3:  # fewer show no agreement
    return None
  known = beside[beside.metric.eq('sink_1') & beside.value.notna()]
  bad = known[known.n.eq(0) & known.invalid.gt(0)]
  means = shown.groupby('trial').sink_1.mean()
  bad = bad.assign(crossed=True, mean=bad.trial.map(means))
  both = pd.concat([dots.assign(crossed=False), bad])
  title = f'{alike} of {len(dots)} experiments lie on the same side of {EMERGED} %'
  if not math.isnan(rank):
    title += f'\n(rank correlation {rank:.2f})'
  return figures.scatter(both, title)


def _grafts(runs: Runs, grafts: pd.DataFrame, courses: Courses) -> Figure | None:
  """Training after grafts; courses: of `_courses`. None without a graft."""
  if not len(grafts):
    return None
  trials = sorted(set(grafts.trial))[: len(figures.LINES)]  # one colour each; the table has all
  ends = sorted(
    (float(of['sink_1'].split()[-1]), trial)
    for trial, of in courses.items()
    if trial in trials and 'sink_1' in of
  )
  extremes = dict.fromkeys(ends[:1] + ends[-1:])
  words = ' to '.join(f'{rate:.0f} % ({trial})' for rate, trial in extremes)
  title = f'After training Sink_1 is {words}' if words else 'Sink_1 after a graft'
  metrics = [metric for metric in _COURSE if metric != 'sink_star']
  return figures.curves(runs, grafts, trials, metrics, title=title)


def _made(begun: pd.DataFrame) -> pd.DataFrame:
  """By task, budget and hardware: runs, hours, dates, commits and the shortest command."""
  known = begun[begun.code.notna()]
  seconds = known.tokens / known.tokens_per_second
  timed = known.assign(hours=seconds / 3600)
  groups = timed.groupby(['task', 'budget', 'hardware'], dropna=False)
  return groups.agg(
    runs=('run', 'size'),
    hours=('hours', 'sum'),
    first=('date', 'min'),
    last=('date', 'max'),
    code=('code', _commits),
    command=('command', lambda of: min(of.dropna(), key=len, default=None)),
  )


def _reproduction(
  full: pd.DataFrame, out: AnyPath, analyses: Sequence[AnyPath], pictures: dict[str, str]
) -> AnyPath:
  """Writes the page about every table and figure of the paper."""
  models, see = {}, dict(pictures)
  for path in analyses:
    rows = json.loads(path.read_text()).get('rows', ())
    models[path.stem] = list(dict.fromkeys(row['model'] for row in rows))
    drawn = os.path.relpath(path.with_suffix('.png'), out)
    for item in paper.TABLES + paper.FIGURES:
      if item.get('analysis') == path.stem:
        see[item['key']] = drawn
  coverage = paper.coverage(full, models)
  return render(out / 'reproduction.md', 'reproduction.md', coverage=coverage, see=see)


def _first_sentences(page: AnyPath) -> list[str]:
  """The sentences with which the page of results begins, without Markdown."""
  begins = r'^\*\*(?:Run|Reproduced|Not reproduced|Open).*'
  lines = re.findall(begins, page.read_text(), re.MULTILINE)
  return [line.replace('*', '').replace('\\', '') for line in lines]


def _commits(codes: pd.Series) -> str:
  """The commits that made runs, eight digits of each, with a plus where files were changed."""
  words = (
    re.sub(r'commit ([0-9a-f]{8})[0-9a-f]*(, clean)?', r'\1', code).replace('-dirty', '+')
    for code in codes.dropna()
  )
  return ', '.join(dict.fromkeys(words))


def _courses(runs: Runs, grafts: pd.DataFrame) -> Courses:
  valid = grafts[grafts.valid == '']
  of_model = runs.metrics[runs.metrics.block.isna()]
  of: pd.DataFrame = of_model[of_model.run.isin(valid.run)]
  by_run = of.sort_values('step').groupby(['trial', 'metric', 'run'])
  ends = by_run.value.agg(['first', 'last'])
  means = ends.groupby(['trial', 'metric']).mean()
  courses = {}
  for trial in sorted(set(of.trial)):
    course = {'n': str(valid.seed[valid.trial == trial].nunique())}
    for metric, digits in _COURSE.items():
      if (trial, metric) in means.index:
        first, last = means.loc[trial, metric][['first', 'last']]
        course[metric] = f'{first:,.{digits}f} to {last:,.{digits}f}'
    courses[trial] = course
  return courses


def _figure(
  figure: dict[str, Any], runs: Runs, shown: pd.DataFrame, tuned: pd.DataFrame
) -> Figure | None:
  """A figure of the paper, drawn from training runs; None without any."""
  kind, name = figure['kind'], paper.name_of(figure)
  probed = set(shown.trial[shown.sink_1.notna()])
  trials = [trial for trial in figure['trials'] if trial in probed]
  good = shown[shown.valid.eq('') & shown.trial.isin(trials)]
  if kind == 'ratios':
    range_of_means = _range(good, 'hidden_ratio', 'largest ratio')
  else:
    range_of_means = _range(good, 'sink_1', 'Sink_1')
  title = '\n'.join(filter(None, (name, range_of_means)))
  if kind == 'fine-tuning' and len(tuned):
    # 'paper', not 'answers', where there are both.
    tuned = tuned[tuned.protocol == max(tuned.protocol)]
    tuned_trials = sorted(set(tuned.trial))
    return figures.curves(runs, tuned, tuned_trials, ['train_loss', 'grad_norm'], title=title)
  if not trials:
    return None
  if kind == 'prefix':
    return figures.positions(shown, trials, title)
  if kind in ('dynamics', 'learning rates'):
    losses = ['train_loss', 'valid_loss'] if kind == 'dynamics' else ['train_loss']
    return figures.curves(runs, shown, trials, [*losses, 'sink_1'], title=title)
  if kind == 'ratios':
    dotted = figure.get('dotted', '')
    return figures.curves(runs, shown, trials, ['hidden_ratio'], 'block', title, dotted)
  if kind == 'window map':
    columns = ['window_absolute', 'window_relative']
    return figures.sweep(shown, trials, 'window', columns, name)
  if figure['number'] == '6':
    return figures.sweep(shown, trials, 'window', ['sink_1', 'valid_loss'], title)
  columns = ['sink_1', 'train_loss', 'valid_loss']
  return figures.sweep(shown, trials, 'unique_tokens', columns, title)


def _range(good: pd.DataFrame, column: str, words: str) -> str:
  """'Sink_1 0.5 (sigmoid) to 30 (default)', the least and the largest mean; '' without runs."""
  means = pd.Series(good.groupby('trial')[column].mean()).sort_values()
  if means.empty:
    return ''
  ends = dict.fromkeys((means.index[0], means.index[-1]))
  return f'{words} ' + ' to '.join(f'{means[trial]:.3g} ({trial})' for trial in ends)


def _remedies(key: str, full: pd.DataFrame) -> dict[str, Any] | None:
  """The content of the pages about remedies on one task; None without a comparison."""
  of = full[full.task.eq(key)]
  trials = of.trial.str.replace(rf'^{key}-', '', regex=True)
  of = of.assign(trial=trials)
  rows = compare.against(of, 'softmax')
  if rows.empty:
    return None
  of_sinks = rows[rows.metric == 'sink_1']
  verdicts = of_sinks.groupby('verdict').trial.apply(sorted).to_dict()
  lowering = 'removed', 'moved to the extra key', 'lower'
  acts = sum(len(verdicts.get(verdict, ())) for verdict in lowering)
  count, title = rows.trial.nunique(), REMEDIES[key]
  words = f'{title}: {acts} of {count} remedies lower Sink_1'
  measures = {metric: compare.MEASURES[metric] for metric in ('sink_1', 'valid_loss')}
  picture = figures.forest(rows, f'{words}\n(difference from softmax by seed, 99 %)', measures)
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
  """Writes the page that compares runs, a group for each data set; see `write`."""
  full = table(runs)
  full['trial'] = _named_by_folder(full)
  full['other'] = full.attention != 'softmax'  # softmax comes first
  full = full.sort_values(['other', 'trial', 'seed'])
  by_data = full.groupby(full.content.fillna(''), sort=False)
  groups, files, words = [], [], []
  for i, (_, of) in enumerate(by_data):
    source = next(filter(pd.notna, of.source), 'Unknown data')
    title = re.sub(r'\(.*?\)', '', source)
    title += f' (data {i + 1})' * any(title == group['title'] for group in groups)
    key = re.split(r'\W', title)[0].lower()
    key += f'-{i}' * (f'curves-{key}.png' in files)
    trials = list(dict.fromkeys(of.trial))
    drawn = {}
    metrics = ['sink_1', 'valid_loss', 'train_loss']
    if of[metrics].notna().to_numpy().any():
      metrics.append('value_ratio')
      drawn[f'curves-{key}.png'] = figures.curves(runs, of, trials, metrics)
    maps, missing = _maps(of, root) if root else ({}, [])
    if maps:
      drawn[f'attention-{key}.png'] = figures.attention_maps(maps)
    for name, picture in drawn.items():
      save(picture, out / name)
    files += drawn
    words.append(_sentences_about(title, of))
    settings = _settings(of)
    shared = set.intersection(*settings.values()) if settings else set()
    groups.append(
      {
        'title': title,
        'table': of,
        'pictures': list(drawn),
        'notes': missing,
        'shared': sorted(shared),
        'different': {trial: sorted(of_trial - shared) for trial, of_trial in settings.items()},
        'findings': {trial: finding(of[of.trial == trial]) for trial in trials},
      }
    )
  model = model_page(evaluation) if evaluation else ''
  for name in re.findall(r'\]\(([\w.-]+\.png)\)', model):
    picture = inside(evaluation or out, name).read_bytes()
    (out / name).write_bytes(picture)
  words = words or ['There are no runs yet.']
  text = render(
    out / 'report.md',
    'runs.md',
    groups=groups,
    words=words,
    full=full,
    model=model,
  )
  index = out / 'index.html'
  index.write_text(to_html(text.read_text(), out))
  return [index, text, *(out / name for name in files)], words


def _named_by_folder(full: pd.DataFrame) -> pd.Series:
  """The column `trial`, with the folder of a run where it is not named after the trial.

  Such a folder holds a changed trial, or a run without a trial.
  """
  folder = full.run.str.replace(r'-seed-\d+$', '', regex=True)
  name = folder.str.replace(r'.*/', '', regex=True)
  return folder.where(name != full.trial, full.trial)


def _sentences_about(title: str, of: pd.DataFrame) -> str:
  """In how many trials on one data set, whose title begins the sentence, a sink stands."""
  least = _good(of).groupby('trial').sink_1.min()
  if len(least):
    trials = list(dict.fromkeys(of.trial))
    sinks = [trial for trial in trials if least.get(trial, -1) >= EMERGED]
    named = f' ({", ".join(sinks)})' if sinks else ''
    words = f'{title}: a sink stands on the first token in every valid seed of {len(sinks)} of '
    words += f'{len(trials)} trials{named}.'
  else:
    words = f'{title}: no valid run was probed, so that nothing can be said of a sink.'
  if bad := of.valid.ne('').sum():
    words += f' {bad} of {len(of)} runs are invalid and crossed out.'
  return words


def _settings(of: pd.DataFrame) -> dict[str, set[tuple[str, str]]]:
  """{trial: {(key, value)}} of what differs from the defaults, without the seed."""
  settings = {}
  for trial, text in zip(of.trial, of.settings):
    if isinstance(text, str):
      changed = json.loads(text)
      changed.pop('seed', None)
      settings[trial] = {(key, str(value)) for key, value in changed.items()}
  return settings


def _maps(of: pd.DataFrame, root: AnyPath) -> tuple[Maps, list[str]]:
  """Maps of the first run of each trial, and a line about each that has no checkpoint to load."""
  maps, missing = {}, []
  for trial, runs in of.groupby('trial', sort=False):
    first = runs.sort_values(['valid', 'seed']).iloc[0]
    try:
      folder = inside(root, str(first.run))
      run = load_run(folder if folder.is_dir() else root)  # of one workdir
      if run.probe_tokens is None:
        raise ValueError('it has no probe_tokens.npy')
      has_extra_key = pd.notna(first.sink_star)
      maps[f'{trial}, seed {first.seed:.0f}'] = head_maps(run, run.probe_tokens), has_extra_key
    except (ValueError, OSError, CheckpointError) as error:  # no checkpoint yet, or none any more
      missing.append(f'No attention map of {first.run}: {" ".join(str(error).split())}')
  return maps, missing
