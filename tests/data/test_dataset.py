"""Batches of a corpus: order, epochs, processes, resuming, mixing, amount, edits, probes."""

import itertools

import numpy as np
import pytest
import scipy.stats

from sink_jax.data.dataset import DataConfig, open_data, open_packed
from sink_jax.data.packed import Packed
from sink_jax.data.sources import PackedDataset, TextFolder
from sink_jax.data.synthetic import BigramBackcopy
from sink_jax.data.token_edits import FixedToken, RandomTokens
from sink_jax.data.tokenizer import Bytes, TrainedBpe
from sink_jax.train.config import Experiment, changed, resolved
from tests.train.runs import run_python

_C = 16


@pytest.fixture
def config(corpus):
  return lambda **options: DataConfig(**{
      'source': corpus, 'context': _C, 'valid_fraction': 0.2, **options})


def _stored(data, split='train'):
  packed = data._packed[split]
  return packed.rows(split, np.arange(packed.size(split)))[0]


def _chunks(batch):
  """Joins inputs and targets into chunks of C + 1 tokens again."""
  return np.concatenate([batch.tokens, batch.targets[:, -1:]], 1)


def _stream(data, rows, seed=0, batch_size=10, start=0):
  batches = [data.batch(s, batch_size, seed) for s in range(start, -(-rows // batch_size))]
  return np.concatenate([_chunks(b) for b in batches])[:rows]


def _sorted(chunks):
  return chunks[np.lexsort(chunks.T)]


def test_the_order_is_that_of_grain(config):
  grain = pytest.importorskip('grain')
  data = open_data(config())
  rows, seed = _stored(data), 3
  # 3 golden ratios of 2^32, so that seeds lie far apart.
  order = grain.MapDataset.range(len(rows)).shuffle(seed=seed * 2_654_435_761 % 2**32).repeat()
  expected = rows[[order[i] for i in range(3 * len(rows))]]
  np.testing.assert_array_equal(_stream(data, 3 * len(rows), seed), expected)


def test_each_epoch_is_every_chunk_once_in_a_new_order(config):
  data = open_data(config())
  batch = data.batch(0, 6, seed=0)
  assert [(x.shape, x.dtype) for x in batch] == [
      ((6, _C), np.int32), ((6, _C), np.int32), ((6, _C), np.float32)]
  np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
  assert (batch.weights == 1).all()
  stored = _stored(data)
  n = len(stored)
  assert data.summary()['training_rows'] == n
  stream = _stream(data, 2 * n)
  first, second = stream[:n], stream[n:]
  np.testing.assert_array_equal(_sorted(first), _sorted(stored))
  np.testing.assert_array_equal(_sorted(second), _sorted(stored))
  assert (first != stored).any() and (first != second).any()
  assert (_stream(data, n, seed=1) != first).any() and (_stream(data, n, seed=1) != second).any()


@pytest.mark.parametrize('shares', [[range(8)], [range(4), range(4, 8)], [range(2, 4), (0, 1, 6, 7)]])
def test_processes_make_their_rows_of_the_same_global_batch(config, shares):
  data = open_data(config())
  for step in (0, 999):
    whole = data.batch(step, 8, seed=3)
    for rows in map(np.array, shares):
      np.testing.assert_array_equal(data.batch(step, 8, 3, rows).tokens, whole.tokens[rows])
      np.testing.assert_array_equal(next(data.batches(step, 8, 3, rows)).tokens, whole.tokens[rows])


def test_resuming_equals_never_stopping_and_replays_nothing(config, monkeypatch):
  data = open_data(config())
  uninterrupted = list(itertools.islice(data.batches(0, 8, seed=0), 12))
  read = []
  rows = Packed.rows
  monkeypatch.setattr(Packed, 'rows', lambda self, split, numbers:
                      read.append(len(numbers)) or rows(self, split, numbers))
  resumed = list(itertools.islice(data.batches(7, 8, seed=0), 5))
  assert sum(read) <= 8 * (5 + 16 + 2)  # the requested rows and the prefetch buffer
  for a, b, step in zip(uninterrupted[7:], resumed, range(7, 12), strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.tokens, data.batch(step, 8, 0).tokens)


def test_amount_of_data(config):
  budget = 40 * (_C + 1) + 5
  some, more = (open_data(config(max_tokens=b)) for b in (budget, 2 * budget))
  assert some.summary()['unique_training_tokens'] == 40 * (_C + 1) <= budget
  subset = {c.tobytes() for c in _stream(some, 200)}
  assert len(subset) == 40
  assert subset == {c.tobytes() for c in _stream(some, 200, seed=9)}  # independent of the run's seed
  assert subset < {c.tobytes() for c in _stream(more, 400)}
  stored = [c.tobytes() for c in _stored(open_data(config()))]
  assert subset <= set(stored) and subset != set(stored[:40])  # not only the first rows
  for bad in (_C, 10**9):
    with pytest.raises(ValueError, match=f'data.max_tokens={bad} must be between'):
      open_data(config(max_tokens=bad))


def test_interventions_reach_training_and_validation_batches(config):
  plain = open_data(config())
  edited = open_data(config(interventions=(RandomTokens(first=3, last=4), FixedToken(position=2, token=1))))
  for batch in (lambda data: data.batch(5, 8, 0), lambda data: data.validation(8)['valid'][0]):
    before, after = _chunks(batch(plain)), _chunks(batch(edited))
    np.testing.assert_array_equal(np.delete(before, [1, 2, 3], 1), np.delete(after, [1, 2, 3], 1))
    assert (after[:, 1] == 1).all() and (after[:, 2:4] != before[:, 2:4]).any()
  # Tokens are edited before the split into inputs and targets.
  batch = edited.batch(5, 8, 0)
  assert (batch.targets[:, 0] == 1).all() and (batch.tokens[:, 1] == 1).all()


def test_random_tokens_are_frozen_over_epochs_and_amounts_of_data(config):
  edits = (RandomTokens(),)
  few = _stream(open_data(config(interventions=edits, max_tokens=30 * (_C + 1))), 240)
  seen = {}
  for chunk in few:
    seen.setdefault(chunk[1:].tobytes(), set()).add(int(chunk[0]))
  assert len(seen) == 30 and {len(s) for s in seen.values()} == {1}
  whole = open_data(config(interventions=edits))
  everything = {c.tobytes() for c in _stream(whole, whole.summary()['training_rows'])}
  assert {c.tobytes() for c in few} <= everything


def test_ids_above_the_tokenizer_s_must_be_ids_of_the_model(config):
  data = open_data(config(interventions=(RandomTokens(below=300), RandomTokens(first=2, last=2))))
  assert data.vocab_size == data.summary()['vocab_size'] == 300
  chunks = _chunks(data.batch(0, 999, 0))
  assert chunks[:, 0].max() == 299 and chunks[:, 1:].max() < 258
  small = changed(Experiment(), {'model.size': 'tiny', 'model.vocab_size': 299})
  with pytest.raises(ValueError, match='RandomTokens.*300 ids.*model.vocab_size is 299'):
    resolved(small, data)


def test_validation_covers_everything_once_in_a_fixed_order(config):
  data = open_data(config())
  sets = data.validation(batch_size=7)
  assert list(sets) == ['valid', 'prose', 'verse']
  stored = _stored(data, 'valid')
  bound = data._packed['valid'].bounds['valid'][1]
  for name, expected in (('valid', stored), ('prose', stored[:bound]), ('verse', stored[bound:])):
    batches = list(sets[name])
    assert all(b.tokens.shape == (7, _C) for b in batches)
    real = np.concatenate([_chunks(b)[b.weights[:, 0] == 1] for b in batches])
    np.testing.assert_array_equal(_sorted(real), _sorted(expected))
    assert set(np.concatenate([b.weights.ravel() for b in batches])) <= {0.0, 1.0}
  entropy = scipy.stats.entropy(np.unique(stored[:, 1:], return_counts=True)[1])
  np.testing.assert_allclose(data.summary()['unigram_loss'], entropy)
  again = open_data(config()).validation(7, max_batches=2)['valid']
  assert len(again) == 2
  for a, b in zip(again, sets['valid'], strict=False):
    np.testing.assert_array_equal(a.tokens, b.tokens)
  # A few batches already contain both domains.
  prose = {c.tobytes() for c in stored[:bound]}
  assert 0 < sum(c.tobytes() in prose for b in again for c in _chunks(b)) < 14
  rows = np.array([1, 2, 7])
  for whole, part in zip(data.validation(8)['valid'], data.validation(8, rows=rows)['valid'], strict=True):
    for name in whole._fields:
      np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[rows])


@pytest.fixture
def other(tmp_path):
  """Other text: one domain with a new name, and one with the same name."""
  random = np.random.default_rng(1)
  for domain in ('letters', 'prose'):
    (tmp_path / 'other' / domain).mkdir(parents=True)
    for i in range(12):
      text = random.integers(97, 123, 200).astype(np.uint8).tobytes().decode()
      (tmp_path / 'other' / domain / f'{i:02}.txt').write_text(text)
  return TextFolder(path=str(tmp_path / 'other'))


@pytest.mark.parametrize('tokenizer', [Bytes(), TrainedBpe(vocab_size=300)])
def test_a_validation_source_of_its_own(config, corpus, other, tokenizer):
  edits = (FixedToken(position=1),)
  data = open_data(config(valid_source=other, tokenizer=tokenizer, interventions=edits))
  sets = data.validation(8)
  assert list(sets) == ['valid', 'letters', 'prose']
  texts = {document.text for document in other.documents()}
  for name in ('letters', 'prose'):
    shown = data.tokenizer.decode(np.concatenate([b.tokens[:, 1:].ravel() for b in sets[name]]))
    assert any(text[5:15] in shown for text in texts)
  assert (sets['valid'][0].tokens[:, 0] == 1).all()
  # The training source keeps all its text, and its tokenizer serves both sources.
  stream = data.tokenizer.decode(_stored(data).ravel())
  assert sum(document.text[:12] in stream for document in corpus.documents()) >= 98
  encoder = data.tokenizer
  np.testing.assert_array_equal(data.probe_tokens(3, 9)[:, 1:], [
      encoder.encode(d.text)[1:9] for d in list(other.documents())[:13:12]
      + list(other.documents())[1:2]])
  summary = data.summary()
  assert summary['valid_source'] == repr(other) and summary['content'] != summary['valid_content']
  assert set(summary['domains']) == {'prose', 'verse'}
  assert set(summary['valid_domains']) == {'letters', 'prose'}


def test_the_folders_of_a_pair(config, corpus, other, tmp_path):
  alone, pair, swapped = (open_packed(config(**options)) for options in (
      {}, dict(valid_source=other), dict(source=other, valid_source=corpus)))
  assert len({packed.folder for both in (alone, pair, swapped) for packed in both}) == 5
  training, valid = (PackedDataset(path=str(packed.folder)) for packed in pair)
  whole = PackedDataset(path=str(alone[0].folder))
  again = open_data(config(source=training, valid_source=valid))
  np.testing.assert_array_equal(again.validation(4)['valid'][0].tokens,
                                open_data(config(valid_source=other)).validation(4)['valid'][0].tokens)
  for source, valid_source, named in (
      (training, None, 'data.valid_source'), (valid, None, 'data.source'), (whole, other, 'one of a pair'),
      (corpus, whole, 'one of a pair'), (corpus, BigramBackcopy(), 'has no text'),
      (BigramBackcopy(length=_C), corpus, 'valid_source')):
    with pytest.raises(ValueError) as error:
      open_data(config(source=source, valid_source=valid_source))
    assert named in str(error.value)
  both = open_packed(config(valid_source=other), str(tmp_path / 'out'))
  assert [packed.folder.name for packed in both] == ['train', 'valid']


def test_probe_tokens(config, corpus):
  data = open_data(config(bos=True, interventions=(RandomTokens(last=5), FixedToken(position=2, token=1))))
  probes = data.probe_tokens(sequences=6, length=12)
  assert probes.shape == (6, 12) and probes.dtype == np.int32
  assert (probes[:, 1] == 1).all() and (probes[:, 0] >= 2).all()
  starts = {d.text[:12] for d in corpus.documents() if corpus.held_out(d.name, 0.2)}
  for row in np.delete(probes, 1, 1):  # only the fixed token is not ordinary text
    assert data.tokenizer.decode(row) in {s[:1] + s[2:] for s in starts}
  np.testing.assert_array_equal(open_data(config(bos=True)).probe_tokens(6, 17)[:, 2:12], probes[:, 2:])
  with pytest.raises(ValueError, match='probe.length=12 tokens, not probe.sequences=999: .*valid_fraction'):
    data.probe_tokens(999, 12)


def test_reading_a_cache_needs_no_heavy_imports(config):
  cache = open_packed(config())[0].folder
  shown = run_python('-c', f'''
import sys
from sink_jax.data.sources import PackedDataset
from sink_jax.data.dataset import DataConfig, Source, open_data
from sink_jax.data.synthetic import BigramBackcopy
for name in ('tensorflow', 'tensorflow_datasets', 'datasets', 'backports', 'flax', 'ml_collections'):
  sys.modules[name] = None
data = open_data(DataConfig(source=PackedDataset(path={str(cache)!r}), context={_C}))
assert next(data.validation(4)['valid'].__iter__()).tokens.shape == (4, {_C})
assert 'grain' not in sys.modules and 'jax' not in sys.modules
print(next(data.batches(0, 4, 0)).tokens.shape)
''')
  assert shown.strip() == f'(4, {_C})'
