"""What the numbers of a run say, in sentences; pure functions of the dicts of `read_run`."""

from __future__ import annotations

from sink_jax.report.records import EMERGENCE_LEVEL, record_note, shown_losses

_LEVEL = 100 * EMERGENCE_LEVEL  # percent
_UNEQUAL = 0.1  # nats of loss between variants that are no longer alike


def verdict(run: dict) -> str:
  """'unknown', 'sink', 'proxy only', 'faded', 'faint' or 'none'.

  sink: Sink_1 stays at or above the level of emergence up to the last probe. proxy only:
  it does so for the proxy scores alone. faded: it was there once. faint: Sink_1 left 0 %
  without reaching the level.
  """
  if 'probe_step' not in run:
    return 'unknown'
  if run['emergence_step'] is not None:
    return 'proxy only' if run['proxy'] and not _carried(run) else 'sink'
  if run['peak_sink_1'] >= _LEVEL:
    return 'faded'
  return 'faint' if run['peak_sink_1'] > 0 else 'none'


def sentences(run: dict, baseline: dict | None = None) -> str:
  """One run. baseline: the softmax run that it varies, where there is one."""
  parts = [_status(run), record_note(run)]
  if verdict(run) == 'unknown':
    if run['status'] not in ('unreadable', 'not run', 'not expressible'):
      parts.append('It has no probe rows, so nothing can be said about a sink.')
  else:
    parts += [_first_token(run), _raw_mass(run), _slot(run, baseline)]
  parts.append(_loss(run, baseline))
  return ' '.join(filter(None, parts))


def overview(runs: list[dict]) -> str:
  """How many of a group's variants have a sink on the first token."""
  known = [run for run in runs if verdict(run) != 'unknown']
  if not known:
    return 'No variant has been probed yet.'
  of = lambda kind: [run['name'] for run in known if verdict(run) == kind]
  line = f'A sink stands on the first token in {len(of("sink"))} of {len(known)} variants'
  line += f' ({", ".join(of("sink"))}).' if of('sink') else '.'
  if of('proxy only'):
    line += f' Of proxy scores alone: {", ".join(of("proxy only"))}.'
  if any(run['status'] != 'done' for run in runs):
    line += ' Not all runs are done.'
  return line


def _status(run):
  step = f'at step {run["step"]}'
  of = f'{step} of {run["steps"]}' if 'steps' in run else step
  end = '.' if 'probe_step' not in run else f'; what follows is of step {run["probe_step"]}.'
  loss = f' (loss {run["loss"]})' if run['loss'] else ''
  return {
      'done': '',
      'not run': 'Not run.',
      'not expressible': f'Not expressible: {run.get("reason")}.',
      'running': f'Not finished: last heard of {of}{end}',
      'interrupted': f'Interrupted {of}{end}',
      'diverged': f'Diverged {of}{loss}{end}',
      'failed': f'Failed: {run["error"]}',
      'unreadable': f'Unreadable: {run["error"]}',
  }.get(run['status'], f'Status: {run["status"]}.')


def _first_token(run):
  rate, epsilon = ('proxy Sink_1*' if run['proxy'] else 'Sink_1'), run['epsilon']
  largest = (f'the largest importance of the first token was {run["largest_importance"]:.2f}, '
             f'{_side(run["largest_importance"], epsilon)} epsilon {epsilon:g}')
  now, steps = f'{run["sink_1"]:.1f} %', run['probe_step']
  kind = verdict(run)
  if kind in ('sink', 'proxy only'):
    since = (f'at or above {_LEVEL:g} % before any training' if run['emergence_step'] == 0 else
             f'at or above {_LEVEL:g} % since step {run["emergence_step"]}')
    if run['peak_sink_1'] > run['sink_1'] + 5:
      since += f', {run["peak_sink_1"]:.1f} % at step {run["peak_step"]}'
    return (f'{_upper(rate)} reached {now} ({since}); the values of the first token are '
            f'{run["value_ratio"]:.2f} times as long as those of the others (block '
            f'{run["value_ratio_block"]}).')
  if kind == 'faded':
    return (f'No lasting sink: {rate} rose to {run["peak_sink_1"]:.1f} % at step '
            f'{run["peak_step"]} and ended at {now}; {largest}.')
  if kind == 'faint':
    return (f'No sink emerged in {steps} steps: {rate} stayed below {_LEVEL:g} %, at most '
            f'{run["peak_sink_1"]:.1f} %, and ended at {now}; {largest}.')
  return f'No sink emerged in {steps} steps: {rate} was never above 0 %; {largest}.'


def _raw_mass(run):
  """Row-normalised scores of tiny weights can show a sink that moves nothing."""
  if not run['proxy']:
    return ''
  mass, row = run['raw_mass_1'], run['raw_row_mass']
  taken = f'a mean raw mass of {mass:.3f}, of {row:.3f} in a row'
  if row > 0:
    taken += f' ({100 * mass / row:.0f} %)'
  kind = verdict(run)
  if kind == 'proxy only':
    return (f'It is not a sink of the weights: they give the first token {taken}, less than '
            f'epsilon in {run["sink_1"]:.0f} % of the heads would need '
            f'({_needed(run):.3f}). The division by small row sums makes the proxy.')
  if kind == 'sink':
    return f'The weights agree: they give the first token {taken}.'
  if row > 0 and mass / row > run['epsilon']:
    return f'The weights disagree: they give the first token {taken}.'
  return f'The weights agree: they give the first token {taken}.'


def _slot(run, baseline):
  if run['sink_bias_slot'] is None:
    return ''
  line = (f'The bias slot took mean weight {run["mean_bias_slot"]:.2f} and has Sink_* {run["sink_bias_slot"]:.1f} % '
          f'({run["sink_bias_slot_released"]:.1f} % as the release counts, with its dummy row).')
  if baseline is None or verdict(baseline) == 'unknown':
    return line
  before, after = baseline['largest_importance'], run['largest_importance']
  if f'{before:.2f}' == f'{after:.2f}':
    change = f'stayed at {after:.2f}, as in {baseline["name"]}'
  else:
    change = (f'{"fell" if after < before else "rose"} from {before:.2f} '
              f'({baseline["name"]}) to {after:.2f}')
  return f"{line} The first token's largest importance {change}."


def _loss(run, baseline):
  """Variants that learnt unequally much say little about each other's sinks."""
  if baseline is None:
    return ''
  mine, its = run.get('losses', {}), baseline.get('losses', {})
  sets = [key for key in shown_losses(run) if None not in (mine[key], its.get(key))]
  if not sets:
    return ''
  worst = max(sets, key=lambda key: abs(mine[key] - its[key]))
  line = (f'Its {worst} loss is {mine[worst]:.3f}, against '
          f'{its[worst]:.3f} of {baseline["name"]}')
  if abs(mine[worst] - its[worst]) > _UNEQUAL:
    return line + ': the two have not learnt equally much, which their sinks may reflect.'
  return line + '.'


def _carried(run):
  """Whether the raw mass suffices for every sink head of the proxy to be one in the weights."""
  return run['raw_mass_1'] >= _needed(run)


def _needed(run):
  return run['epsilon'] * run['sink_1'] / 100


def _side(value, epsilon):
  return 'above' if value > epsilon else 'below'


def _upper(text):
  return text[0].upper() + text[1:]
