"""What the numbers of a run say, in sentences; pure functions of run records."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.report.markup import upper
from sink_jax.report.probe_record import EMERGENCE_LEVEL, ProbeRecord
from sink_jax.report.records import RunRecord

_LEVEL = 100 * EMERGENCE_LEVEL  # percent
_UNEQUAL = 0.1  # nats of loss from which two variants have not learnt equally much
# Verdicts in words, in the order of tables. A sink stays at or above the level of emergence up to
# the last probe; a faded one was there once; a faint one never reached the level.
VERDICTS = {'sink': 'sink', 'proxy only': 'of proxy scores alone', 'faded': 'faded',
            'faint': 'faint', 'none': 'no sink', 'unknown': 'not probed'}


def verdict(run: RunRecord) -> str:
  """One of `VERDICTS`, on the first token."""
  probe = run.probe
  if probe is None:
    return 'unknown'
  # Where rows do not sum to one, dividing by a tiny sum can make a sink of next to nothing.
  if probe.emergence_step is not None:
    return 'proxy only' if run.proxy and probe.raw_mass_1 < _needed_mass(run, probe) else 'sink'
  if probe.peak_sink_1 >= _LEVEL:
    return 'faded'
  return 'faint' if probe.peak_sink_1 > 0 else 'none'


def sentences(run: RunRecord, baseline: RunRecord | None = None) -> str:
  """What is to be said of one run. baseline: the softmax run that it varies, if there is one."""
  parts = [_status(run)]
  if run.probe is not None:
    parts += [_first_token(run, run.probe), _raw_mass(run, run.probe),
              _extra_key(run.probe, baseline), _massive(run.probe)]
  elif run.status not in ('unreadable', 'not run', 'not expressible'):
    parts.append('It has no probe rows, so nothing can be said about a sink.')
  if baseline is not None:
    parts.append(_loss(run, baseline))
  return ' '.join(filter(None, parts))


def overview(runs: Sequence[RunRecord]) -> str:
  """How many of a group's variants have a sink on the first token."""
  known = [run for run in runs if run.probe is not None]
  if not known:
    return 'No variant has been probed yet.'
  of = lambda kind: [run.name for run in known if verdict(run) == kind]
  # Only probed runs are counted: what was not measured is no variant without a sink.
  line = f'A sink stands on the first token in {len(of("sink"))} of {len(known)} variants'
  line += f' ({", ".join(of("sink"))}).' if of('sink') else '.'
  if of('proxy only'):
    line += f' Of proxy scores alone: {", ".join(of("proxy only"))}.'
  if any(run.status != 'done' for run in runs):
    line += ' Not all runs are done.'
  return line


def _status(run: RunRecord) -> str:
  of = f'at step {run.step}' + (f' of {run.setup.steps}' if run.setup else '')
  end = '.' if run.probe is None else f'; what follows is of step {run.probe.step}.'
  loss = f' (loss {run.loss})' if run.loss else ''
  return {
      'done': '',
      'not run': 'Not run.',
      'not expressible': f'Not expressible: {run.reason}.',
      'running': f'Not finished: last heard of {of}{end}',
      'interrupted': f'Interrupted {of}{end}',
      'diverged': f'Diverged {of}{loss}{end}',
      'failed': f'Failed: {run.error}',
      'unreadable': f'Unreadable: {run.error}',
  }.get(run.status, f'Status: {run.status}.')


def _first_token(run: RunRecord, probe: ProbeRecord) -> str:
  """Whether a sink emerged on the first token, since when, and by how much it exceeds epsilon."""
  rate, epsilon = ('proxy Sink_1*' if run.proxy else 'Sink_1'), run.known_setup.epsilon
  # In `sink_rate` as here, a head that is at epsilon exactly does not exceed it.
  side = 'above' if probe.largest_importance > epsilon else 'below'
  largest = (f'the largest importance of the first token was {probe.largest_importance:.2f}, '
             f'{side} epsilon {epsilon:g}')
  now, kind = f'{probe.sink_1:.1f} %', verdict(run)
  if kind == 'faded':
    return (f'No lasting sink: {rate} rose to {probe.peak_sink_1:.1f} % at step '
            f'{probe.peak_step} and ended at {now}; {largest}.')
  if kind in ('faint', 'none'):
    course = (f'stayed below {_LEVEL:g} %, at most {probe.peak_sink_1:.1f} %, and ended at {now}'
              if kind == 'faint' else 'was never above 0 %')
    return f'No sink emerged in {probe.step} steps: {rate} {course}; {largest}.'
  since = f'since step {probe.emergence_step}' if probe.emergence_step else 'before any training'
  if probe.peak_sink_1 > probe.sink_1 + 5:  # points; less is no decline
    since += f', {probe.peak_sink_1:.1f} % at step {probe.peak_step}'
  return (f'{upper(rate)} reached {now} (at or above {_LEVEL:g} % {since}); the values of the '
          f'first token are {probe.value_ratio:.2f} times as long as those of the others (block '
          f'{probe.value_ratio_block}).')


