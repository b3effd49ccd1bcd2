"""HellaSwag: probabilities of endings against NumPy, and the task itself where lm_eval is there."""

import dataclasses
import json
import sys

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import hellaswag, lm_eval_adapter
from sink_jax.analyses.lm_eval_adapter import hellaswag_accuracy, language_model, loglikelihoods
from sink_jax.data.inputs import random_tokens
from sink_jax.data.text_tokenizer import TextTokenizer
from sink_jax.data.tokenizer import ByteEncoder
from tests.analyses.small import check_png, options, small_run

TOKENIZER = TextTokenizer.from_encoder(ByteEncoder(), bos=True)


def expected(run, context, ending):
  """Log-probability of an ending and whether it is greedy, from one unpadded pass."""
  ids = np.asarray([context + ending])
  logits = np.asarray(run.logits(ids[:, :-1]), np.float64)[0, -len(ending):]
  log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  return log[range(len(ending)), ending].sum(), bool((logits.argmax(-1) == ending).all())


def test_loglikelihoods(monkeypatch):
  monkeypatch.setattr(lm_eval_adapter, '_SHORTEST', 4)
  run, random = small_run(vocab_size=5), np.random.default_rng(0)
  draw = lambda count: random.integers(0, 5, count).tolist()
  pairs = [(draw(a), draw(b)) for a, b in ((3, 2), (1, 1), (7, 2), (2, 1), (4, 4), (1, 2))]
  # The second is made the greedy continuation of its context.
  pairs[1] = (pairs[1][0], [int(run.logits(np.asarray([pairs[1][0]]))[0, -1].argmax())])
  said = []
  found = loglikelihoods(run, pairs, batch_size=2, say=said.append)
  for (total, greedy), pair in zip(found, pairs, strict=True):
    assert (pytest.approx(total, rel=1e-5), greedy) == expected(run, *pair)
  assert found[1][1] and not all(greedy for _, greedy in found) and '6 of 6' in said[-1]


def test_texts_longer_than_learned_positions_lose_their_beginning():
  run = small_run(vocab_size=5, attention=sj.AttentionSpec(position=sj.Learned(max_length=6)))
  context, ending = [0, 1, 2, 3, 4, 0, 1], [2, 3]
  found = loglikelihoods(run, [(context, ending)])[0]
  assert found[0] == pytest.approx(expected(run, context[-5:], ending)[0], rel=1e-5)


def test_a_harness_that_is_not_installed(monkeypatch):
  monkeypatch.setitem(sys.modules, 'lm_eval', None)
  with pytest.raises(ValueError, match='pip install lm_eval'):
    hellaswag_accuracy(small_run(), TOKENIZER)
  with pytest.raises(ValueError, match='no tokenizer'):
    hellaswag.measure(small_run(), random_tokens(13, length=4), options())


def test_the_picture(tmp_path):
  result = {'model': 'a', 'family': 'GPT2', 'parameters': 10**8, 'sink_1': 50.0, 'acc': 28.9,
            'acc_norm': 31.1, 'acc_stderr': 0.4, 'acc_norm_stderr': 0.5, 'questions': 10042,
            'epsilon': 0.3, 'inputs': {'length': 64}}
  results = [result, result | {'parameters': 10**9, 'acc': 40.0}, result | {'family': 'OPT'}]
  hellaswag.draw(results, tmp_path / 'hellaswag.png')
  check_png(tmp_path / 'hellaswag.png')
  assert '28.90 ± 0.40' in hellaswag.rows(results)[1]


@pytest.fixture
def questions(tmp_path):
  """Six questions in the format of the authors; brackets are theirs, and are to go."""
  rows = [{'ind': i, 'activity_label': 'Cooking', 'ctx_a': f'A man number {i} stands.',
           'ctx_b': 'he', 'ctx': '', 'label': str(i % 4), 'split': 'val', 'source_id': '',
           'split_type': 'indomain',
           'endings': [f'runs {word} [step] ' + 'fast' * j for j, word in enumerate(
               (f'home {i}', 'out', 'a long way off', 'up'))]} for i in range(6)]
  path = tmp_path / 'hellaswag.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  return path, rows


def test_hellaswag(questions, monkeypatch):
  lm_eval = pytest.importorskip('lm_eval')
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  path, rows = questions
  run = small_run(vocab_size=258)
  found = hellaswag.measure(run, random_tokens(258, length=4, tokenizer=TOKENIZER),
                            options(hellaswag=str(path)))
  right = {'acc': 0, 'acc_norm': 0}
  for row in rows:
    query = f'Cooking: {row["ctx_a"]} He'
    # A space joins the two; '[step]' goes, and of the two spaces around it one.
    endings = [e.strip().replace('[step]', '').replace('  ', ' ') for e in row['endings']]
    total = np.asarray([expected(run, TOKENIZER.encode(query).tolist(),
                                 TOKENIZER.encode(f' {e}').tolist())[0] for e in endings])
    gold = int(row['label'])
    right['acc'] += total.argmax() == gold
    right['acc_norm'] += (total / [len(e) for e in endings]).argmax() == gold
  for key, count in right.items():
    assert found[key] == pytest.approx(100 * count / 6)
    assert found[f'{key}_stderr'] == pytest.approx(
        100 * np.std([1] * count + [0] * (6 - count), ddof=1) / 6**0.5)
  assert found['questions'] == 6 and found['harness'] == lm_eval.__version__
  assert hellaswag_accuracy(run, TOKENIZER, file=str(path), limit=2)['questions'] == 2
  assert found['sink_1'] == pytest.approx(100 * sj.probe(run, random_tokens(
      258, length=4, tokenizer=TOKENIZER).tokens).sink_rate())


def test_questions_that_are_not_there(tmp_path, monkeypatch):
  pytest.importorskip('lm_eval')
  with pytest.raises(ValueError, match='--hellaswag=nowhere.jsonl: no such file'):
    hellaswag_accuracy(small_run(), TOKENIZER, file='nowhere.jsonl')
  (tmp_path / 'broken.jsonl').write_text('{"ctx_a": "x"}\n')
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  with pytest.raises(ValueError, match='HellaSwag cannot be read.*--hellaswag=FILE'):
    hellaswag_accuracy(small_run(), TOKENIZER, file=str(tmp_path / 'broken.jsonl'))
  model = language_model(small_run(), TOKENIZER)
  assert model.tok_encode('A') == [67] and model.tok_encode('A', False) == [67]
  for bos in ('tokenizer', 'force'):
    model = language_model(small_run(), TOKENIZER, bos=bos)
    assert model.tok_encode('A') == [0, 67] and model.tok_encode('A', False) == [67]
  assert model.prefix_token_id == 0


def test_answers_of_a_model_that_computes_no_numbers():
  run = small_run(vocab_size=258)
  run = dataclasses.replace(run, params=run.params | {'embed': run.params['embed'] * np.nan})
  with pytest.raises(ValueError, match=r'log-probability of an ending .* its parameter embed\[0\]'):
    lm_eval_adapter.loglikelihoods(run, [([1, 2], [3])])
