"""Reports of runs written by hand: numbers, sentences, page."""

import copy
import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from configs import quickstart
from sink_jax.evaluate import plots
from sink_jax.report.comparison import as_text, build, columns, compare
from sink_jax.report.jsontext import UNWRITTEN, rounded, to_json
from sink_jax.report.read_runs import read_run, read_runs
from sink_jax.report.records import baseline_of
from sink_jax.report.sentences import overview, sentences, verdict
from tests.commands import run_here

ROOT = Path(__file__).parents[2]
TRIALS = {name: quickstart.get_config(name).to_dict() for name in quickstart.TRIALS}


def probe_row(step, sink_1, largest, **values):
  return dict(kind='probe', step=step, sink_1=sink_1, sink=[sink_1, 0.0], sink_bias_slot=None,
              sink_bias_slot_released=None, largest_importance=largest, mean_importance=largest / 2,
              mean_bias_slot=None, raw_mass_1=largest / 2, largest_raw_mass_1=largest,
              raw_row_mass=1.0, value_ratio=[0.9, 0.25, 0.5]) | values


def write(folder, trial='text-softmax', probed=(), valid=None, status='done', details=None,
          config=None):
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(config or TRIALS[trial]))
  if status:
    (folder / 'status.json').write_text(json.dumps({'status': status, **(details or {})}))
  events = [*probed, *([dict(kind='valid', step=1200, **valid)] if valid else [])]
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in events))
  return read_run(folder, folder.name)


GROWING = [probe_row(0, 0.0, 0.07), probe_row(400, 8.0, 0.25), probe_row(800, 12.5, 0.4),
           probe_row(1200, 45.5, 0.625, raw_mass_1=0.2, key=1)]
EXTRA_KEY = dict(mean_bias_slot=0.25, sink_bias_slot=50.0, sink_bias_slot_released=51.5,
                 raw_row_mass=0.75)
FLAT = [probe_row(0, 0.0, 0.07), probe_row(1200, 0.0, 0.1506)]


def test_numbers_are_the_metrics(tmp_path):
  run = write(tmp_path / 'a', probed=GROWING, valid=dict(valid=1.5, code=1.25, docs=1.75))
  probe, setup = run.probe, run.setup
  assert run.status == 'done' and run.step == probe.step == 1200
  assert (probe.sink_1, probe.largest_importance, probe.raw_mass_1) == (45.5, 0.625, 0.2)
  assert (probe.value_ratio, probe.value_ratio_block) == (0.25, 2)
  assert probe.emergence_step == 800 and run.losses == dict(valid=1.5, code=1.25, docs=1.75)
  assert probe.curves.largest_importance == [0.07, 0.25, 0.4, 0.625]
  assert setup.tokens == 1200 * 32 * 64 and setup.attention == 'softmax' and not run.proxy
  assert {column.heading: column.cells[0] for column in columns([run])} == {
      'variant': 'a', 'valid loss': '1.500', 'Sink_1 %': '45.5', 'largest import.': '0.625',
      'raw mass, first': '0.200', 'raw mass, row': '1.000', 'value ratio (block)': '0.25 (2)',
      'sink emerged': 'step 800'}


@pytest.mark.parametrize('eps, words', [('1e-06', 'softpick'),
                                        ('1e-08', 'softpick, AbsSum(eps=1e-08)')])
def test_softpick_is_called_by_its_name(tmp_path, eps, words):
  config = copy.deepcopy(TRIALS['text-softmax'])
  config['attention'] |= {'similarity': 'Softpick()', 'normalizer': f'AbsSum(eps={eps})'}
  run = write(tmp_path / 'a', probed=GROWING, config=config)
  assert run.setup.attention == words and run.proxy


def test_a_cap_of_scores_is_told(tmp_path):
  config = copy.deepcopy(TRIALS['text-softmax'])
  config['attention'] |= {'similarity': 'CappedExp(cap=50.0)'}
  run = write(tmp_path / 'a', probed=GROWING, config=config)
  assert run.setup.attention == 'softmax of scores capped at 50'


def test_sink_and_no_sink(tmp_path):
  sink, none = write(tmp_path / 'a', probed=GROWING), write(tmp_path / 'b', probed=FLAT)
  assert verdict(sink) == 'sink' and verdict(none) == 'none'
  assert sentences(sink).startswith('Sink_1 reached 45.5 % (at or above 10 % since step 800)')
  assert sentences(none) == (
      'No sink emerged in 1200 steps: Sink_1 was never above 0 %; the largest importance of the '
      'first token was 0.15, below epsilon 0.3.')
  assert 'in 1 of 2 variants (a).' in overview([sink, none])


