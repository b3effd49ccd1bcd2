"""Commands on stored models: evaluate on a transformers checkpoint, generate on an exported one."""

import functools
import json
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.cli.evaluate import Options, as_text, evaluate
from sink_jax.data.tokenizer import Bytes
from sink_jax.pretrained.export import export_checkpoint
from sink_jax.report.model_page import read_page, sentences
from tests.commands import run_here
from tests.random_params import random_params

FIXTURES = Path(__file__).parents[1] / 'pretrained' / 'fixtures'


def evaluated(model, out, **given):
  return evaluate(Options(checkpoint=str(FIXTURES / model), out=out, **given), given)


@pytest.fixture(scope='module')
def llama(tmp_path_factory):
  """(what `evaluate` returned, its folder) of a small model on random tokens."""
  out = tmp_path_factory.mktemp('llama')
  given = dict(inputs='random', length=14, sequences=5, seed=3, epsilon=0.2)
  return evaluated('llama', out, **given), out


def test_a_published_model_is_probed_on_the_inputs_that_it_names(llama):
  (result, paths), out = llama
  pictures = {'importance.png', 'norms.png', 'attention_maps.png'}
  assert {path.name for path in paths} == {'sink_report.json', 'index.html'} | pictures
  assert all(path.stat().st_size > 2000 for path in paths)
  stored = json.loads((out / 'sink_report.json').read_text())
  assert stored['summary'] == result['summary'] and stored['epsilon'] == 0.2
  tokens = np.random.default_rng(3).integers(0, 64, (5, 14))
  inputs = stored['protocol']['inputs']
  assert inputs['first_token_ids'] == tokens[0, :4].tolist() and inputs['seed'] == 3
  report = sj.probe(sj.load_pretrained(FIXTURES / 'llama'), tokens)
  rate = 100 * report.sink_rate(epsilon=0.2)
  assert stored['summary']['sink_1'] == pytest.approx(rate, rel=1e-5)  # of six digits


def test_blocks_without_attention_are_not_counted(tmp_path):
  result, _ = evaluated('jamba', tmp_path, inputs='random', length=8, sequences=3)
  assert result['protocol']['blocks'] == [3, 7]  # of eight blocks
  assert 'smallest in block 3' in as_text(result)


def test_the_page_of_a_model_holds_its_numbers_and_fetches_nothing(llama, tmp_path):
  page = (llama[1] / 'index.html').read_text()
  assert page.count('src="data:image/png;base64,') == page.count('<img') == 3
  assert not re.search(r'(src|href)="(?!data:|#)', page)
  stored = json.loads((llama[1] / 'sink_report.json').read_text())
  rates, ratios = stored['summary']['sink_1'], stored['summary']['hidden_ratio']
  first, second = sentences(stored)
  assert first in page and first.startswith(f'In {rates:.1f} % of 40 pairs')
  assert f'{max(ratios[1:]):.3g} times' in second  # the first ratio is that of the embedding
  assert first.endswith(f'{np.mean(1 / np.arange(1, 15)):.2f}.')
  (tmp_path / 'sink_report.json').write_text('{}')
  with pytest.raises(ValueError, match='evaluate'):
    read_page(tmp_path)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  folder = tmp_path_factory.mktemp('checkpoint')
  config = sj.ModelConfig(layers=1, d_model=16, heads=2, ffn_hidden=24, vocab_size=258)
  params = random_params(config)
  written = np.zeros(258, bool)
  written[[2 + b for b in b'abcdefghijklmnopqrstuvwxyz ,.']] = True
  params['unembed']['kernel'] *= written  # other bytes would not be letters
  export_checkpoint(sj.Run(config, params), folder, context=64)
  Bytes().open().beginning_with(0).save(folder)
  return folder


generate = functools.partial(run_here, 'generate')


def test_the_text_goes_on_beyond_the_cache_until_it_ends(checkpoint, tmp_path):
  options = ('--prompt=Once upon', '--length=40', '--cache_size=16', '--sinks=2')
  code, text, notes = generate(f'--checkpoint={checkpoint}', *options)
  assert code == 0, notes
  run = sj.load_pretrained(checkpoint)
  assert run.bos == 'tokenizer'
  prompt = [2 + b for b in b'Once upon']
  [following] = run.generate([[0, *prompt]], 40, policy=sj.CachePolicy(16, 2)).tolist()
  # Tokens that a tokenizer puts before the prompt are not part of the text.
  decoded = lambda ids: Bytes().open().decode([*prompt, *ids]) + '\n'
  assert text == decoded(following)
  assert '10 tokens of prompt, the first ids [0, 81, 112, 101]' in notes
  assert 'tokens/s' in notes and 'cache of 16 tokens' in notes and ' 0.0 ' not in notes
  # Generation stops at the end token. In this copy, that is a letter which the model writes.
  folder = shutil.copytree(checkpoint, tmp_path / 'ending')
  end = following[9]
  first = following.index(end)
  config = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps(config | {'eos_token_id': end}))
  code, text, notes = generate(f'--checkpoint={folder}', *options)
  assert code == 0 and text == decoded(following[:first]), notes
  assert f'{first + 1} tokens to the end of the text' in notes
  # Every other command logs its kernel. Here the log line would appear in the middle of the text.
  assert not logging.getLogger('sink_jax.kernels').isEnabledFor(logging.INFO)


def test_a_prompt_in_the_template_of_a_conversation_is_answered(checkpoint):
  code, text, notes = generate(
    f'--checkpoint={checkpoint}', '--prompt=Why', '--length=20', '--chat=plain'
  )
  assert code == 0, notes
  asked = 'User:\nWhy\n\nAssistant:\n'
  answer = sj.load_pretrained(checkpoint).generate([[0, *(2 + b for b in asked.encode())]], 20)
  assert text == asked + Bytes().open().decode(answer[0]) + '\n'


def test_a_byte_order_mark_of_a_piped_prompt_is_not_text(checkpoint):
  asked = lambda piped: generate(f'--checkpoint={checkpoint}', '--length=8', piped=piped)
  code, text, notes = asked(b'Once\r\nupon')
  assert code == 0 and '10 tokens of prompt' in notes, notes
  assert asked('Once\r\nupon'.encode('utf-8-sig'))[:2] == (0, text)
  code, _, notes = asked('Once'.encode('utf-16'))
  assert code == 1 and 'iconv -f UTF-16 ' in notes and 'Traceback' not in notes


@pytest.mark.parametrize(
  'option, message',
  [
    ('--prompt=', 'the prompt is empty'),
    ('--chat=llama', "'llama' is not a template"),
    ('--top_p=0.5', '--temperature'),
    ('--sinks=2', '--cache_size'),
    ('--cache_size=4', 'sinks < size'),
  ],
)
def test_what_cannot_be_generated(checkpoint, option, message):
  code, _, notes = generate(f'--checkpoint={checkpoint}', '--bos=none', '--prompt=a', option)
  assert code == 1 and message in notes.splitlines()[-1] and 'Traceback' not in notes
