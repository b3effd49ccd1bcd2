"""Verdicts know the spread of seeds: the rule, how often it errs, and planted effects."""

import dataclasses
import json
import math
import re
from collections import Counter

import numpy as np
import pytest

from sink_jax.paper.all_claims import CLAIMS
from sink_jax.paper.claims import LEVELS, PLURAL, judge, second_look
from sink_jax.paper.collect import groups_of
from sink_jax.paper.drawing import claim_rows, deciding, place_of
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.paper.parts import unjudged
from sink_jax.paper.page import part_words
from sink_jax.paper.report import as_text, paper_report
from sink_jax.paper.spread import FALSE_VERDICTS, Spread, Within, spread_of, t_quantile, typical
from tests.documents import TEXTS
from tests.paper import calibration, paper_runs
from tests.paper.paper_runs import runs, write, write_synthetic
from tests.report.test_report import ROOT, Page

BY_KEY = {claim.key: claim for claim in CLAIMS}
CALIBRATION = ROOT / 'results/paper/calibration.json'
THREE = (0, 1, 2)


def verdict(root, key, spread=None):
  group, = groups_of(runs(root))
  return judge(BY_KEY[key], group, spread or spread_of(group))


def seeds(root, trial, sinks, **options):
  for seed, sink in enumerate(sinks):
    write(root / f'{trial}-{seed}', trial, seed=seed, sink=(sink,), **options)


@pytest.mark.parametrize('freedom, outside, t', [
    (1, 0.05, 12.7062), (2, 0.05, 4.3027), (2, 0.01, 9.9248), (5, 0.01, 4.0321), (10, 0.01, 3.1693),
    (11, 0.01 / 3, 3.7283), (100, 0.05, 1.9840)])
def test_quantiles_of_t_are_those_of_tables(freedom, outside, t):
  assert t_quantile(freedom, outside) == pytest.approx(t, abs=2e-4)


def pooled(variance, freedom):
  """Of losses, in another trial."""
  squares = variance * freedom * typical(freedom)  # the median of one is that one
  within = {'valid_loss': {'other': Within(squares, freedom)}}
  return Spread(within, within)


def test_an_interval_joins_the_variance_of_a_trial_with_that_of_the_budget():
  spread = pooled(16.0, 8)
  found = spread.interval('valid_loss', ['default'], [10.0, 12.0, 14.0])
  half = t_quantile(10, 0.01) * math.sqrt((8 * 16 + 2 * 4) / 10 / 3)
  assert (found.mean, found.low, found.high) == (
      12, pytest.approx(12 - half), pytest.approx(12 + half))
  twice = spread.interval('valid_loss', ['default', 'nope'], [10.0, 12.0, 14.0])
  assert twice.high - 12 == pytest.approx(t_quantile(10, 0.01) * math.sqrt(
      (8 * 32 + 2 * 4) / 10 / 3))
  assert spread.interval('train_loss', ['default'], [3.0] * 3).low is None  # nothing is known
  assert spread.interval('valid_loss', ['default'], [3.0, 4.0]).low is None  # two are too few


def test_trials_that_spread_more_than_the_pool_stand_alone():
  found = pooled(1.0, 30).interval('valid_loss', ['default'], [0.0, 18.0, 36.0])
  assert found.high - 18 == pytest.approx(t_quantile(2, 0.01) * 18 / math.sqrt(3))


def test_the_pool_is_the_median_of_the_other_trials(tmp_path):
  for trial, losses in (('default', (3, 3.1, 3.2)), ('nope', (3, 3.2, 3.4)),
                        ('absolute', (3, 3, 3)), ('learned', (1, 3, 5))):
    for seed, loss in enumerate(losses):
      write(tmp_path / f'{trial}-{seed}', trial, seed=seed, losses=loss)
  spread = spread_of(*groups_of(runs(tmp_path)))
  pool = lambda *trials: (spread.pool('valid_loss', trials).variance * typical(2),
                          spread.pool('valid_loss', trials).freedom)
  assert pool('relative') == (pytest.approx((0.01 + 0.04) / 2), 8)
  assert pool('default') == (pytest.approx(0.04), 6)
  assert pool('learned', 'nope') == (pytest.approx(2 * 0.01 / 2), 4)  # a difference has twice that


