"""Batches from a chunk cache: shuffled, mixed, limited, edited; all at random access.

The training stream is endless and has no state. Its element number i is a chunk that follows from
i, the seed and the sizes of the domains alone: Grain computes the shuffle of an epoch at one
position without the others, and the mixture decides by i which domain is next. Batch b holds the
elements b * batch_size and following, so that a run resumes anywhere, and every process of a job
reads its rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sink_jax.data import counter_rng
from sink_jax.data.batches import Batch, Dataset, FixedBatches
from sink_jax.data.cache import Cache
from sink_jax.data.cache_check import CacheCheck
from sink_jax.data.token_edits import FixedToken, TokenEdit
from sink_jax.data.tokenizer import TextTokenizer

if TYPE_CHECKING:
  import grain

# Keys of `counter_rng`, fixed on purpose: the subset of a smaller data amount and the order of the
# validation chunks must not depend on the seed of a run, or runs could not be compared.
_SUBSET_KEY, _VALID_KEY = 1, 2
_TABLE_BYTES = 2**32  # of a table of chunks that is put on a device, at most
_TABLE_ROWS = 1 << 14  # of it that are edited at a time


class CorpusDataset(Dataset):
  """The data of a document corpus.

  Args:
    cache: the packed corpus.
    domain_weights: (domain, weight) pairs; the training stream takes chunks of the domains in this
      proportion. () = all domains concatenated. A domain that is not named is not used.
    max_tokens: the amount of training data (Figure 5, right): the same subset of chunks in every
      epoch, with at most this many tokens; 0 = all.
    interventions: edits that are applied in their order to every training and validation chunk.
    valid_cache: the cache of the validation text, in the same encoding; None takes that of `cache`.

  Raises:
    ValueError: an option does not fit, or a cache has nothing of the text it stands for.
  """

  def __init__(self, cache: Cache, domain_weights: tuple[tuple[str, float], ...] = (),
               max_tokens: int = 0, interventions: tuple[TokenEdit, ...] = (),
               valid_cache: Cache | None = None):
    self._cache, self._valid_cache = cache, valid_cache or cache
    if not len(self._cache.tables['train']):
      raise ValueError(f'{cache.folder} holds validation text alone: name it as data.valid_source, '
                       'and the training text as data.source.')
    if not len(self._valid_cache.tables['valid']):
      raise ValueError(f'{cache.folder} holds training text alone: name its validation text as '
                       'data.valid_source.')
    for split, of in (('train', cache), ('valid', self._valid_cache)):
      if of.weight_tables and not _predicted(of, split):
        raise ValueError(f'{of.manifest["source"]}: no answer in its text for {split}, so the loss '
                         "would have no token: add conversations, or use loss='all'.")
    self._interventions = interventions
    self._chunk_length = cache.manifest['context'] + 1
    self._text_vocabulary = self.vocab_size = cache.manifest['vocab_size']
    for intervention in interventions:
      intervention.check(self._chunk_length, self._text_vocabulary)
      self.vocab_size = intervention.vocab_size(self.vocab_size)
    self._rows = self._training_rows(max_tokens)
    self._parts, self._weights = self._mixture(domain_weights)
    self._streams: dict[int, grain.MapDataset] = {}  # by seed

  def training_table(self) -> np.ndarray | None:
    chunks, dtype = len(self._cache.tables['train']), np.dtype(self._cache.manifest['dtype'])
    # An edit may write ids that no text has.
    dtype = np.promote_types(dtype, np.min_scalar_type(self.vocab_size - 1))
    if (self._cache.weight_tables  # a table has no place for weights
        or chunks * self._chunk_length * dtype.itemsize > _TABLE_BYTES
        or not all(edit.frozen for edit in self._interventions)):
      return None
    table = np.empty((chunks, self._chunk_length), dtype)
    for start in range(0, chunks, _TABLE_ROWS):
      rows = np.arange(start, min(start + _TABLE_ROWS, chunks))
      # Epoch 0 stands for all epochs, since every edit is frozen.
      table[rows] = self._chunks('train', rows, np.zeros_like(rows))
    return table

  def table_rows(self, step: int, batch_size: int, seed: int) -> np.ndarray:
    numbers = step * batch_size + np.arange(batch_size)
    return self._rows_and_epochs(numbers, seed)[0].astype(np.int32)

  def validation(self, batch_size: int, max_batches: int = 0,
                 rows: np.ndarray | None = None) -> dict[str, Sequence[Batch]]:
    """'valid', all chunks, and one set for each domain where there are several."""
    table, domains = self._valid_cache.tables['valid'], self._valid_cache.domains
    # Shuffled once, so that the first few batches are a fair sample of all.
    order = counter_rng.permutation(len(table), _VALID_KEY)
    if self._valid_cache.weight_tables:
      # Chunks without any weight change no mean, and a set of them alone would have none.
      order = order[self._weights_of('valid', order)[:, 1:].any(1)]
      if not len(order):
        raise ValueError('data.interventions overwrite every answer of the validation text: leave '
                         'some of them out, or use a larger context.')
    sets = {'valid': order}
    if len(domains) > 1:
      domain = np.searchsorted(table.offsets, order, side='right') - 1
      sets |= {name: order[domain == d] for d, name in enumerate(domains) if (domain == d).any()}
    make = lambda rows: self._batch('valid', rows, np.zeros_like(rows))
    return {name: FixedBatches(make, listed, batch_size, max_batches, rows)
            for name, listed in sets.items()}

  def probe_tokens(self, sequences: int = 100, length: int = 64) -> np.ndarray:
    """The first tokens (S, T) of validation documents, int32, without BOS and EOS.

    Of the interventions only FixedToken is applied: a model trained with random tokens is measured
    on ordinary text, as in the official implementation (sail-sg/Attention-Sink).
    """
    if not 1 <= length <= self._chunk_length:
      raise ValueError(f'length={length}: prompts have 1 to {self._chunk_length} tokens here '
                       '(context + 1); lower it, or build with a larger context.')
    probes = self._valid_cache.probes(length)
    if len(probes) < sequences:
      raise ValueError(f'{sequences} probe sequences of {length} tokens wanted, but only '
                       f'{len(probes)} validation documents are that long: ask for fewer or '
                       'shorter ones, or raise valid_fraction.')
    probes = probes[:sequences]
    for edit in self._interventions:
      if isinstance(edit, FixedToken) and edit.position <= length:
        probes = edit.apply(probes, np.arange(sequences), np.zeros(sequences), 'valid',
                            self._text_vocabulary)
    return probes

  def check_files(self) -> Callable[[], None]:
    checks = [CacheCheck(cache).start() for cache in self._caches()]

    def wait() -> None:
      for check in checks:
        check.wait()
    return wait

  def remarks(self) -> list[str]:
    lines = [line for cache in self._caches() for line in cache.remarks()]
    chat = any(entry.get('chat') for cache in self._caches()
               for entry in cache.manifest['domains'].values())
    if chat and self._interventions:
      lines.append('Every edit of data.interventions overwrites tokens of each chunk, those of '
                   'conversations and of their template among them.')
    return list(dict.fromkeys(lines))

  def summary(self) -> dict[str, Any]:
    chunks = sum(stop - start for start, stop in self._parts)
    context = self._chunk_length - 1
    return {
        'source': self._cache.manifest['source'], 'content': self._cache.manifest['content'],
        'vocab_size': self.vocab_size, 'context': context,
        'domains': self._cache.manifest['domains'],
        'training_chunks': chunks,
        'unique_training_tokens': chunks * self._chunk_length,
        'tokens_per_epoch': chunks * context,  # predicted tokens
        'validation_chunks': len(self._valid_cache.tables['valid']),
        'probe_sequences_of_64': len(self._valid_cache.probes(min(64, context))),
        **self._validation_summary(),
    }

  def _validation_summary(self) -> dict[str, Any]:
    if self._valid_cache is self._cache:
      return {}
    manifest = self._valid_cache.manifest
    return {f'valid_{name}': manifest[name] for name in ('source', 'content', 'domains')}

  def _caches(self) -> dict[Cache, None]:
    """The caches, each once: those of training and of validation text may be one."""
    return dict.fromkeys((self._cache, self._valid_cache))

  @property
  def encoder(self) -> TextTokenizer:
    return self._cache.encoder

  def decode(self, ids: Sequence[int]) -> str:
    return self.encoder.decode(ids)

  def _training_rows(self, max_tokens: int) -> np.ndarray | None:
    """The sorted row numbers of the chunks that may be used; None = all."""
    available = len(self._cache.tables['train'])
    wanted = max_tokens // self._chunk_length
    if not max_tokens:
      return None
    if not 1 <= wanted <= available:
      raise ValueError(f'max_tokens={max_tokens} must be between one chunk ({self._chunk_length} '
                       f'tokens) and the {available * self._chunk_length} tokens of the training '
                       'set; 0 uses all of it.')
    # The first rows of one permutation: a smaller amount of data is a subset of a larger one.
    return np.sort(counter_rng.permutation(available, _SUBSET_KEY)[:wanted])

  def _mixture(self, domain_weights: tuple[tuple[str, float], ...]
               ) -> tuple[list[tuple[int, int]], list[float] | None]:
    """Ranges (start, stop) of the usable chunks, and their weights."""
    total = len(self._cache.tables['train']) if self._rows is None else len(self._rows)
    if not domain_weights:
      return [(0, total)], None
    domains, bounds = self._cache.domains, self._cache.tables['train'].offsets
    if self._rows is not None:
      bounds = np.searchsorted(self._rows, bounds)  # rows of a domain stay together, being sorted
    names = [name for name, _ in domain_weights]
    if set(names) - set(domains) or len(set(names)) < len(names):
      raise ValueError(f'domain_weights names {", ".join(names)}; name each domain at most once, '
                       f'of: {", ".join(domains)}.')
    parts = [(int(bounds[d]), int(bounds[d + 1])) for d in map(domains.index, names)]
    for (name, weight), (start, stop) in zip(domain_weights, parts, strict=True):
      if not weight > 0:
        raise ValueError(f'domain_weights: the weight {weight} of {name!r} must be positive; '
                         'leave a domain out to exclude it.')
      if start == stop:
        raise ValueError(f'domain {name!r} has no chunk left within max_tokens; raise it.')
    weights = np.array([weight for _, weight in domain_weights], float)
    return parts, list(weights / weights.sum())

  def _stream(self, seed: int) -> grain.MapDataset:
    """The training stream, an endless Grain dataset of (position among usable chunks, epoch).

    Grain handles numbers here, not chunks: one fancy index then reads the rows of a batch.
    """
    if seed not in self._streams:
      self._streams[seed] = self._shuffled(seed)
    return self._streams[seed]

  def _shuffled(self, seed: int) -> grain.MapDataset:
    import grain
    endless = []
    for d, (start, stop) in enumerate(self._parts):
      size = stop - start
      # A seed of its own, else domains of one size would be read in the same order; `repeat`
      # shuffles every epoch anew.
      shuffled = grain.MapDataset.range(start, stop).shuffle(seed=(seed + 7919 * d) % 2**32)
      endless.append(shuffled.repeat().map_with_index(
          lambda index, position, size=size: (position, index // size)))
    return endless[0] if len(endless) == 1 else grain.MapDataset.mix(endless, self._weights)

  def _training_batch(self, numbers: np.ndarray, seed: int) -> Batch:
    return self._batch('train', *self._rows_and_epochs(numbers, seed))

  def _rows_and_epochs(self, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The row of the training chunks and the epoch of these elements of the training stream."""
    stream = self._stream(seed)
    positions, epochs = np.array([stream[int(i)] for i in numbers]).T
    return positions if self._rows is None else self._rows[positions], epochs

  def _batch(self, split: str, rows: np.ndarray, epochs: np.ndarray) -> Batch:
    chunks = self._chunks(split, rows, epochs)
    # A chunk has C + 1 tokens, so that all C positions have a next token to predict.
    tokens, targets = np.ascontiguousarray(chunks[:, :-1]), np.ascontiguousarray(chunks[:, 1:])
    cache = self._valid_cache if split == 'valid' else self._cache
    if not cache.weight_tables:
      return Batch(tokens, targets, np.ones(tokens.shape, np.float32))
    return Batch(tokens, targets, self._weights_of(split, rows)[:, 1:].astype(np.float32))

  def _weights_of(self, split: str, rows: np.ndarray) -> np.ndarray:
    """The weight of each token of chunks as a target, (n, C+1) int32."""
    tables = (self._valid_cache if split == 'valid' else self._cache).weight_tables
    assert tables, 'the cache has weights'
    weights = tables[split].take(rows)
    for edit in self._interventions:
      weights[:, edit.written] = 0
    return weights

  def _chunks(self, split: str, rows: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    cache = self._valid_cache if split == 'valid' else self._cache
    chunks = cache.chunks(split, rows)
    for edit in self._interventions:
      chunks = edit.apply(chunks, rows, epochs, split, self._text_vocabulary)
    return chunks


def _predicted(cache: Cache, split: str) -> int:
  """The weights of all tokens of a split that a chunk predicts."""
  return sum(entry[split]['weights']['predicted'] for entry in cache.manifest['domains'].values())
