"""The card: its sentences follow from rows by rules, and each number has a null or a control next to it."""

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
from tests.analyses.small import small_run
from tests.analyses.test_signature import planted_maps

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def made():
  said = []
  run = small_run()
  untrained = dataclasses.replace(run, params=init_params(run.config, 1))
  return sj.card(untrained, say=said.append, sequences=4, length=72), said


def test_a_page_with_all_parts(made, tmp_path):
  card, said = made
  assert [line.split(':')[0] for line in said] == list(cards.PARTS.values())
  page, text, numbers, explorer = card.write(tmp_path / 'card', 'sink-jax card --checkpoint=x')
  assert not re.search(r'(src|href)="(?!data:|#)', page.read_text())
  assert page.read_text().count('<img') == 5 and 'nan' not in text.read_text().lower()
  assert 'id="explorer"' in explorer.read_text() and card._repr_html_().startswith('<iframe')
  rows = json.loads(numbers.read_text())['rows']
  assert {row['part'] for row in rows['cache']} >= {'mass', 'cache', 'advice'}
  assert all('role' in row for row in rows['cache'] if row['part'] == 'mass')
  assert 1 <= len(card.sentences) <= 9 and all(
    f'- {line[:9]}' in text.read_text() for line in card.sentences
  )


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
  assert (
    sink.startswith('The first token is a sink: in 8.3 % of heads') and 'random positions' in sink
  )
  assert 'Token 1 has a massive activation in channel 7 after block 2' in massive
  _, text, _ = sj.card_of(hidden=hidden).write(
    tmp_path
  )  # without importances there is nothing to draw
  assert '.png' not in text.read_text() and 'massive activation' in text.read_text()


def test_cache_and_quantisation_sentences_have_their_controls():
  advice = {'part': 'advice', 'size': 32, 'sinks': 4, 'words': 'Keep the first 4.'}
  control = {'part': 'cache', 'first': 0, 'size': 32, 'change': 35.0}
  quantised = [
    {
      'part': 'all',
      'what': 'activations',
      'bits': 8,
      'scale': scale,
      'spared': spared,
      'change': 0.771 if scale == 'per tensor' else 3.0,
      'destroyed': scale == 'per token',
      'recovered': 0.629 if spared == 'sinks' else 0.078,
      'recovered_low': 0.5,
      'recovered_high': 0.7,
    }
    for scale in ('per tensor', 'per token')
    for spared in ('none', 'sinks', 'random')
  ]
  results = {
    part: Result(find(part), rows, [])
    for part, rows in (('cache', [advice, control]), ('quantisation', quantised))
  }
  cache, words = cards.Card('x', results).sentences
  assert cache == 'Keep the first 4. Without first tokens: +35.0 %.'
  assert '+0.77 nats per tensor, of which sparing the sinks recovers 0.63 (0.50 to 0.70)' in words
  assert 'as many random tokens 0.08' in words and '+3.00 nats per token (destroyed)' in words


@pytest.mark.parametrize(
  'folder', sorted((ROOT / 'results' / 'cards').iterdir()), ids=lambda folder: folder.name
)
def test_committed_cards_say_what_their_rows_say(folder):
  stored = json.loads((folder / 'card.json').read_text())
  results = {part: Result(find(part), rows, []) for part, rows in stored['rows'].items()}
  page = (folder / 'card.md').read_text()
  assert cards.Card(stored['model'], results).sentences == stored['sentences']
  assert (
    all(escaped(line) in page for line in stored['sentences'])
    and f'--out=results/cards/{folder.name}' in page
  )


def test_the_page_of_cards_describes_the_picture_of_smollm2():
  rows = json.loads(
    (ROOT / 'results' / 'cards' / 'SmolLM2-135M-Instruct' / 'card.json').read_text()
  )['rows']
  heads = [row for row in rows['signature'] if row['measure'] == 'importance']
  empty = {row['block'] for row in heads} - {row['block'] for row in heads if row['value'] > 0.3}
  assert empty == {1, 2, 3, 11, 12}
  assert [row['block'] for row in heads if row['value'] > 0.95] == [19, 19]
