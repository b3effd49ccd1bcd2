"""lm-evaluation-harness: probabilities and texts against NumPy, and its tasks where it is there."""

import dataclasses
import inspect
import itertools
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

import sink_jax as sj
from sink_jax.analyses import hellaswag, lm_eval_adapter, lm_eval_package
from sink_jax.analyses.hellaswag import hellaswag_accuracy
from sink_jax.analyses.lm_eval_adapter import language_model, loglikelihoods
from sink_jax.analyses.lm_eval_generation import Settings, generated, settings
from sink_jax.data.tokenizer import Bytes, TextTokenizer
from sink_jax.evaluate.inputs import random_tokens
from tests.analyses import lm_eval_stub
from tests.analyses.small import check_png, options, small_run
from tests.train.runs import ROOT

TOKENIZER = Bytes().open().beginning_with(0)


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
  with pytest.raises(ValueError, match='6 tokens at most, and is to score an ending of 7'):
    loglikelihoods(run, [([0], [1] * 7)])


def test_a_harness_that_is_not_installed(monkeypatch):
  monkeypatch.setitem(sys.modules, 'lm_eval', None)
  with pytest.raises(ValueError, match=r"pip install 'sink_jax\[evaluation\]'"):
    hellaswag_accuracy(small_run(), TOKENIZER)
  with pytest.raises(ValueError, match='no tokenizer'):
    hellaswag.measure(small_run(), random_tokens(13, length=4), options())
  for version in ('0.4.9.1', '0.5.0'):
    monkeypatch.setitem(sys.modules, 'lm_eval', SimpleNamespace(__version__=version))
    with pytest.raises(ValueError, match=f'{version} has another interface: pip'):
      lm_eval_package.imported()


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
    total = np.asarray([expected(run, TOKENIZER.encode(query),
                                 TOKENIZER.encode(f' {e}'))[0] for e in endings])
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


# Learned positions: a token in a wrong place of a window, or of a batch, is another token.
BYTES = dict(vocab_size=258, attention=sj.AttentionSpec(position=sj.Learned(max_length=32)))
STORED = ROOT / 'tests/analyses/lm_eval_task'


def padded_logits(run, ids):
  """float64 logits of a text, which is filled up on the right by what it cannot see."""
  filled = [*ids, *[7] * (32 - len(ids))]
  return np.asarray(run.logits([filled]), np.float64)[0, :len(ids)]


def log_probability(run, context, ending):
  """Of an ending after at most 32 tokens: log p of each of its tokens, summed in float64."""
  ids = (context + ending)[-33:]
  logits = padded_logits(run, ids[:-1])[-len(ending):]
  return (logits[range(len(ending)), ending] - np.log(np.exp(logits).sum(-1))).sum()


def greedy(run, ids, count):
  """Continues a text by one token after the other, the whole of it read each time."""
  ids = list(ids)
  for _ in range(count):
    ids.append(int(padded_logits(run, ids)[-1].argmax()))
  return ids[-count:]


def test_texts_end_where_they_are_told_to():
  """Batches of texts of different lengths, each against the text alone."""
  run = small_run(**BYTES)
  random = np.random.default_rng(0)
  prompts = [random.integers(2, 258, n).tolist() for n in (1, 5, 13, 6, 20)]
  made = [greedy(run, ids, 8) for ids in prompts]
  # The ids are their own letters, so that every text of the model is one.
  letters = lambda ids: ''.join(chr(0x4e00 + i) for i in ids)
  model = tokenizers.Tokenizer(tokenizers.models.WordLevel({letters([i]): i for i in range(258)}, 'x'))
  model.decoder = tokenizers.decoders.Fuse()
  tokenizer = TextTokenizer(model, 'letters', bos_id=0)
  asked = [(ids, Settings(8)) for ids in prompts]
  assert generated(run, tokenizer, asked, batch_size=2) == list(map(letters, made))
  # A stop of two letters, the earlier one of two, fewer tokens, and a stop that is not there.
  assert len(set(made[0][:5])) == 5 and len(set(made[1][:7])) == 7  # so that a stop comes once
  asked = [(prompts[0], Settings(8, ('zz', letters(made[0][3:5])))),
           (prompts[1], Settings(8, (letters(made[1][6:7]), letters(made[1][2:3])))),
           (prompts[2], Settings(3)), (prompts[3], Settings(8, ('zz',)))]
  assert generated(run, tokenizer, asked) == [
      letters(ids[:n]) for ids, n in zip(made, (3, 2, 3, 8))]
  assert made[3].index(made[3][4]) == 4
  tokenizer = dataclasses.replace(tokenizer, eos_ids=(made[3][4],))
  assert generated(run, tokenizer, asked[3:]) == [letters(made[3][:4])]
  # What is asked of one text takes no room from another: both fill the learned positions.
  longest = random.integers(2, 258, 30).tolist()
  assert generated(run, tokenizer, [(longest, Settings(2)), (prompts[4], Settings(12))]) == [
      letters(greedy(run, longest, 2)), letters(greedy(run, prompts[4], 12))]
  with pytest.raises(ValueError, match='33 tokens exceed the 32 learned positions'):
    generated(run, tokenizer, [([1] * 25, Settings(8))])


def test_samples_are_repeated_and_differ_from_batch_to_batch():
  run = small_run(**BYTES)
  asked = [([3, 4], Settings(6, (), 1.0, 40))] * 2
  found = generated(run, TOKENIZER, asked, batch_size=1)
  assert found == generated(run, TOKENIZER, asked, batch_size=1) and found[0] != found[1]