def test_faint_and_faded(tmp_path):
  faint = write(tmp_path / 'a', probed=[*FLAT[:1], probe_row(1200, 6.25, 0.35)])
  faded = write(tmp_path / 'b', probed=[*GROWING, probe_row(1250, 5.0, 0.2)])
  assert verdict(faint) == 'faint' and '6.2 %' in sentences(faint)
  assert 'was 0.35, above epsilon 0.3' in sentences(faint)
  assert verdict(faded) == 'faded'
  assert 'rose to 45.5 % at step 1200 and ended at 5.0 %' in sentences(faded)


@pytest.mark.parametrize('rate, share, mass, row, kind, words', [
    (100.0, 0.7, 0.014, 0.02, 'proxy only', 'It is not a sink of the weights'),
    (100.0, 0.7, 0.82, 1.1, 'sink', 'The weights agree'),
    (0.0, 0.09, 0.529, 10.2, 'none', 'The weights agree: they give the first token a mean raw mass '
     'of 0.529, of 10.200 in a row (5 %)'),
    (0.0, 0.09, 2.0, 4.0, 'none', 'The weights disagree'),
    (0.0, 0.09, -0.1, -0.5, 'none', 'of -0.500 in a row.')])
def test_unnormalised_attention_is_judged_by_raw_mass(rate, share, mass, row, kind, words,
                                                      tmp_path):
  run = write(tmp_path / 'a', 'text-sigmoid', [FLAT[0], probe_row(
      1200, rate, share, raw_mass_1=mass, raw_row_mass=row)])
  assert run.proxy and verdict(run) == kind and words in sentences(run)
  assert f'{rate:.1f}*' in as_text(build([run]))
  assert ('1 of 1' in overview([run])) == (kind == 'sink')


def test_an_extra_key_is_compared_with_softmax(tmp_path):
  softmax = write(tmp_path / 'softmax', probed=GROWING, valid=dict(valid=1.5))
  run = write(tmp_path / 'k', 'text-k-bias', [
      probe_row(0, 0.0, 0.07, **EXTRA_KEY), probe_row(1200, 0.0, 0.05, **EXTRA_KEY)],
      dict(valid=1.75))
  other = write(tmp_path / 'other', 'backcopy-softmax', GROWING)
  assert baseline_of(run, [other, run, softmax]) is softmax and baseline_of(softmax, [run]) is None
  said = sentences(run, softmax)
  assert 'took mean weight 0.25 and has Sink_* 50.0 % (51.5 % as the official ' in said
  assert "largest importance fell from 0.62 (softmax) to 0.05" in said
  assert '1.750, against 1.500 of softmax: the two have not learnt equally much' in said
  at = lambda run, importance: dataclasses.replace(run, probe=dataclasses.replace(
      run.probe, largest_importance=importance))
  assert 'rose from 0.05' in sentences(at(run, 0.2), at(softmax, 0.05))
  assert 'stayed at 0.05, as in softmax' in sentences(run, at(softmax, 0.05))
  assert 'fell' not in sentences(run) and 'Sink_* %' in as_text(build([run])).replace('\n', ' ')


@pytest.mark.parametrize('status, details, words', [
    ('diverged', dict(step=1300, loss='nan'),
     'Diverged at step 1300 of 1200 (loss nan); what follows is of step 1200.'),
    ('interrupted', dict(step=600), 'Interrupted at step 1200 of 1200'),
    ('running', dict(step=0), 'Not finished: last heard of at step 1200'),
    ('failed', dict(error='no memory'), 'Failed: no memory'), (None, {}, 'Not run.')])
def test_a_run_that_is_not_done_says_so(status, details, words, tmp_path):
  run = write(tmp_path / 'a', probed=FLAT, status=status, details=details)
  assert words in sentences(run) and 'Not all runs are done' in overview([run])
  assert f'a ({status or "not run"})' in as_text(build([run]))
  bare = write(tmp_path / 'b', status=status, details=details)
  assert verdict(bare) == 'unknown' and 'No variant' in overview([bare])
  assert ('no probe rows' in sentences(bare)) == (status is not None)
  assert as_text(build([bare]))