def test_a_pool_of_rates_has_a_head_that_comes_and_goes():
  few, many = ({trial: Within(0.0, 2) for trial in range(count)} for count in (2, 30))
  heads = {'default': 8, 'nope': 8}
  pool = lambda within, *trials: Spread({'sink_1': within}, {'sink_1': within}, heads).pool(
      'sink_1', trials)
  assert pool({}, 'default') == Within(8 / 32, 8)
  assert pool(few, 'default') == Within(4 / 32, 8)
  assert pool(many, 'default') == Within(1 / 32, 9)
  assert pool(many, 'default', 'nope') == Within(2 * 6.25**2, 9)  # in points


@pytest.mark.parametrize('zeros, level, pool, decided', [
    (3, 5, 8, True), (3, 10, 0, True), (3, 5, 0, False), (2, 10, 8, False)])
def test_seeds_at_zero_are_decided(zeros, level, pool, decided):
  # Seeds at 25 +- 4 % spread by 0.046 on the scale of arcsines.
  within = {'sink_1': {trial: Within(2 * 0.046**2, 2) for trial in range(pool)}}
  spread = Spread(within, {}, {'default': 8})
  found = spread.interval('sink_1', ['default'], [0.0] * zeros)
  assert found.below(level) == decided and (found.low in (0, None))


@pytest.mark.parametrize('sinks, expected', [
    ((30, 34, 26), 'holds'), ((30,), 'undecided'), ((30, 34), 'undecided'),
    ((11, 14, 9), 'undecided'), ((1, 3, 2), 'does not hold'), ((0, 30, 34), 'undecided')])
def test_planted_sinks(sinks, expected, tmp_path):
  for trial in ('default', 'nope', 'absolute', 'learned'):  # what seeds spread by
    seeds(tmp_path, trial, (30, 33, 28))
  seeds(tmp_path, 'weight-decay-0', sinks)
  found = verdict(tmp_path, 'no-weight-decay')
  assert found.verdict == expected
  part, = found.parts
  assert part.n == len(sinks) and part.asked == 'at least 10 %'
  if len(sinks) >= 3:
    assert part.low < part.mean < part.high
  else:
    assert part.low is None
    assert '3 seeds are the least that decide anything' in found.why


@pytest.mark.parametrize('sinks, expected', [
    ((24, 26, 23), 'does not hold'), ((30, 33, 28), 'undecided'), ((34, 36, 33), 'undecided'),
    ((60, 58, 63), 'holds')])
def test_planted_differences_are_paired_by_seed(sinks, expected, tmp_path):
  for trial in ('default', 'nope', 'absolute', 'learned'):
    seeds(tmp_path, trial, (30, 31, 30))
  seeds(tmp_path, 'weight-decay-0.5', sinks)
  found = verdict(tmp_path, 'weight-decay')
  assert found.verdict == expected
  assert found.parts[0].values == [after - before for after, before in zip(sinks, (30, 31, 30))]
  if found.verdict == 'undecided':
    assert f'About {found.needed} seeds would decide' in found.why and found.needed > 3


def test_what_is_presupposed_may_be_undecided_itself(tmp_path):
  seeds(tmp_path, 'default', (11, 14, 9))
  seeds(tmp_path, 'weight-decay-0', (30, 34, 26))
  found = verdict(tmp_path, 'no-weight-decay')
  assert found.verdict == 'undecided' and found.why.startswith(
      'It is undecided whether the baseline has a sink: Sink_1 % of default is 11.33')


def test_a_seed_that_diverged_keeps_the_others_from_deciding(tmp_path):
  for trial in ('default', 'batch-128', 'batch-256', 'batch-1024'):
    seeds(tmp_path, trial, (30, 33, 28))
  assert verdict(tmp_path, 'batch-size').verdict == 'holds'
  write(tmp_path / 'more', 'batch-256', seed=3, status='diverged', step=300)
  found = verdict(tmp_path, 'batch-size')
  assert found.verdict == 'undecided' and found.why.endswith('A seed of batch-256 diverged')


