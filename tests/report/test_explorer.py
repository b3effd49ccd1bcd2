"""The page to explore: its data survive, and in a browser it shows the numbers of card.json."""

import base64
import json
import re
import zlib

import numpy as np
import pytest

from sink_jax.analyses.card import Card
from sink_jax.analyses.explore import explore
from sink_jax.analyses.models import InputOptions, Model
from sink_jax.analyses.runner import analyse
from sink_jax.evaluate.explored import Explored
from sink_jax.report.explorer import with_explorer
from tests.analyses.small import small_run
from tests.report.browser import in_browser, needs_browser

PAGE = '<!DOCTYPE html><title>x</title><main><h1>x</h1><h2>Part</h2></main></html>'
# Ends when the page has drawn itself.
READY = """
  const element = (id) => document.getElementById(id);
  const pause = () => new Promise((done) => setTimeout(done, 20));
  while (!element('rate').textContent) await pause();
  const change = (id, value) => {
    element(id).value = value;
    element(id).dispatchEvent(new window.Event('input'));
  };
  const press = (id, key) =>
    element(id).dispatchEvent(new window.KeyboardEvent('keydown', { key }));
"""
# Reads what the page shows, before and after each step.
SCRIPT = (
  READY
  + """
  const found = [];
  const texts = (cells) => [...document.querySelectorAll(cells)].map((cell) => cell.textContent);
  const read = () => found.push({
    rate: element('rate').textContent,
    chosen: ['layer', 'head'].map((id) => element(id).selectedOptions[0].text),
    numbers: texts('#numbers td:last-child'),
    attends: element('attends').textContent,
    pressed: [...element('tokens').children].findIndex((x) => x.ariaPressed === 'true') + 1,
  });
  const click = (id, x, y) => {
    const box = element(id).getBoundingClientRect();
    const place = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
    element(id).dispatchEvent(new window.MouseEvent('click', place));
  };
  const steps = [
    () => {},
    () => change('epsilon', 9),
    () => change('k', 2),
    () => click('grid', 0.2, 0.1),
    () => press('grid', 'ArrowRight'),
    () => press('grid', 'ArrowDown'),
    () => change('head', 3),
    () => change('layer', 0),
    () => change('text', 1),
    () => element('tokens').children[4].click(),
    () => press('map', 'ArrowRight'),
    () => click('map', 0.97, 0.5),
    () => change('text', -1),
  ];
  for (const step of steps) {
    step();
    read();
  }
  const focused = ['grid', 'map', 'epsilon', 'head'].map((id) => {
    element(id).focus();
    return document.activeElement.id;
  });
  const header = document.querySelectorAll('thead th button')[1];
  const column = [];
  for (let n = 0; n < 2; n++) {
    header.click();
    const rows = [...header.closest('table').tBodies[0].rows];
    column.push(rows.map((row) => Number.parseFloat(row.cells[1].textContent)));
  }
  const pixels = element('map').getContext('2d').getImageData(0, 0, 200, 200).data;
  return {
    found,
    column,
    focused,
    width: document.documentElement.scrollWidth,
    colours: new Set(pixels).size,
  };
"""
)


def held(page, name):
  """Bytes that a page holds."""
  return zlib.decompress(base64.b64decode(re.search(f'id="{name}">(.*?)<', page)[1]))


def test_words_stay_words_and_maps_survive():
  roots = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
  texts = [['</script><b>', '$data'], ['a', '\n']]
  page = with_explorer(PAGE, Explored([{'blocks': [1, 2]}], texts, roots))
  assert page.count('</script>') == 3
  assert page.index('id="explorer"') < page.index('<h2>Part')
  data = json.loads(held(page, 'data'))
  assert data['texts'] == texts
  assert data['numbers'] == [{'blocks': [1, 2]}]
  assert held(page, 'maps') == roots.tobytes()
  assert not re.search(r'(src|href)="(?!data:|#)', page)
  assert len(set(data['colours'])) == 64


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  run = small_run(sharp=3.0)
  options = dict(inputs='random', sequences=4, length=16)
  results = {'signature': analyse('signature', run, **options)}
  card = Card('tiny', results, explore(Model(run, InputOptions(**options))))
  folder = tmp_path_factory.mktemp('card')
  card.write(folder)
  assert card._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
  return folder


