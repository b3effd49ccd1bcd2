"""Batches of a corpus: order, epochs, processes, resuming, mixing, amount, edits, probes."""

import itertools

import grain
import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_allclose, assert_array_equal

from sink_jax.data.dataset import open_data, open_packed
from sink_jax.data.packed import Packed
from sink_jax.data.sources import PackedDataset
from sink_jax.data.token_edits import FixedToken, RandomTokens
from sink_jax.data.tokenizer import Bytes, TrainedBpe
from sink_jax.train.config import Experiment, changed, resolved
from tests.data.conftest import write_corpus
from tests.data.rows import all_rows, assert_same_batches, in_order, joined
from tests.train.runs import run_python

_C = 16


@pytest.fixture
def data(config):
  return open_data(config())


def _stored(data, split='train'):
  return all_rows(data._packed[split], split)


def _stream(data, count, seed=0):
  """The first rows of the training stream of a seed."""
  batches = [data.batch(step, 10, seed) for step in range(-(-count // 10))]
  return np.concatenate([joined(batch) for batch in batches])[:count]


def _set(rows):
  return {row.tobytes() for row in rows}


def test_the_order_is_that_of_grain(data):
  stored = _stored(data)
  n = len(stored)
  assert data.summary()['training_rows'] == n
  for seed in (0, 3):
    # Golden ratios of 2^32, so that seeds lie far apart. Every epoch has another order.
    order = grain.MapDataset.range(n).shuffle(seed=seed * 2_654_435_761 % 2**32).repeat()
    expected = stored[[order[i] for i in range(3 * n)]]
    assert_array_equal(_stream(data, 3 * n, seed), expected)


def test_the_shapes_and_types_of_a_batch(data):
  batch = data.batch(0, 6, seed=0)
  assert [part.shape for part in batch] == [(6, _C)] * 3
  assert [part.dtype for part in batch] == [np.int32, np.int32, np.float32]
  assert (batch.weights == 1).all()


@pytest.mark.parametrize('rows', [range(8), range(4, 8), (0, 1, 6, 7)])
def test_processes_make_their_rows_of_the_same_global_batch(data, rows):
  rows = np.array(rows)
  for step in (0, 999):
    whole = data.batch(step, 8, seed=3)
    assert_same_batches(data.batch(step, 8, 3, rows), whole, rows)
    assert_same_batches(next(data.batches(step, 8, 3, rows)), whole, rows)
  whole = data.validation(8)['valid']
  for n, part in enumerate(data.validation(8, rows=rows)['valid']):
    assert_same_batches(part, whole[n], rows)


def test_resuming_equals_never_stopping_and_replays_nothing(data, monkeypatch):
  read, rows = [], Packed.rows

  def counted(self, split, numbers):
    read.append(len(numbers))
    return rows(self, split, numbers)

  monkeypatch.setattr(Packed, 'rows', counted)
  resumed = list(itertools.islice(data.batches(7, 8, seed=0), 5))
  assert sum(read) <= 8 * (5 + 16 + 2)  # the requested rows and the prefetch buffer
  for step, batch in enumerate(resumed, 7):
    assert_same_batches(batch, data.batch(step, 8, seed=0))


def test_amount_of_data(config):
  budget = 40 * (_C + 1) + 5
  some, more = (open_data(config(max_tokens=tokens)) for tokens in (budget, 2 * budget))
  assert some.summary()['unique_training_tokens'] == 40 * (_C + 1)
  subset = _set(_stream(some, 200))
  assert len(subset) == 40
  assert subset == _set(_stream(some, 200, seed=9))  # independent of the run's seed
  assert subset < _set(_stream(more, 400))
  stored = _stored(some)
  assert subset <= _set(stored)
  assert subset != _set(stored[:40])  # not only the first rows


def test_interventions_reach_training_and_validation_batches(config, data):
  edits = RandomTokens(first=3, last=4), FixedToken(position=2, token=1)
  edited = open_data(config(interventions=edits))
  batches = lambda data: (data.batch(5, 8, 0), data.validation(8)['valid'][0])
  for plain, other in zip(batches(data), batches(edited)):
    # Tokens are edited before the split into inputs and targets.
    assert_array_equal(other.tokens[:, 1:], other.targets[:, :-1])
    before, after = joined(plain), joined(other)
    assert_array_equal(np.delete(before, [1, 2, 3], 1), np.delete(after, [1, 2, 3], 1))
    assert (after[:, 1] == 1).all()
    assert (after[:, 2:4] != before[:, 2:4]).any()


def test_random_tokens_are_frozen_over_epochs_and_amounts_of_data(config):
  edits = (RandomTokens(),)
  few = _stream(open_data(config(interventions=edits, max_tokens=30 * (_C + 1))), 240)

  # Eight epochs of 30 rows, each with one first token.
  assert len(_set(few)) == len(_set(few[:, 1:])) == 30
  whole = open_data(config(interventions=edits))
  everything = _stream(whole, whole.summary()['training_rows'])
  assert _set(few) <= _set(everything)


def test_random_tokens_above_the_tokenizer_s_ids_are_ids_of_the_data(config):
  edits = RandomTokens(below=300), RandomTokens(first=2, last=2)
  data = open_data(config(interventions=edits))
  assert data.vocab_size == data.summary()['vocab_size'] == 300
  rows = joined(data.batch(0, 999, 0))
  assert rows[:, 0].max() == 299
  assert rows[:, 1:].max() < 258
  small = changed(Experiment(), {'model.size': 'tiny', 'model.vocab_size': 299})
  with pytest.raises(ValueError, match='RandomTokens.*300 ids.*model.vocab_size is 299'):
    resolved(small, data)


def test_validation_covers_everything_once_in_a_fixed_order(config, data):
  stored = _stored(data, 'valid')
  bound = data._packed['valid'].bounds['valid'][1]
  parts = {'valid': stored, 'prose': stored[:bound], 'verse': stored[bound:]}
  sets = data.validation(batch_size=7)
  assert list(sets) == list(parts)
  for name, rows in parts.items():
    shown = np.concatenate([joined(batch) for batch in sets[name]])
    weights = np.concatenate([batch.weights for batch in sets[name]])
    counted = weights[:, 0] == 1
    assert_array_equal(weights, np.repeat(counted[:, None], _C, 1))
    assert_array_equal(in_order(shown[counted]), in_order(rows))
  _, counts = np.unique(stored[:, 1:], return_counts=True)
  assert_allclose(data.summary()['unigram_loss'], scipy.stats.entropy(counts))

  # A few batches already contain both domains.
  few = open_data(config()).validation(7, max_batches=2)['valid']
  assert len(few) == 2
  for batch, before in zip(few, sets['valid']):
    assert_same_batches(batch, before)
  first = np.concatenate([joined(batch) for batch in few])
  assert 0 < len(_set(first) & _set(parts['prose'])) < 14


@pytest.fixture(scope='module')
def other(tmp_path_factory):
  """Other text: one domain with a new name, and one with the same name."""
  folder = tmp_path_factory.mktemp('other')
  return write_corpus(folder, seed=1, letters=(190, 200), letter=12, prose=12)


@pytest.mark.parametrize('tokenizer', [Bytes(), TrainedBpe(vocab_size=300)])
def test_a_validation_source_of_its_own(config, corpus, other, tokenizer):
  edits = (FixedToken(position=1),)
  data = open_data(config(valid_source=other, tokenizer=tokenizer, interventions=edits))
  sets = data.validation(8)
  assert list(sets) == ['valid', 'letter', 'prose']
  assert (sets['valid'][0].tokens[:, 0] == 1).all()

  # The training source keeps all its text, and its tokenizer serves both sources.
  stream = data.tokenizer.decode(_stored(data).ravel())
  kept = [document.text[:12] in stream for document in corpus.documents()]
  assert sum(kept) >= 98
  texts = [document.text for document in other.documents()]
  shown = data.tokenizer.decode(_stored(data, 'valid').ravel())
  assert sum(text[:12] in shown for text in texts) >= 22

  # Probes alternate between the domains, which have twelve texts each.
  expected = [data.tokenizer.encode(texts[n])[1:9] for n in (0, 12, 1)]
  assert_array_equal(data.probe_tokens(3, 9)[:, 1:], expected)
  summary = data.summary()
  assert summary['valid_source'] == repr(other)
  assert summary['content'] != summary['valid_content']
  assert set(summary['domains']) == {'prose', 'verse'}
  assert set(summary['valid_domains']) == {'letter', 'prose'}


def test_the_folders_of_a_pair(config, corpus, other, tmp_path):
  (alone, _), pair, swapped = (
    open_packed(config(**options))
    for options in ({}, {'valid_source': other}, {'source': other, 'valid_source': corpus})
  )
  assert len({packed.folder for packed in (alone, *pair, *swapped)}) == 5
  of_folder = lambda packed: PackedDataset(path=str(packed.folder))
  whole, training, valid = map(of_folder, (alone, *pair))
  again = open_data(config(source=training, valid_source=valid))
  direct = open_data(config(valid_source=other))
  assert_same_batches(again.validation(4)['valid'][0], direct.validation(4)['valid'][0])
  for words, options in (
    ('data.valid_source', {'source': training}),
    ('data.source', {'source': valid}),
    ('one of a pair', {'source': whole, 'valid_source': other}),
    ('one of a pair', {'valid_source': whole}),
    ('not as the training text', {'context': 12, 'valid_source': valid}),
  ):
    with pytest.raises(ValueError, match=words):
      open_data(config(**options))
  both = open_packed(config(valid_source=other), str(tmp_path / 'out'))
  assert [packed.folder.name for packed in both] == ['train', 'valid']


def test_probe_tokens(config, corpus):
  edits = RandomTokens(last=5), FixedToken(position=2, token=1)
  data = open_data(config(bos=True, interventions=edits))
  probes = data.probe_tokens(sequences=6, length=12)
  assert (probes.shape, probes.dtype) == ((6, 12), np.int32)
  assert (probes[:, 1] == 1).all()
  starts = {
    document.text[:12] for document in corpus.documents() if corpus.held_out(document.name, 0.2)
  }
  for row in np.delete(probes, 1, 1):  # only the fixed token is not ordinary text
    assert data.tokenizer.decode(row) in {start[:1] + start[2:] for start in starts}
  longer = open_data(config(bos=True)).probe_tokens(6, 17)
  assert_array_equal(longer[:, 2:12], probes[:, 2:])
  words = 'probe.length=12 tokens, not probe.sequences=999: .*valid_fraction'
  with pytest.raises(ValueError, match=words):
    data.probe_tokens(999, 12)


def test_reading_a_cache_needs_no_heavy_imports(packed):
  shown = run_python(
    '-c',
    f"""
import sys
from sink_jax.data.sources import PackedDataset
from sink_jax.data.dataset import DataConfig, Source, open_data
from sink_jax.data.synthetic import BigramBackcopy
for name in ('tensorflow', 'tensorflow_datasets', 'datasets', 'backports', 'flax',
             'ml_collections'):
  sys.modules[name] = None
data = open_data(DataConfig(source=PackedDataset(path={str(packed.folder)!r}), context={_C}))
assert next(data.validation(4)['valid'].__iter__()).tokens.shape == (4, {_C})
assert not {{'grain', 'jax', 'array_record'}} & set(sys.modules)
print(next(data.batches(0, 4, 0)).tokens.shape)
""",
  )
  assert shown.strip() == f'(4, {_C})'