def test_training_takes_three_seeds_that_end_alike(tmp_path):
  names = ('softmax-p-2', 'softmax-p-3', 'softmax-p-4')
  for count, expected in ((1, 'undecided'), (2, 'undecided'), (3, 'holds')):
    for name in names:
      write(tmp_path / f'{name}-{count}', name, seed=count, status='diverged', step=300)
    assert verdict(tmp_path, 'p-norm-diverges').verdict == expected
  write(tmp_path / 'fourth', names[0], seed=4)
  found = verdict(tmp_path, 'p-norm-diverges')
  assert found.verdict == 'undecided'
  group, = groups_of(runs(tmp_path))
  # No seed undoes that.
  assert second_look([(BY_KEY['p-norm-diverges'], found)], group) is None


def test_an_identity_takes_one_run(tmp_path):
  chain = {'first_token_chain': dict(largest_relative_difference=1e-6)}
  write(tmp_path / 'default', analyses=chain)
  assert verdict(tmp_path, 'chain').verdict == 'holds'
  assert [check for claim in CLAIMS for check in claim.checks if getattr(check, 'exact', False)
          ] == list(BY_KEY['chain'].checks)


def test_levels_are_those_of_the_untrained_model_where_they_are_higher(tmp_path):
  nulls = {'null_p99': {'sink_1': 25.0, 'hidden_ratio': 1.5, 'unknown': 'x'}}
  for trial in ('default', 'weight-decay-0'):
    seeds(tmp_path, trial, (2, 3, 2), first=nulls, **nulls)
  found = verdict(tmp_path, 'no-weight-decay')
  assert found.verdict == 'cannot be judged' and 'no sink in the baseline' in found.reason
  part = verdict(tmp_path, 'emergence').parts[1]
  assert (part.level, part.held) == (25, False)
  run = runs(tmp_path)[0]
  assert run.probe.nulls == run.probe.last_nulls == {'sink_1': 25.0, 'hidden_ratio': 1.5}


def test_a_second_look_is_asked_for_once(tmp_path):
  seeds(tmp_path / 'runs', 'default', (30, 33, 28))
  seeds(tmp_path / 'runs', 'weight-decay-0', (8, 14, 11))
  seeds(tmp_path / 'runs', 'v-bias', (29, 30, 31))  # decided
  for seed in THREE:
    write_synthetic(tmp_path / f'runs/synthetic-{seed}', 'default', seed=seed, sink=(12 + seed,))
  look, axis = paper_report(runs(tmp_path / 'runs'), tmp_path / 'a').undecided
  assert (look.budget, look.protocol, look.seeds) == ('smoke', 'paper', [3, 4])
  assert 'weight-decay-0' in look.trials and 'v-bias' not in look.trials
  assert (axis.budget, axis.protocol, axis.trials) == ('', '', ['synthetic-default'])
  written = json.loads((tmp_path / 'a/report.json').read_text())
  assert written['undecided'][0] == json.loads(json.dumps(dataclasses.asdict(look)))
  for trial in look.trials:
    for seed in look.seeds:
      write(tmp_path / f'runs/{trial}-{seed}', trial, seed=seed,
            sink=(30 if trial == 'default' else 11,))
  looks = paper_report(runs(tmp_path / 'runs'), tmp_path / 'b').undecided
  assert [look.budget for look in looks] == ['']  # whatever is undecided with five seeds stays so


def test_claims_that_no_seed_decides_are_not_asked_again(tmp_path):
  for trial in ('default', 'batch-128', 'batch-256', 'batch-1024'):
    seeds(tmp_path, trial, (30, 33, 28))
  write(tmp_path / 'more', 'batch-256', seed=3, status='diverged', step=300)
  group, = groups_of(runs(tmp_path))
  look = lambda key: second_look(
      [(BY_KEY[key], judge(BY_KEY[key], group, spread_of(group)))], group)
  assert look('batch-size') is None
  seeds(tmp_path, 'weight-decay-0', (9, 10, 11))  # on its level
  seeds(tmp_path, 'weight-decay-0.5', (30, 40, 35))
  group, = groups_of(runs(tmp_path))
  assert look('no-weight-decay') is None
  assert look('weight-decay').seeds == [3, 4]