@pytest.mark.parametrize('head, words', [
    ('HeadGate()', 'softmax, head gate'), ('HeadNorm(eps=0.1)', 'softmax, HeadNorm(eps=0.1)')])
def test_attention_is_described_with_what_follows_it(tmp_path, head, words):
  config = copy.deepcopy(TRIALS['text-softmax'])
  config['attention']['head'] = head
  assert write(tmp_path / 'a', config=config, probed=FLAT).setup.attention == words


def test_a_run_that_cannot_be_read_is_listed(tmp_path):
  config = copy.deepcopy(TRIALS['text-softmax'])
  config['attention']['similarity'] = 'Unheard()'
  write(tmp_path / 'a', config=config, probed=FLAT)
  report = build(read_runs(tmp_path))
  assert report.groups[0].title == 'Runs that could not be read'
  assert "Unknown Similarity 'Unheard'" in as_text(report)


@pytest.mark.parametrize('change, words', [
    (lambda row: row.pop('largest_importance'), "has no 'largest_importance'"),
    (lambda row: row.pop('value_ratio'), "has no 'value_ratio'"),
    (lambda row: row.pop('sink'), "has no 'sink'"),
    (lambda row: row.update(value_ratio=0.25), 'cannot be read'),
    (lambda row: row.update(value_ratio=[]), 'cannot be read'),
    (lambda row: row.update(null_p99=[3.0]), 'cannot be read')])
def test_a_damaged_row_of_a_probe_ends_no_report(change, words, tmp_path):
  damaged = dict(GROWING[-1])
  change(damaged)
  write(tmp_path / 'runs' / 'a', probed=[*GROWING[:-1], damaged])
  write(tmp_path / 'runs' / 'b', probed=GROWING)
  report = compare(read_runs(tmp_path / 'runs'), tmp_path / 'out')
  a, b = report.runs.values()
  assert a.status == 'unreadable' and a.probe is None and words in a.error
  assert words in ' '.join(as_text(report).split()) and b.probe.sink_1 == 45.5


def test_losses_of_other_sets_alone_end_no_report(tmp_path):
  softmax = write(tmp_path / 'softmax', probed=GROWING, valid=dict(valid=1.5, code=1.25))
  run = write(tmp_path / 'k', 'text-k-bias', FLAT, dict(code=1.25))
  assert 'loss is' not in sentences(run, softmax) and as_text(build([softmax, run]))


@pytest.fixture(scope='module')
def report(tmp_path_factory):
  """All trials of the quick start, with the kinds of results that they may have."""
  base = tmp_path_factory.mktemp('quickstart')
  for name in TRIALS:
    probed = GROWING if 'softmax' in name else FLAT
    if name == 'text-k-bias':
      probed = [row | EXTRA_KEY for row in FLAT]
    losses = dict(valid=float('nan'))
    if 'backcopy' in name:
      losses = dict(valid=2.0, backcopy=0.5, bigram=3.0)
    write(base / 'runs' / name, name, probed, losses)
  return base / 'out', compare(read_runs(base / 'runs'), base / 'out')


def test_groups_by_data(report):
  _, content = report
  text, backcopy = content.groups
  assert text.title == "Language-model text (Stdlib, Bytes)"
  assert text.runs[0].name == 'text-softmax'
  assert backcopy.title == 'Bigram-Backcopy'
  assert [run.name for run in backcopy.runs] == ['backcopy-softmax', 'backcopy-sigmoid']
  headings = [column.heading for column in columns(backcopy.runs)]
  assert headings[1:3] == ['backcopy loss', 'bigram loss']
  assert any('3.049 nats' in note for note in backcopy.notes)
  assert text.different_settings['text-k-bias']['attention.kv_bias'] == 'KBias()'
  assert text.shared_settings['optimizer.learning_rate'] == 2e-2


def test_the_terminal_text_fits(report):
  assert max(map(len, as_text(report[1]).splitlines())) <= 100


@dataclasses.dataclass(frozen=True)
class Shelf:
  name: str
  sizes: tuple[float | None, ...] = ()
  next: 'Shelf | None' = None
  lent: object = dataclasses.field(default=None, metadata=UNWRITTEN)