def test_the_numbers_of_the_page_are_in_the_card(written):
  stored = json.loads((written / 'card.json').read_text())
  page = (written / 'card.html').read_text()
  data = json.loads(held(page, 'data'))
  assert data['numbers'] == stored['explorer']
  assert '<img' not in page
  rows = stored['rows']['signature']
  rate = next(row for row in rows if row['measure'] == 'sink rate' and row['position'] == 1)
  [numbers] = data['numbers']
  at = numbers['epsilons'].index(0.3)
  assert numbers['sink_rates'][0][at] == pytest.approx(100 * rate['value'], rel=1e-3)
  heads = [row['value'] for row in rows if row['measure'] == 'importance']
  found = np.array(numbers['importance'])[..., 0].ravel()
  np.testing.assert_allclose(found, heads, rtol=1e-3)


def expected(numbers, k, at, layer, head):
  """The sentence, the block and head, and the numbers that the page has to show."""
  epsilon = numbers['epsilons'][at]
  heads = [of for layer in numbers['importance'] for of in layer]
  counting = sum(of[k] > epsilon for of in heads)
  rate = (
    f'Sink_{k + 1} = {numbers["sink_rates"][k][at]:g} % of pairs of a head and a text at '
    f'ε = {epsilon}; {counting} of {len(heads)} heads have a mean importance above ε.'
  )
  names = ('entropy', 'value_ratio', 'key_ratio', 'distance')
  shown = [numbers['importance'][layer][head][k], *(numbers[name][layer][head] for name in names)]
  return rate, [str(layer + 1), str(head + 1)], shown


@pytest.mark.full
@needs_browser
def test_in_a_browser_it_shows_the_numbers_of_the_card(written, tmp_path):
  result = in_browser((written / 'card.html').read_text(), SCRIPT, tmp_path)
  [numbers] = json.loads((written / 'card.json').read_text())['explorer']
  largest = np.argmax(np.array(numbers['importance'])[..., 0])
  layer, head = (int(n) for n in np.unravel_index(largest, (2, 4)))
  steps = [(0, 29, layer, head), (0, 9, layer, head), (1, 9, layer, head), (1, 9, 0, 0)]
  steps += [(1, 9, 1, 0), (1, 9, 1, 1), (1, 9, 1, 3), *[(1, 9, 0, 3)] * 6]
  for shown, step in zip(result['found'], steps, strict=True):
    rate, chosen, values = expected(numbers, *step)
    assert shown['rate'] == rate
    assert shown['chosen'] == chosen
    assert [float(x) for x in shown['numbers']] == values
  assert [shown['pressed'] for shown in result['found']] == [1] * 9 + [5, 6, 16, 16]
  assert result['focused'] == ['grid', 'map', 'epsilon', 'head']
  down, up = result['column']
  assert down == sorted(down, reverse=True)
  assert up == down[::-1]
  assert len(set(down)) > 3
  assert 300 < result['width'] <= 390
  assert result['colours'] > 20


STEPS = (
  READY
  + """
  const read = () => ['step-value', 'rate'].map((id) => element(id).textContent);
  const found = [read()];
  change('step', 0);
  const shown = ['step', 'text'].map((id) => element(id).offsetParent !== null);
  return { found: [...found, read()], shown };
"""
)


@pytest.mark.full
@needs_browser
def test_in_a_browser_a_run_has_a_slider_over_steps(written, tmp_path):
  [numbers] = json.loads((written / 'card.json').read_text())['explorer']
  rates = [[rate / 2 for rate in of_token] for of_token in numbers['sink_rates']]
  roots = np.zeros((2, 2, 4, 3), np.uint8)
  of_steps = [numbers | {'sink_rates': rates}, numbers]
  page = with_explorer(PAGE, Explored(of_steps, [['a', 'b']], roots, [0, 50]))
  result = in_browser(page, STEPS, tmp_path)
  last, first = result['found']
  assert last == ['50', expected(numbers, 0, 29, 0, 0)[0]]
  assert first == ['0', expected(of_steps[0], 0, 29, 0, 0)[0]]
  assert result['shown'] == [True, False]