def test_a_seed_without_a_sink_is_shown_as_never(tmp_path):
  for trial, sink in (('lr-8e-4', 20), ('default', 20), ('lr-2e-4', 0), ('lr-1e-4', 0)):
    seeds(tmp_path, trial, (sink,) * 3)
  part = verdict(tmp_path, 'learning-rate-delay').parts[-1]
  assert len(part.never) == 3
  assert 'no sink emerged in lr-1e-4 with seed 0: never (at least 1,000)' in part_words(part)


def test_the_interval_that_is_shown_is_the_one_that_decides():
  spread, values = pooled(0.01, 8), {0: 3.0, 1: 3.1, 2: 3.2}
  low = unjudged('valid_loss', ('default',), values, 3.5, True)  # the mean is on the wrong side
  high = unjudged('valid_loss', ('default',), values, 3.0, True)
  assert low.judge(spread, 6).high > low.judge(spread, 1).high
  assert high.judge(spread, 6).high == high.judge(spread, 1).high


def test_numbers_of_any_size_are_shown(tmp_path):
  spread = Spread({}, {})
  values = {0: -20.0, 1: 30.0, 2: 690.0}
  part = unjudged('massive', ('default',), values, 0.7, True).judge(spread, 9)
  assert len(part_words(part)) < 150 and part.high > 1e100


def test_sink_1_before_training_is_that_of_step_0(tmp_path):
  write(tmp_path / 'run')
  run, = runs(tmp_path)
  assert metric_summary('first_sink_1', [run]).mean == 0
  curves = dataclasses.replace(run.probe.curves, step=[20, 1000])
  late = dataclasses.replace(run, probe=dataclasses.replace(run.probe, curves=curves))
  assert metric_summary('first_sink_1', [late]) is None


def test_four_outcomes_are_shown_everywhere(tmp_path):
  for trial in ('default', 'nope', 'absolute', 'learned'):
    seeds(tmp_path / 'runs', trial, (30, 33, 28))
  seeds(tmp_path / 'runs', 'v-bias', (30, 33, 28))
  seeds(tmp_path / 'runs', 'weight-decay-0', (8, 14, 11))
  seeds(tmp_path / 'runs', 'post-norm', (0, 0, 0))
  report = paper_report(runs(tmp_path / 'runs'), tmp_path / 'out')
  group, = report.groups
  counts = Counter(verdict.verdict for claim in report.claims for verdict in claim.verdicts)
  assert group.verdicts['does not hold'] == {'': ['post-norm']}
  assert sum(counts.values()) == len(CLAIMS) == sum(
      len(keys) for of in group.verdicts.values() for keys in of.values())
  assert counts.keys() == {'holds', 'does not hold', 'undecided', 'cannot be judged'}
  text = as_text(report)
  source = (tmp_path / 'out/index.html').read_text()
  markdown = (tmp_path / 'out/report.md').read_text().replace('\\', '')
  first, _ = Page(source).text.split('Asked:', 1)
  for verdict_, plural in PLURAL.items():
    one = {'undecided': 'is undecided'}.get(verdict_, verdict_)
    words = f'{counts[verdict_]} {plural if counts[verdict_] != 1 else one}'
    assert words in first and words in ' '.join(text.split())
  table = [line.split('|')[2:-1] for line in markdown.split('\n![')[0].splitlines()[6:]
           if line.startswith('| ')]
  assert [sum(map(int, column)) for column in zip(*table)] == [counts[key] for key in PLURAL]
  undecided = next(claim for claim in report.claims if claim.key == 'no-weight-decay').verdicts[0]
  part, = undecided.parts
  words = f'About {undecided.needed} seeds would decide'
  assert words in markdown and words in source and undecided.needed > 3
  line = ('Sink_1 of weight-decay-0, asked at least 10 %: '
          f'11.00 [{part.low:.2f}, {part.high:.2f}], n = 3 (8.00, 14.00, 11.00): undecided')
  assert line in markdown
  page = Page(source)  # pictures are part of the page, without a script
  assert not page.open and page.tags.count('img') > 1 and 'script' not in page.tags
  (_, drawn), = claim_rows(report.claims).items()
  assert len(drawn) == sum(map(bool, (deciding(claim.verdicts[0].parts)
                                      for claim in report.claims))) > 4
  assert '](claims.png)' in markdown and '://' not in source


