"""The card: its sentences follow from rows, and each number has a null or a control."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import card as cards
from sink_jax.analyses.card_parts import check_parts, remove_parts
from sink_jax.analyses.runner import Result, find
from sink_jax.analyses.sentences import by_text
from sink_jax.io.terminal import escaped
from sink_jax.models.transformer import init_params
from sink_jax.report.markdown import of_runs
from tests.analyses.small import small_run
from tests.analyses.test_signature import planted_maps

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def made():
  said = []
  run = small_run()
  untrained = dataclasses.replace(run, params=init_params(run.config, 1))
  card = sj.card(
    untrained,
    say=said.append,
    sequences=4,
    length=72,
  )
  return card, said


def test_a_page_with_all_parts(made, tmp_path):
  card, said = made
  assert [line.split(':')[0] for line in said] == list(cards.PARTS.values())

  page, text, numbers, explorer, *pictures = card.write(
    tmp_path / 'card', 'sink-jax card --checkpoint=x'
  )

  assert [path.stem for path in pictures] == list(cards.PARTS)
  assert not re.search(r'(src|href)="(?!data:|#)', page.read_text())
  assert page.read_text().count('<img') == 5
  assert 'nan' not in text.read_text().lower()

  assert 'id="explorer"' in explorer.read_text()
  assert card._repr_html_().startswith('<iframe')
  stored = json.loads(numbers.read_text())
  rows = stored['rows']
  assert {row['part'] for row in rows['cache']} >= {'mass', 'cache', 'advice'}
  assert all('role' in row for row in rows['cache'] if row['part'] == 'mass')
  assert 1 <= len(card.sentences)
  assert all(f'- {line[:9]}' in text.read_text() for line in card.sentences)
  for part in ('signature', 'edits'):
    assert {row['source_text'] for row in rows[part]} == set(cards.TEXTS)
  serving = stored['serving']
  assert list(serving['loss']) == list(cards.TEXTS)
  for loss in serving['loss'].values():
    assert f'{loss:.3f} (' in text.read_text()
  assert serving['loss_of_equal_chances'] == pytest.approx(np.log(258), rel=1e-5)
  assert serving['cache_bytes_per_token'] == 2 * 2 * 2 * 4 * 2  # K and V, blocks, heads, Dh, bytes


def test_an_untrained_model_has_no_finding(made):
  card, _ = made
  assert 'is not shown to be a sink in any text: ' in card.sentences[0]
  assert not any(
    'massive' in line or 'marks' in line or re.match('[1-9] of . edits', line)
    for line in card.sentences
  )
  [edits] = [line for line in card.sentences if ' edits cost more' in line]
  assert edits.endswith('of the loss, in all texts (docstrings, code, manual).')


def test_the_card_of_arrays_has_what_arrays_tell(tmp_path):
  hidden = np.random.default_rng(0).normal(size=(6, 3, 40, 16))
  hidden[:, 1, 0, 7] = 500
  card = sj.card_of(name='theirs', attentions=list(planted_maps()), hidden=hidden)
  sink, massive = card.sentences

  assert sink.startswith('The first token is a sink: in 8.3 % of heads')
  assert 'random positions' in sink
  assert 'Token 1 has a massive activation in channel 7 after block 2' in massive

  # Without importances there is nothing to draw.
  page, text, numbers = sj.card_of(hidden=hidden).write(tmp_path)
  assert '.png' not in text.read_text()
  assert 'massive activation' in text.read_text()


def sentences(part, rows):
  return cards.Card('x', {part: Result(find(part), rows, [])}).sentences


def test_the_sentence_about_a_cache_says_what_fewer_first_tokens_cost():
  said = {'part': 'advice', 'words': 'Keep what was tried.'}
  of_all = {'part': 'cache', 'size': 32, 'positions': 'text'}
  none = of_all | {'first': 0, 'recent': 32, 'change': 35.0}
  none |= {'more': 34.6, 'more_low': 30.0, 'more_high': 39.0, 'enough': False}
  one = of_all | {'first': 1, 'recent': 31, 'change': 1.0}
  one |= {'more': 0.6, 'more_low': 0.2, 'more_high': 0.95, 'enough': True}
  four = of_all | {'first': 4, 'recent': 28, 'change': 0.4, 'low': -0.1, 'high': 0.9}
  held = four | {'part': 'held out'}
  renumbered = four | {'positions': 'cache', 'change': 7.0}
  other_size = none | {'size': 16, 'change': 60.0}

  # Whether it is safe or not, the words have the numbers of a cache that was tried on both halves.
  [on_both] = sentences('cache', [said, none, one, four, other_size, held, renumbered])
  assert on_both == (
    'Keep what was tried. By first tokens, in a cache of 32, the loss changes by +35.0 % with 0, '
    '+1.0 % with 1, +0.4 % with 4. With 1 instead of 4 it changes by +0.60 % (+0.20 to +0.95), '
    'so 1 is enough.'
  )

  one |= {'more_high': 1.05, 'enough': False}
  [on_one] = sentences('cache', [said, none, one, four])
  assert on_one.startswith(
    'Keep what was tried. The best, the first 4 and the last 28 tokens, changes the loss by +0.4 % '
    '(-0.1 to +0.9). By first tokens, '
  )
  assert on_one.endswith('Fewer than 4 are not shown to be enough.')


def quantised(what, name, change, spared, recovered):
  """A row of four runs, whose range is 0.02 on both sides."""
  row = {'part': 'all', 'what': what, 'quantiser': name, 'tool': 'llama.cpp', 'bits': 4.5}
  row |= {'spared': spared, 'change': change, 'recovered': recovered}
  row['verdict'] = 'destroyed' if change > 2.3 else 'undecided' if change > 0.05 else 'safe'
  for sign, bound, end in ((-1, 'low', 'least'), (1, 'high', 'most')):
    row |= {bound: change + sign * 0.104, f'recovered_{bound}': recovered + sign * 0.1}
    row |= {end: change + sign * 0.02, f'recovered_{end}': recovered + sign * 0.02}
  return row


def test_sentences_about_quantisation_have_their_controls():
  rows = [
    quantised(*case, spared, recovered)
    for case in (
      ('activations', 'int8 per tensor', 0.771),
      ('activations', 'int8 per token', 3.0),
      ('cache', 'q8_0', 0.003),
      ('cache', 'q4_0', 0.079),
    )
    for spared, recovered in (('none', 0), ('sinks', 0.629), ('random', 0.03))
  ]
  one_run = {'quantiser': 'one run', 'least': None, 'most': None}
  words, caches = sentences('quantisation', [*rows, rows[-3] | one_run])

  assert (
    'int8 per tensor +0.77 (+0.67 to +0.88), undecided, of which sparing the sinks recovers '
    '+0.63 (+0.53 to +0.73), then undecided, and sparing as many random tokens recovers +0.03, '
    'within noise' in words
  )
  assert 'int8 per token +3.00 (+2.90 to +3.10), destroyed' in words
  # What four runs do not tell from nothing is within noise, and what one run says is not quoted.
  assert 'a value, +0.00, within noise (-0.10 to +0.11), safe;' in caches
  assert 'a value, +0.08 (-0.02 to +0.18), undecided (' in caches
  assert 'one run' not in caches


@pytest.mark.parametrize(
  'mean, least, most, words',
  [
    (0.7712, 0.70, 0.78, '+0.77'),
    (0.7712, 0.50, 0.91, '+0.8'),
    (10.42, 8.0, 13.0, '+10'),
    (0.05, 0.02, 0.08, '+0.05, within noise'),
    (-0.05, -0.051, -0.049, '-0.05'),
    (0.7712, None, None, '+0.77'),
    (-0.002, -0.0021, -0.0019, '-0.00'),
  ],
)
def test_digits_are_those_that_runs_share(mean, least, most, words):
  assert of_runs(mean, least, most) == words


@pytest.mark.parametrize(
  'moved_rate, moves', [(0.7, 'the sink moves to token 2'), (0.01, 'no token')]
)
def test_a_sink_that_moves_is_said_to_move(moved_rate, moves):
  numbers = {
    'low': 0,
    'high': 3,
    'control_low': 0,
    'control_high': 0.1,
    'controls': 2,
    'beyond': True,
  }
  everywhere = {
    'edit': 'drop the key',
    'targets': 'position 1',
    'change': 0.08,
    'moved_to': 2,
  }
  everywhere |= {'moved_rate': moved_rate, 'rate_before': 0.01} | numbers
  in_heads = {
    'edit': 'drop the key in sink heads',
    'targets': 'position 1',
    'change': 2.0,
  } | numbers
  assert moves in sentences('edits', [everywhere, in_heads])[1]
  assert len(sentences('edits', [everywhere | {'change': 3.0}, in_heads])) == 1


def said(part, rows):
  return cards.Card('x', {part: Result(find(part), rows, [])}).sentences


def measured(measure, text, value, beyond, **places):
  """A row of the signature."""
  row = {
    'measure': measure,
    'source_text': text,
    'value': value,
    'beyond': beyond,
  }
  row |= {
    'low': value / 2,
    'high': 2 * value,
    'uniform': 0,
    'untrained': value / 100,
  }
  return row | {'position': 1, 'block': 3} | places


def test_a_sentence_says_in_which_texts_a_finding_holds():
  rows = [
    measured('sink rate', text, value, value > 0.1)
    for text, value in (
      ('prose', 0.5),
      ('code', 0.05),
      ('manual', 0.4),
    )
  ]
  rows += [
    measured('massive activation', text, value, True, channel=channel)
    for text, value, channel in (
      ('prose', 900, 7),
      ('code', 800, 7),
      ('manual', 700, 8),
    )
  ]
  rows += [
    measured('value norm ratio', text, value, True)
    for text, value in (
      ('prose', 0.1),
      ('code', 0.2),
      ('manual', 0.3),
    )
  ]
  drained, sink, massive, other = said('signature', rows)
  # What holds in all texts comes first, with the range of its numbers.
  assert drained == (
    'In all texts (prose, code, manual), the value of the first token is 0.10 to 0.30 times as '
    'long as those of the others in block 3, where it is shortest (nulls: no effect 0, untrained '
    '0.001 to 0.003).'
  )
  assert sink.startswith('In prose and manual (not in code), the first token is a sink: in 40.0 to')
  assert '(99 % interval 20.0 to 100.0 %; nulls: no effect 0, untrained 0.4 to 0.5)' in sink
  assert massive.startswith('In prose and code (not in manual), token 1')
  assert 'channel 7 after block 3: 800 to 900 times' in massive
  assert other.startswith('In manual (not in prose and code), token 1')
  none = [row | {'beyond': False} for row in rows[:3]]
  [words] = said('signature', none)
  assert words.startswith('The first token is not shown to be a sink in any text: Sink_1 is 5.0 to')


def test_only_edits_that_count_are_listed():
  rows = [
    {
      'edit': edit,
      'targets': 'position 1',
      'source_text': text,
      'beyond': beyond,
    }
    | {
      'change': change,
      'low': change / 2,
      'high': 2 * change,
      'matched': 0.05,
    }
    | {'control_low': -0.01, 'control_high': change / 10, 'controls': 1 + (edit != 'leave out BOS')}
    for edit, counts in (
      ('drop the key', (True, True)),
      ('zero the value', (True, False)),
      ('leave out BOS', (False, False)),
    )
    for text, beyond, change in zip(('prose', 'code'), counts, (1.0, 2.0))
  ]
  [words] = said('edits', rows)
  assert words == (
    '1 of 3 edits cost more than each of their controls (1 or 2 for a text), and at least 1 % of '
    'the loss, in all texts (prose, code): hiding the key of position 1 in all heads +1.00 to '
    '+2.00 nats (+0.50 to +4.00; controls -0.01 to +0.20, of the same size +0.05). In prose (not '
    'in code) also a value of zero at position 1 for later tokens +1.00 nats (+0.50 to +2.00; '
    'controls -0.01 to +0.10, of the same size +0.05).'
  )
  one = [{name: x for name, x in row.items() if name != 'source_text'} for row in rows[::2]]
  [words] = said('edits', one)
  assert words.startswith('2 of 3 edits cost more than each of their controls (1 or 2 for a text)')
  assert 'in all texts' not in words and 'BOS' not in words


def test_heads_that_stream_are_those_of_duo_attention():
  roles = {
    (1, 1): 'streams',
    (1, 2): 'streams',
    (1, 3): 'retrieves',
    (1, 4): 'streams',
  }
  roles |= {(3, head): 'retrieves' for head in range(1, 5)}
  rows = [
    {
      'part': 'mass',
      'block': block,
      'head': head,
      'role': role,
      'first': 4,
      'recent': 64,
    }
    | {'key_value_head': 1 + (head > 2), 'uniform': 0.3}
    for (block, head), role in roles.items()
  ]
  assert cards.serving({'cache': rows})['streaming'] == {
    'first': 4,
    'recent': 64,
    'heads': {1: [1, 2, 4], 3: []},
    'key_value_heads': {1: [1], 3: []},
    'duo_attention': [[0, 1], [1, 1]],
  }
  assert said('cache', rows)[0].startswith('3 of 8 heads stream: ')
  assert said('cache', rows)[0].endswith('only these can have a short cache.')


def test_a_card_that_is_killed_goes_on(tmp_path, monkeypatch):
  run = small_run()
  asked = []
  analyse = cards.runner.analyse

  def counted(part, *args, **options):
    asked.append(part)
    if part == 'marking' and killed:
      raise KeyboardInterrupt
    return analyse(part, *args, **options)

  monkeypatch.setattr(cards.runner, 'analyse', counted)
  make = lambda run=run, **options: sj.card(
    run, say=lambda line: None, parts=tmp_path / 'parts', **dict(sequences=4, length=72) | options
  )
  killed = True
  with pytest.raises(KeyboardInterrupt):
    make()
  killed = False
  asked.clear()
  again = make()
  assert asked == ['marking', *['edits'] * 3, 'cache', 'quantisation']
  monkeypatch.setattr(cards.runner, 'analyse', analyse)
  whole = sj.card(
    run,
    say=lambda line: None,
    sequences=4,
    length=72,
  )
  for part, result in whole.results.items():
    assert (again.results[part].rows, again.results[part].models) == (result.rows, result.models)
  assert again.explored.numbers == whole.explored.numbers
  # Another card, or a damaged file, is measured.
  monkeypatch.setattr(cards.runner, 'analyse', counted)
  killed = True
  other = jax.tree.map(np.array, run.params)
  other['embed'][3, 3] += 1
  for changes in (
    dict(run=dataclasses.replace(run, params=other)),
    dict(seed=1),
    dict(source="Stdlib(domains='code')"),
  ):
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
      make(**changes)
    assert 'signature' in asked
  (tmp_path / 'parts' / 'signature.json').write_text('{')
  asked.clear()
  make()
  assert asked == ['signature'] * 3
  remove_parts(tmp_path / 'parts')
  assert not list(tmp_path.iterdir())


def test_a_full_card_has_long_texts_and_as_much_of_each_as_of_one(monkeypatch):
  asked = {}

  def analyse(part, run, source='', **options):
    asked[part] = options
    return Result(find(part), [], [])

  monkeypatch.setattr(cards.runner, 'analyse', analyse)
  monkeypatch.setattr(cards, 'explore', lambda model: None)
  make = functools.partial(sj.card, small_run(), say=lambda line: None)

  make()
  assert asked['edits'] == {'sequences': 12, 'controls': 2} and asked['cache'] == {}
  make(full=True)
  assert asked['edits'] == {} and asked['cache'] == {'length': 2048, 'least': 8}
  make(full=True, length=96)  # a length that is asked for
  assert asked['cache']['length'] == 96


@pytest.mark.parametrize(
  'folder', sorted((ROOT / 'results' / 'cards').iterdir()), ids=lambda folder: folder.name
)
def test_committed_cards_say_what_their_rows_say(folder):
  stored = json.loads((folder / 'card.json').read_text())
  results = {part: Result(find(part), rows, []) for part, rows in stored['rows'].items()}
  page = (folder / 'card.md').read_text()

  assert stored['format'] == cards.FORMAT
  assert cards.Card(stored['model'], results).sentences == stored['sentences']
  for line in stored['sentences']:
    assert escaped(line) in page
  assert f'--out=results/cards/{folder.name}' in page


def test_the_page_of_cards_describes_the_picture_of_smollm2():
  rows = json.loads(
    (ROOT / 'results' / 'cards' / 'SmolLM2-135M-Instruct' / 'card.json').read_text()
  )['rows']
  [heads, *_] = by_text(
    [row for row in rows['signature'] if row['measure'] == 'importance']
  ).values()
  empty = {row['block'] for row in heads} - {row['block'] for row in heads if row['value'] > 0.3}

  assert empty == {1, 2, 3, 11, 12}
  assert [row['block'] for row in heads if row['value'] > 0.95] == [19, 19]


def stored_rows(name, part):
  return json.loads((ROOT / 'results' / 'cards' / name / 'card.json').read_text())['rows'][part]


def words_of(page):
  return ' '.join((ROOT / 'docs' / page).read_text().split())


def test_what_an_attention_sink_is_quotes_the_card_of_smollm2():
  measured = [row for row in stored_rows('SmolLM2-135M-Instruct', 'edits') if 'change' in row]
  of = lambda edit: [row for row in measured if row['edit'] == edit]
  changes = lambda rows: [row['change'] for row in rows]
  most = lambda rows, key: f'{max(row[key] for row in rows):.2f}'

  def span(values):
    return f'{min(values):.1f} to {max(values):.1f}'

  value, cap = of('zero the value'), of('cap the massive channels of sinks')
  heads = of('drop the key in sink heads')
  matched = span([row['matched'] for row in heads])
  page = words_of('attention_sink.md')
  for quoted in (
    f'costs SmolLM2 {span(changes(value))} nats, at a random token at most '
    f'{most(value, "control_high")}',
    f'massive channels {span(changes(cap))} nats, on channels as large at most '
    f'{most(cap, "matched")}',
    f'rises by {span(changes(heads))} nats, for a random token by at most '
    f'{most(heads, "control_high")}, and by {matched}',
  ):
    assert quoted in page


def test_the_page_of_cards_quotes_how_many_first_tokens_a_cache_needs():
  without = []
  for folder in (ROOT / 'results' / 'cards').iterdir():
    tried = [row for row in stored_rows(folder.name, 'cache') if 'more' in row]
    largest = {row['first']: row for row in tried if row['size'] == max(r['size'] for r in tried)}
    assert largest[1]['enough']
    if folder.name.startswith(('SmolLM2', 'Gemma3')):
      without.append(largest[0]['change'])

  words = f'rises by {min(without):.0f} to {max(without):.0f} %'
  assert words in words_of('card.md')


def test_the_page_of_cards_quotes_the_mark_of_the_desk_model():
  rows = stored_rows('softmax', 'marking')
  first, second = (row for row in rows if row['part'] == 'key')
  page = words_of('card.md')

  assert (first['heads'], second['heads']) == (4, 0)
  assert not any(row.get('marks') for row in rows)
  assert f'cosine of {first["cosine"]:.2f} with the mean query' in page
  assert f'other keys {first["cosine_others"]:.2f}' in page


def test_what_is_not_a_part_of_a_card_stays(tmp_path):
  folder = tmp_path / 'parts'
  folder.mkdir()
  (folder / 'signature.json').write_text('{}')
  (folder / 'thesis.txt').write_text('mine')

  remove_parts(folder)
  assert [path.name for path in folder.iterdir()] == ['thesis.txt']

  (tmp_path / 'link').symlink_to(folder)
  with pytest.raises(ValueError, match='--out: .*link must be a folder'):
    check_parts(tmp_path / 'link')


@pytest.mark.parametrize(
  'options, words',
  [
    ({'sequence': 4}, "there is no option 'sequence'"),
    ({'length': 5_000, 'sequences': 32}, 'documents of 5000 tokens'),
  ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(options, words, monkeypatch):
  monkeypatch.setattr(cards, '_measured', None)
  source = f"TextFolder(path='{ROOT / 'docs'}', pattern='*.md')"
  with pytest.raises(ValueError, match=words):
    sj.card(small_run(), say=lambda line: None, source=source, **options)


def test_a_full_card_of_short_documents_has_the_usual_length(tmp_path):
  for n in range(40):
    (tmp_path / f'{n}.txt').write_text(f'{n} is the number of this text, which goes on. ' * 15)
  inputs = {'source': f"TextFolder(path='{tmp_path}')"}

  assert cards._options('cache', small_run(), inputs, full=True) == inputs


def test_a_card_is_written_where_no_edit_could_be_made(tmp_path):
  rows = [{'edit': 'drop the key', 'targets': 'none'}]

  cards.Card('x', {'edits': Result(find('edits'), rows, [])}).write(tmp_path)

  assert (tmp_path / 'card.md').exists() and not (tmp_path / 'edits.png').exists()