def test_dataclasses_are_objects_in_json(tmp_path):
  lent = object()
  shelf = rounded(Shelf('a', (1 / 3, float('inf'), 2), Shelf('b', lent=lent), lent))
  assert shelf.next.lent is shelf.lent is lent and shelf.sizes[0] == 0.333333
  assert json.loads(to_json([shelf])) == [
      {'name': 'a', 'sizes': [0.333333, None, 2], 'next': {'name': 'b', 'sizes': [], 'next': None}}]
  with pytest.raises(TypeError):
    to_json({'path': tmp_path})


def test_json_is_plain_and_complete(report):
  out, content = report
  written = json.loads((out / 'report.json').read_text(), parse_constant=pytest.fail)
  assert written['runs']['text-softmax']['losses'] == {'valid': None}
  assert written['runs']['text-k-bias']['probe']['mean_extra_key'] == 0.25
  assert {name for group in written['groups'] for name in group['sentences']} == set(TRIALS)
  again = build(read_runs(out.parent / 'runs'))  # every sentence follows from the records
  for old, new in zip(content.groups, again.groups, strict=True):
    assert old.sentences == new.sentences and old.overview == new.overview
  # What the page does not need of a run stays in its own files.
  for run in written['runs'].values():
    assert not {'train_course', 'valid_course', 'analyses'} & run.keys()
    assert not {'settings', 'experiment'} & run['setup'].keys()


def test_the_page_of_runs_that_know_their_unique_tokens_alone(tmp_path):
  texts = [dict(unique_training_tokens=2_000_000), dict(unique_training_tokens=2_000_000,
                                                        tokens_per_epoch=1200 * 32 * 64 // 4)]
  for name, data in zip('ab', texts):
    write(tmp_path / 'runs' / name, probed=FLAT)
    (tmp_path / 'runs' / name / 'data.json').write_text(json.dumps(data))
  compare(read_runs(tmp_path / 'runs'), tmp_path / 'out')
  page = Page((tmp_path / 'out' / 'index.html').read_text()).text
  assert '2.0 M unique tokens, 2.0 M unique tokens seen 4 times, seed' in page


class Page(HTMLParser):
  VOID = ('meta', 'img', 'br')

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.links, self.text = [], [], [], ''
    self.feed(text)

  def handle_starttag(self, tag, attributes):
    self.tags.append(tag)
    self.links += [v for k, v in attributes if k in ('src', 'href')]
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data


def test_the_page_stands_alone(report):
  out, content = report
  source = (out / 'index.html').read_text()
  page = Page(source)
  pictures = [picture.file for group in content.groups for picture in group.pictures]
  assert not page.open and page.tags.count('figure') == len(pictures) == 2
  assert page.tags.count('img') == 2
  assert page.links and all(link.startswith('data:image/webp;base64,') for link in page.links)
  assert 'script' not in page.tags and 'url(' not in source and '@import' not in source
  assert '://' not in source and 'prefers-color-scheme: dark' in source
  for name in TRIALS:
    assert name in page.text
  assert 'Sink1 reached 45.5\N{NO-BREAK SPACE}% (at or above' in page.text
  assert all((out / name).read_bytes().startswith(b'\x89PNG') for name in pictures)
  markdown = (out / 'report.md').read_text()
  assert all(f']({name})' in markdown for name in pictures) and '| 45.5 |' in markdown


def test_a_notebook_shows_a_run(tmp_path):
  run = write(tmp_path / 'a', probed=GROWING, valid=dict(valid=1.5))
  figure, axes = plots.canvas(4, 3)
  assert run.plot(ax=axes[0, 0]) is figure and run.plot().axes
  assert axes[0, 0].lines[0].get_ydata().tolist() == [0.0, 8.0, 12.5, 45.5]
  with pytest.raises(ValueError, match='b has no rows of the probe'):
    write(tmp_path / 'b').plot()


def test_missing_checkpoints_are_named(report):
  notes = [note for group in report[1].groups for note in group.notes]
  assert sum('No attention map of' in note for note in notes) == len(TRIALS)


def test_an_empty_folder_names_the_remedy(tmp_path):
  with pytest.raises(ValueError, match='python -m sink_jax sweep'):
    read_runs(tmp_path)
  code, _, error = run_here('report', f'--runs={tmp_path / "none"}', f'--out={tmp_path / "out"}')
  assert code == 1 and error.startswith('error: ') and '\n' not in error
  assert 'sink_jax sweep' in error and not (tmp_path / 'out').exists()