def test_a_picture_has_seeds_interval_level_and_the_papers_number():
  part = unjudged('sink_1', ('default',), {0: 27.5, 1: 34.25, 2: 27.6}, 10.0, True).judge(
      Spread({'sink_1': {'nope': Within(0.02, 8)}}, {}), 1)
  place = place_of(part)
  assert list(map(place, part.values)) == pytest.approx([0.275, 0.3425, 0.276])
  assert (place(part.level), place(part.paper)) == pytest.approx((0.1, 0.1818))
  assert part.paper == 18.18
  assert (place(part.low), place(part.high)) == pytest.approx((part.low / 100, part.high / 100))
  ended = unjudged('converges', ('softmax-p-2',), {0: 0.0}, 0.5, False).judge(None, 1)
  assert deciding([ended]) is None and deciding([ended, part]) is part


def test_ratios_are_compared_by_their_logarithms_and_steps_by_the_least_they_can_be(tmp_path):
  for seed, ratio in enumerate((4, 8, 16)):
    write(tmp_path / f'v{seed}', seed=seed, hidden_ratio=[1, 1, ratio], sink=(30 * (seed < 2),))
  known = {name: metric_summary(name, runs(tmp_path)) for name in ('massive', 'emergence_step')}
  assert list(known['massive'].by_seed.values()) == [math.log(x) for x in (4, 8, 16)]
  assert known['emergence_step'].by_seed == {0: 1000, 1: 1000, 2: 1000}  # the last step
  assert known['emergence_step'].values[2] == math.inf  # which tables show as never


@pytest.mark.parametrize('metric, freedom, variance', [
    ('sink_1', 6, 0.005), ('sink_1', 8, 0.01), ('valid_loss', 6, 16.0), ('valid_loss', 0, 0.0)])
def test_the_simulated_rule_is_the_rule(metric, freedom, variance):
  rng = np.random.default_rng(1)
  values = np.clip(rng.normal(16, rng.choice((2, 6), (200, 1, 1)), (200, 2, 4)), 0, 100)
  values[:, 1] += 20
  found = calibration.verdicts_of(values, 10.0, np.full(200, variance), np.full(200, freedom),
                                  angle=metric == 'sink_1')
  squares = variance * freedom * typical(max(freedom, 1))
  spread = Spread({metric: {'other': Within(squares, freedom)}}, {})
  for claim, expected in zip(values, found):
    parts = [unjudged(metric, ('default',), dict(enumerate(part)), 10.0, True).judge(spread, 2)
             for part in claim]
    held = [part.held for part in parts]
    assert expected == (-1 if False in held else 0 if None in held else 1)
  assert set(found) == {1, 0}


def test_false_verdicts_are_as_few_as_the_committed_table_says():
  committed, quick = json.loads(CALIBRATION.read_text()), calibration.calibrate(2_000)
  for kind in ('on the level', 'true'):
    assert quick[kind].keys() == committed[kind].keys()
    for name, rates in committed[kind].items():
      for verdict_, percent in rates.items():
        error = 100 * math.sqrt(max(percent, 0.5) / 100 * (1 - percent / 101) * (1 / 2e3 + 1 / 1e4))
        assert quick[kind][name][verdict_] == pytest.approx(percent, abs=4 * error), name
  for rates in committed['on the level'].values():
    assert rates['holds'] + rates['does not hold'] <= 100 * FALSE_VERDICTS
  assert committed['runs'] == calibration.RUNS >= 10_000
  most, = re.findall(r'at most ([\d.]+) % get a verdict', committed['found'])
  assert f'most {most} % get a verdict' in ' '.join(TEXTS['docs/experiments.md'].split())


@pytest.mark.full
def test_the_committed_table_can_be_made_again():
  assert calibration.calibrate(calibration.RUNS) == json.loads(CALIBRATION.read_text())


