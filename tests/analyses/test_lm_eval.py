"""lm-evaluation-harness: probabilities and texts against NumPy; its command if it is there."""

import dataclasses
import importlib.util
import json
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tokenizers

import sink_jax as sj
from sink_jax.analyses.importance import hellaswag
from sink_jax.data.tokenizer import Bytes, TextTokenizer
from tests.analyses.small import model, near, small_run, tokens
from tests.pretrained import tiny
from tests.train.runs import ROOT, run_python

INSTALLED = importlib.util.find_spec('lm_eval') is not None
# If the package is not installed, stand-ins replace the names that the adapter imports from it.
PARTS = (
  {}
  if INSTALLED
  else {
    name: mock.MagicMock(
      TemplateLM=object,
      register_model=lambda name: lambda model: model,
      normalize_gen_kwargs=lambda given, tokens: {'until': [], 'max_gen_toks': tokens} | given,
    )
    for name in (
      'lm_eval',
      *map('lm_eval.'.__add__, ('api.model', 'api.registry', 'models.utils', 'utils')),
    )
  }
)
with mock.patch.dict(sys.modules, PARTS):
  from sink_jax.analyses import lm_eval as adapter
  from sink_jax.analyses.lm_eval import SinkJax, generation, loglikelihoods
harness = pytest.mark.skipif(not INSTALLED, reason='lm_eval is not installed')
TOKENIZER = Bytes().open().beginning_with(0)
# With learned positions, a token at a wrong position of a window or batch acts like a different
# token.
BYTES = dict(attention=sj.AttentionSpec(position=sj.Learned(max_length=32)))
STORED = ROOT / 'tests/analyses/lm_eval_task'
request = lambda *args: SimpleNamespace(args=args)


def padded_logits(run, ids):
  """float64 logits of a text, which is padded on the right to 32 tokens."""
  return np.asarray(run.logits([[*ids, *[7] * (32 - len(ids))]]), np.float64)[0, : len(ids)]


def log_probability(run, context, ending):
  """log p of an ending given at most 32 tokens before each of its tokens, summed in float64."""
  ids = (context + ending)[-33:]
  logits = padded_logits(run, ids[:-1])[-len(ending) :]
  return (logits[range(len(ending)), ending] - np.log(np.exp(logits).sum(-1))).sum()


def rolling(run, ids, window=32):
  """The harness's definition: full windows, also the last one; each token counts once."""
  total = log_probability(run, [TOKENIZER.bos_id], ids[:window]) if ids else 0
  for start in range(window, len(ids), window):
    end = min(start + window, len(ids))
    total += log_probability(run, ids[end - window - 1 : start], ids[start:end])
  return total


def greedy(run, ids, count):
  """Adds the most likely token `count` times, and reads the full text for each."""
  ids = list(ids)
  for _ in range(count):
    ids.append(int(padded_logits(run, ids)[-1].argmax()))
  return ids[-count:]


def test_log_likelihoods_of_endings():
  """Endings shorter and longer than the context, and a pair longer than the window."""
  run = small_run(**BYTES)
  random = np.random.default_rng(0)
  pairs = [
    (random.integers(2, 258, a).tolist(), random.integers(2, 258, b).tolist())
    for a, b in (
      (3, 2),
      (1, 9),
      (30, 6),
      (12, 32),
    )
  ]

  for batch_size in (None, 2):
    for (total, _), pair in zip(loglikelihoods(run, pairs, 32, batch_size), pairs, strict=True):
      assert total == near(log_probability(run, *pair))


def test_greedy_endings_and_what_is_too_long(monkeypatch):
  monkeypatch.setattr(adapter, '_SHORTEST', 4)
  run = small_run(vocab_size=5, attention=sj.AttentionSpec(position=sj.Learned(max_length=8)))
  context = [1, 2, 3]
  best = int(run.logits([context])[0, -1].argmax())
  (_, yes), (_, no) = loglikelihoods(run, [(context, [best]), (context, [(best + 1) % 5])], 8, 2)

  assert yes
  assert not no

  with pytest.raises(ValueError, match='ending of 9 tokens'):
    loglikelihoods(run, [([0], [1] * 9)], 8)

  broken = dataclasses.replace(run, params=run.params | {'embed': run.params['embed'] * np.nan})
  with pytest.raises(ValueError, match='log-probability of an ending'):
    loglikelihoods(broken, [([1, 2], [3])], 8)