def _raw_mass(run: RunRecord, probe: ProbeRecord) -> str:
  """Row-normalised scores of tiny weights can show a sink that moves nothing."""
  if not run.proxy:
    return ''
  mass, row = probe.raw_mass_1, probe.raw_row_mass
  # Raw mass can be negative: without normalisation some operations have weights of both signs.
  taken = f'a mean raw mass of {mass:.3f}, of {row:.3f} in a row'
  if row > 0:
    taken += f' ({100 * mass / row:.0f} %)'
  kind = verdict(run)
  if kind == 'proxy only':
    return (f'It is not a sink of the weights: they give the first token {taken}, less than '
            f'epsilon in {probe.sink_1:.0f} % of the heads would need '
            f'({_needed_mass(run, probe):.3f}). The division by small row sums makes the proxy.')
  # Where the proxy shows no sink, the weights disagree if the first token has more than epsilon of
  # the raw mass of a row.
  agree = kind == 'sink' or not (row > 0 and mass / row > run.known_setup.epsilon)
  return f'The weights {"agree" if agree else "disagree"}: they give the first token {taken}.'


def _extra_key(probe: ProbeRecord, baseline: RunRecord | None) -> str:
  if probe.sink_extra_key is None:
    return ''
  line = (f'The extra key took mean weight {probe.mean_extra_key:.2f} and has Sink_* '
          f'{probe.sink_extra_key:.1f} % ({probe.sink_extra_key_official:.1f} % as the official '
          'implementation counts, with its dummy row).')
  if baseline is None or baseline.probe is None:
    return line
  before, after = baseline.probe.largest_importance, probe.largest_importance
  # Compared as they are written: numbers that read the same have neither fallen nor risen.
  if f'{before:.2f}' == f'{after:.2f}':
    change = f'stayed at {after:.2f}, as in {baseline.name}'
  else:
    change = (f'{"fell" if after < before else "rose"} from {before:.2f} '
              f'({baseline.name}) to {after:.2f}')
  return f"{line} The first token's largest importance {change}."


def _massive(probe: ProbeRecord) -> str:
  first = probe.first_massive
  if first is None:
    return ''
  return (f'Massive activations first appear in block {first.block}: {first.beyond_100:.1f} '
          'entries of the hidden states of a sequence, on average, exceed 100 medians there, the '
          f'largest in channel {first.channel} of token {first.position}.')


def _loss(run: RunRecord, baseline: RunRecord) -> str:
  """Variants that learnt unequally much say little about each other's sinks."""
  mine, its = run.losses or {}, baseline.losses or {}
  pairs = {key: (own, other) for key in run.shown_losses
           if (own := mine.get(key)) is not None and (other := its.get(key)) is not None}
  if not pairs:
    return ''
  # The set on which they differ most decides whether the two can be compared.
  worst = max(pairs, key=lambda key: abs(pairs[key][0] - pairs[key][1]))
  own, other = pairs[worst]
  line = f'Its {worst} loss is {own:.3f}, against {other:.3f} of {baseline.name}'
  if abs(own - other) > _UNEQUAL:
    return line + ': the two have not learnt equally much, which their sinks may reflect.'
  return line + '.'


def _needed_mass(run: RunRecord, probe: ProbeRecord) -> float:
  """The raw mass that lets every sink head of the proxy be a sink head of the weights."""
  return run.known_setup.epsilon * probe.sink_1 / 100