# Standard deviations over seeds on the scale of each unit: those of the runs in results/paper, but
# of rates a third of theirs, as the paper's models have twenty times as many heads.
SPREADS = {'percent': 1.0, 'nats': 0.012, 'ratio': 0.15, 'steps': 100.0}
CLEAR = 6  # standard deviations of seeds between a number and its level


@pytest.fixture(scope='module')
def paper(tmp_path_factory):
  group, = groups_of(runs(paper_runs.write_paper(tmp_path_factory.mktemp('paper') / 'full')))
  return group


@pytest.mark.full
def test_the_papers_own_numbers_are_never_decided_against(paper):
  rng, draws = np.random.default_rng(0), 15
  held, least = dict.fromkeys(BY_KEY, 0), dict.fromkeys(BY_KEY, math.inf)
  for _ in range(draws):
    group = dataclasses.replace(paper, trials={
        trial: tuple(drawn(run, seed, rng) for seed in THREE for run in members)
        for trial, members in paper.trials.items()})
    spread = spread_of(group)
    for key, claim in BY_KEY.items():
      found = judge(claim, group, spread)
      assert found.verdict in ('holds', 'undecided'), (key, found.why)
      held[key] += found.verdict == 'holds'
      least[key] = min(least[key], distance(claim, paper, spread))
  assert {key for key in BY_KEY if least[key] > CLEAR and held[key] < draws} == set()
  open_ = {key: draws - held[key] for key in BY_KEY if held[key] < draws}
  print(f'undecided in so many of {draws} draws: {open_}')
  # With these spreads three seeds are enough for most of the paper's claims.
  assert sum(held.values()) > draws * len(CLAIMS) / 2


def distance(claim, group, spread):
  """The least distance of a number of the claim to its level, in standard deviations of seeds."""
  numbers = [(part.metric, part.mean, part.level, len(part.trials))
             for part in judge(claim, group, None).parts]
  for trial, metric, level, _ in (LEVELS[kind] for kind in claim.presupposes if kind in LEVELS):
    numbers.append((metric, metric_summary(metric, group.done(trial)).mean, level, 1))
  least = math.inf
  for metric, mean, level, trials in numbers:
    variance = spread.pool(metric, [''] * trials).variance
    if variance:
      rate = METRICS[metric].unit == 'percent' and trials == 1
      scale = calibration.arcsine if rate else METRICS[metric].scaled
      least = min(least, abs(scale(mean) - scale(level)) / math.sqrt(variance))
  return least


def drawn(run, seed, rng):
  """A run as another seed of it could have come out."""
  points = lambda: rng.normal(0, SPREADS['percent'])
  rate = lambda value: None if value is None else float(np.clip(value + points(), 0, 100))
  factors = lambda values: values and [
      None if value is None else value * math.exp(rng.normal(0, SPREADS['ratio']))
      for value in values]
  nats = lambda: rng.normal(0, SPREADS['nats'])
  setup = dataclasses.replace(run.known_setup, seed=seed)
  if run.status != 'done':
    return dataclasses.replace(run, setup=setup, name=f'{run.name}-{seed}')
  loss, probe, ratios = nats(), run.probe, run.probe.ratios
  sink = [rate(value) for value in probe.sink]
  probe = dataclasses.replace(
      probe, sink=sink, sink_1=sink[0], sink_extra_key=rate(probe.sink_extra_key),
      emergence_step=probe.emergence_step and max(
          0, probe.emergence_step + rng.normal(0, SPREADS['steps'])),
      ratios=ratios | {key: factors(ratios[key]) for key in (
          'hidden', 'hidden_before_norm', 'sink_token')})
  analyses = {name: dict(found) for name, found in run.analyses.items()}
  if 'removed' in analyses:
    analyses['removed']['sink_1'] = rate(analyses['removed']['sink_1'])
    analyses['removed']['valid_loss'] += nats()
  if 'window' in analyses:
    for key in ('absolute_first', 'relative_first'):
      analyses['window'][key] *= math.exp(rng.normal(0, SPREADS['ratio']))
  return dataclasses.replace(
      run, setup=setup, name=f'{run.name}-{seed}', probe=probe, analyses=analyses,
      losses={key: value + loss for key, value in run.losses.items()})