def test_texts_end_where_they_are_told_to():
  """Texts of different lengths, generated in batches, equal those generated one by one."""
  # Each id is a different letter, so that every sequence of ids is a valid text.
  letters = lambda ids: ''.join(chr(0x4E00 + i) for i in ids)
  names = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({letters([i]): i for i in range(258)}, 'x')
  )
  names.decoder = tokenizers.decoders.Fuse()
  names.pre_tokenizer = tokenizers.pre_tokenizers.Split('', 'isolated')
  tokenizer = TextTokenizer(names, 'letters', bos_id=0)
  run = dataclasses.replace(small_run(**BYTES), read_tokenizer=lambda run: tokenizer)
  random = np.random.default_rng(0)
  prompts = [random.integers(2, 258, n).tolist() for n in (1, 5, 13, 6, 20)]
  made = [greedy(run, ids, 8) for ids in prompts]
  write = lambda run, asked, **options: SinkJax(run=run, bos='none', **options).generate_until(
    [request(letters(ids), arguments) for ids, arguments in asked]
  )
  found = write(run, [(ids, {'max_gen_toks': 8, 'until': []}) for ids in prompts], batch_size=2)

  assert found == list(map(letters, made))

  # In order: a stop of two letters, two stops of which the earlier counts, fewer tokens, an absent
  # stop.
  asked = [
    (prompts[0], {'max_gen_toks': 8, 'until': ['zz', letters(made[0][3:5])]}),
    (prompts[1], {'max_gen_toks': 8, 'until': [letters(made[1][6:7]), letters(made[1][2:3])]}),
    (prompts[2], {'max_gen_toks': 3, 'until': []}),
    (prompts[3], {'max_gen_toks': 8, 'until': 'zz'}),
  ]
  assert write(run, asked) == [letters(ids[:n]) for ids, n in zip(made, (3, 2, 3, 8))]

  ending = dataclasses.replace(tokenizer, eos_ids=(made[3][4],))
  ended = dataclasses.replace(run, read_tokenizer=lambda run: ending)

  assert write(ended, asked[3:]) == [letters(made[3][: made[3].index(made[3][4])])]


def test_what_cannot_be_asked():
  assert generation(
    {
      'until': ['a', ''],
      'max_gen_toks': 9,
      'num_beams': 1,
    },
    1024,
  ) == (
    9,
    ('a',),
    {},
  )

  for arguments, words in (({'num_beams': 4}, 'num_beams'), ({'max_gen_toks': 1024}, '1024')):
    with pytest.raises(ValueError, match=words):
      generation(arguments, 1024)
  with pytest.raises(ValueError, match='causal'):
    SinkJax(run=small_run(attention=sj.AttentionSpec(mask=sj.Prefix(length=4))))
  with pytest.raises(ValueError, match='one model'):
    SinkJax()


def test_accuracy_of_hellaswag_is_read_from_the_results_of_the_harness(tmp_path):
  run = small_run('mine')
  scores = {
    'acc,none': 0.25,
    'acc_stderr,none': 0.02,
    'acc_norm,none': 0.5,
    'acc_norm_stderr,none': 0.03,
  }

  for name in ('other', 'mine'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'results_2026.json').write_text(
      json.dumps(
        {
          'config': {'sink_jax_model': name},
          'results': {'hellaswag': scores if name == 'mine' else {}},
        }
      )
    )

  rows = hellaswag(model(run, tokens()), results=str(tmp_path))
  assert [(row['measure'], row['percent'], row.get('stderr')) for row in rows][1:] == [
    ('acc', 25, 2),
    ('acc_norm', 50, 3),
  ]
  expected = 100 * sj.probe(run, tokens()).sink_rate()
  assert rows[0]['percent'] == pytest.approx(expected)

  with pytest.raises(ValueError, match='--results'):
    hellaswag(model(dataclasses.replace(run, name='new'), tokens()), results=str(tmp_path))


@harness
def test_the_harnesss_own_command(tmp_path):
  folder = tmp_path / 'tiny-llama'
  tiny.write(folder, tiny.LLAMA | {'vocab_size': 260})
  TOKENIZER.save(folder)
  run = sj.load_pretrained(folder)
  files = ','.join(str(STORED / f'{name}.yaml') for name in ('ending', 'rolling', 'generation'))
  run_python(
    *'-m sink_jax.analyses.lm_eval run --model sink_jax --batch_size auto --tasks'.split(),
    files,
    f'--model_args=checkpoint={folder},bos=none,max_length=32',
    f'--output_path={tmp_path / "out"}',
    HF_HUB_OFFLINE='1',
    HF_DATASETS_CACHE=str(tmp_path),
  )

  [written] = (tmp_path / 'out').rglob('results_*.json')
  found = json.loads(written.read_text())

  assert found['config']['sink_jax_model'] == 'tiny-llama'

  rows = [json.loads(line) for line in (STORED / 'texts.jsonl').read_text().splitlines()]
  totals = [
    log_probability(run, TOKENIZER.encode(row['context']) or [0], TOKENIZER.encode(row['ending']))
    for row in rows
  ]
  texts = [TOKENIZER.encode(row['text']) for row in rows]
  metrics = {
    key.partition(',')[0]: value
    for task in found['results'].values()
    for key, value in task.items()
  }

  assert np.log(metrics['perplexity']) == near(-np.mean(totals))
  expected = -sum(rolling(run, ids) for ids in texts) / sum(map(len, texts)) / np.log(2)
  assert metrics['bits_per_byte'] == near(expected)