@pytest.mark.parametrize('stubbed', [True, False])
def test_log_likelihoods_of_the_harness_are_those_of_numpy(stubbed, monkeypatch):
  """Of a stored task: shorter and longer than the context, without a context, without a text."""
  if stubbed:
    lm_eval_stub.install(monkeypatch)
  else:
    pytest.importorskip('lm_eval')
  run = small_run(**BYTES)
  rows = [json.loads(line) for line in (STORED / 'texts.jsonl').read_text().splitlines()]
  request = lambda *args: SimpleNamespace(args=args)
  bytes_of = lambda text: TOKENIZER.encode(text)
  for batch_size in (None, 2):
    model = language_model(run, TOKENIZER, batch_size=batch_size)
    pairs = [(row['context'], f' {row["ending"]}') for row in rows] + [('  ', 'spaces')]
    found = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, ending), (total, _) in zip(pairs, found, strict=True):
      if not context.strip():  # BOS takes the place of a context
        context, before = '', [TOKENIZER.bos_id]
        ending = ending if ending != 'spaces' else '  spaces'
      else:
        before = bytes_of(context)
      assert total == pytest.approx(log_probability(run, before, bytes_of(ending)), rel=1e-5)
    found = model.loglikelihood_rolling([request(row['text']) for row in rows])
    assert found[-1] == 0 and max(len(bytes_of(row['text'])) for row in rows) > 3 * 32
    for row, total in zip(rows, found, strict=True):
      assert total == pytest.approx(rolling(run, bytes_of(row['text'])), rel=1e-5)


def test_the_stub_is_as_the_harness():
  pytest.importorskip('lm_eval')
  from lm_eval import utils
  from lm_eval.api.model import TemplateLM

  for name in ('get_rolling_token_windows', 'make_disjoint_window'):
    parameters = lambda module: list(inspect.signature(getattr(module, name)).parameters)
    assert parameters(lm_eval_stub) == parameters(utils)
  for name in ('loglikelihood', '_encode_pair'):
    parameters = lambda cls: list(inspect.signature(getattr(cls, name)).parameters)
    assert parameters(lm_eval_stub.TemplateLM) == parameters(TemplateLM)
  for count, window in itertools.product(range(12), range(1, 6)):
    own, theirs = (
        list(map(module.make_disjoint_window, module.get_rolling_token_windows(
            list(range(count)), -1, max_seq_len=window, context_len=1)))
        for module in (lm_eval_stub, utils))
    assert own == theirs


def rolling(run, ids, window=32):
  """By the words of the harness: full windows, each token once, the last window full as well."""
  total = log_probability(run, [TOKENIZER.bos_id], ids[:window]) if ids else 0
  for start in range(window, len(ids), window):
    end = min(start + window, len(ids))
    # As many tokens are read as fit, and the last of them predicts the end.
    total += log_probability(run, ids[end - window - 1:start], ids[start:end])
  return total


def test_a_stored_task(monkeypatch, tmp_path):
  lm_eval = pytest.importorskip('lm_eval')
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path))
  monkeypatch.chdir(ROOT)  # the tasks name their data from here
  run = small_run(**BYTES)
  files = [str(STORED / f'{name}.yaml') for name in ('ending', 'rolling', 'generation')]
  found = lm_eval.simple_evaluate(language_model(run, TOKENIZER), tasks=files, bootstrap_iters=0,
                                  torch_random_seed=None)
  rows = [json.loads(line) for line in (STORED / 'texts.jsonl').read_text().splitlines()]
  bytes_of = lambda text: TOKENIZER.encode(text)
  totals = [log_probability(run, bytes_of(row['context']) or [0], bytes_of(row['ending']))
            for row in rows]
  texts = [bytes_of(row['text']) for row in rows]
  metrics = {key.partition(',')[0]: value for task in found['results'].values()
             for key, value in task.items()}
  assert np.log(metrics['perplexity']) == pytest.approx(-np.mean(totals), rel=1e-5)
  assert metrics['bits_per_byte'] == pytest.approx(
      -sum(rolling(run, ids) for ids in texts) / sum(map(len, texts)) / np.log(2), rel=1e-5)


def test_what_a_task_asks_of_its_texts():
  pytest.importorskip('lm_eval')
  read = lambda **arguments: settings(arguments, 1024)
  assert read() == Settings(256) and settings({}, 32) == Settings(16)
  assert read(until='a', do_sample=False, top_p=0.9, num_beams=1) == Settings(256, ('a',))
  assert read(until=['a', ''], max_new_tokens=9) == Settings(9, ('a',))
  assert read(do_sample=True, top_k=5, top_p=1.0) == Settings(256, (), 1.0, 5)
  assert read(temperature=0.5) == Settings(256, (), 0.5)
  for arguments, words in (({'num_beams': 4}, 'num_beams = 4'), ({'max_gen_toks': 1024}, '1024'),
                           ({'do_sample': True, 'top_p': 0.9}, 'top_p = 0.9')):
    with pytest.raises(ValueError, match=words):
      read(**arguments)


def test_a_mask_that_shows_what_comes_after_a_token():
  run = small_run(attention=sj.AttentionSpec(mask=sj.Prefix(length=4)))
  with pytest.raises(ValueError, match='shows a token what comes after it'):
    lm_eval_adapter._check_causal(run)
