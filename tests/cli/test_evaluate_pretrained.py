"""python -m sink_jax evaluate --checkpoint, on a stored model of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.cli.evaluate import Options, as_text, evaluate
from sink_jax.report import comparison, model_page
from tests.commands import run_here

FIXTURES = Path(__file__).parents[1] / 'pretrained' / 'fixtures'
def evaluated(model, out, **given):
  return evaluate(Options(checkpoint=str(FIXTURES / model), out=out, **given), given)


def test_a_published_model_is_probed_on_the_inputs_that_it_names(tmp_path):
  result, paths = evaluated('llama', tmp_path, inputs='random', length=14, sequences=5, seed=3,
                            epsilon=0.2)
  assert {path.name for path in paths} == {
      'sink_report.json', 'importance.png', 'norms.png', 'attention_maps.png',
      'index.html'}
  assert all(path.stat().st_size > 2000 for path in paths)
  stored = json.loads((tmp_path / 'sink_report.json').read_text())
  assert stored['summary'] == result['summary'] and stored['epsilon'] == 0.2
  tokens = np.random.default_rng(3).integers(0, 64, (5, 14))
  inputs = stored['protocol']['inputs']
  assert inputs['first_token_ids'] == tokens[0, :4].tolist() and inputs['seed'] == 3
  report = sj.probe(sj.load_pretrained(FIXTURES / 'llama'), tokens)
  assert abs(stored['summary']['sink_1'] - 100 * report.sink_rate(epsilon=0.2)) < 1e-6


def test_blocks_without_attention_are_not_counted(tmp_path):
  result, _ = evaluated('jamba', tmp_path, inputs='random', length=8, sequences=3)
  assert result['protocol']['blocks'] == [3, 7]  # of eight
  assert 'smallest in block 3' in as_text(result)


def test_a_page_begins_with_a_model(tmp_path):
  evaluated('llama', tmp_path, inputs='random', length=14, sequences=5)
  page = comparison.page(comparison.build([]), tmp_path).html()
  assert page.index('llama') < page.index('Models trained here') and page.count('<img') == 2
  stored = json.loads((tmp_path / 'sink_report.json').read_text())
  rates, ratios = stored['summary']['sink_1'], stored['summary']['hidden_ratio']
  first, second = model_page.sentences(stored)
  assert first.startswith(f'{rates:.1f} % of 8 heads') and f'{max(ratios):.3g} times' in second
  assert first.endswith(f'{np.mean(1 / np.arange(1, 15)):.2f}.')
  (tmp_path / 'sink_report.json').write_text('{}')
  with pytest.raises(ValueError, match='evaluate'):
    comparison.page(comparison.build([]), tmp_path)
