"""The card: its sentences follow from rows, and each number has a null or a control."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import card as cards
from sink_jax.analyses.runner import Result, find
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
  rows = json.loads(numbers.read_text())['rows']
  assert {row['part'] for row in rows['cache']} >= {'mass', 'cache', 'advice'}
  assert all('role' in row for row in rows['cache'] if row['part'] == 'mass')
  assert 1 <= len(card.sentences) <= 11
  assert all(f'- {line[:9]}' in text.read_text() for line in card.sentences)


def test_an_untrained_model_has_no_finding(made):
  card, _ = made
  assert 'is not shown to be a sink: ' in card.sentences[0]
  assert not any(
    'massive' in line or 'marks' in line or re.match('[1-9] of . edits', line)
    for line in card.sentences
  )


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


def test_cache_and_quantisation_sentences_have_their_controls():
  advice = {
    'part': 'advice',
    'size': 32,
    'sinks': 4,
    'words': 'Keep the first 4.',
  }
  control = {
    'part': 'cache',
    'first': 0,
    'size': 32,
    'change': 35.0,
  }
  quantised = [
    {'part': 'all', 'what': what, 'quantiser': name, 'tool': 'llama.cpp', 'spared': spared}
    | {'change': change, 'low': change - 0.104, 'high': change + 0.104, 'destroyed': change > 2.3}
    | {'least': change - 0.02, 'most': change + 0.02, 'recovered': recovered}
    | {f'recovered_{end}': recovered + d for end, d in (('low', -0.1), ('high', 0.1))}
    | {f'recovered_{end}': recovered + d for end, d in (('least', -0.02), ('most', 0.02))}
    for what, name, change in (
      ('activations', 'int8 per tensor', 0.771),
      ('activations', 'int8 per token', 3.0),
      ('cache', 'q8_0', 0.003),
      ('cache', 'q4_0', 0.079),
    )
    for spared, recovered in (('none', 0), ('sinks', 0.629), ('random', 0.03))
  ]
  quantised.append(quantised[-3] | {'quantiser': 'one run', 'least': None, 'most': None})
  results = {
    part: Result(find(part), rows, [])
    for part, rows in (('cache', [advice, control]), ('quantisation', quantised))
  }
  cache, words, caches = cards.Card('x', results).sentences
  assert cache == 'Keep the first 4. Without first tokens: +35.0 %.'
  assert (
    'int8 per tensor +0.77 (+0.67 to +0.88), of which sparing the sinks recovers '
    '+0.63 (+0.53 to +0.73) and sparing as many random tokens recovers none' in words
  )
  assert 'int8 per token +3.00 (+2.90 to +3.10) (destroyed)' in words
  # What four runs do not tell from nothing is none, and what one run says is not quoted.
  assert 'q8_0 of llama.cpp none (' in caches
  assert 'q4_0 of llama.cpp +0.08 (' in caches
  assert 'one run' not in caches


@pytest.mark.parametrize(
  'mean, least, most, words',
  [
    (0.7712, 0.70, 0.78, '+0.77'),
    (0.7712, 0.50, 0.91, '+0.8'),
    (10.42, 8.0, 13.0, '+10'),
    (0.05, 0.02, 0.08, 'none'),
    (-0.05, -0.051, -0.049, '-0.05'),
    (0.7712, None, None, '+0.77'),
    (-0.002, -0.0021, -0.0019, 'none'),
  ],
)
def test_digits_are_those_that_runs_share(mean, least, most, words):
  assert of_runs(mean, least, most) == words


@pytest.mark.parametrize(
  'moved_rate, moves', [(0.7, 'the sink moves to token 2'), (0.01, 'no token')]
)
def test_a_sink_that_moves_is_said_to_move(moved_rate, moves):
  numbers = {'low': 0, 'high': 3, 'control_low': 0, 'control_high': 0.1, 'beyond': True}
  everywhere = {'edit': 'drop the key', 'targets': 'position 1', 'change': 0.08, 'moved_to': 2}
  everywhere |= {'moved_rate': moved_rate, 'rate_before': 0.01} | numbers
  in_heads = {
    'edit': 'drop the key in sink heads',
    'targets': 'position 1',
    'change': 2.0,
  } | numbers
  sentences = lambda *rows: cards.Card('x', {'edits': Result(find('edits'), [*rows], [])}).sentences
  assert moves in sentences(everywhere, in_heads)[1]
  assert len(sentences(everywhere | {'change': 3.0}, in_heads)) == 1


@pytest.mark.parametrize(
  'folder', sorted((ROOT / 'results' / 'cards').iterdir()), ids=lambda folder: folder.name
)
def test_committed_cards_say_what_their_rows_say(folder):
  stored = json.loads((folder / 'card.json').read_text())
  if stored.get('format') != cards.FORMAT:
    pytest.skip('made before this format: make the card again')
  results = {part: Result(find(part), rows, []) for part, rows in stored['rows'].items()}
  page = (folder / 'card.md').read_text()

  assert cards.Card(stored['model'], results).sentences == stored['sentences']
  for line in stored['sentences']:
    assert escaped(line) in page
  assert f'--out=results/cards/{folder.name}' in page


def test_the_page_of_cards_describes_the_picture_of_smollm2():
  rows = json.loads(
    (ROOT / 'results' / 'cards' / 'SmolLM2-135M-Instruct' / 'card.json').read_text()
  )['rows']
  heads = [row for row in rows['signature'] if row['measure'] == 'importance']
  empty = {row['block'] for row in heads} - {row['block'] for row in heads if row['value'] > 0.3}

  assert empty == {1, 2, 3, 11, 12}
  assert [row['block'] for row in heads if row['value'] > 0.95] == [19, 19]
