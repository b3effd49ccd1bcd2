"""Opens a `DataConfig` as a `Dataset`: documents that are packed and shuffled, or a synthetic task.

The training stream is endless and has no state. Its element number i is a row that follows from i
and the seed: Grain computes the shuffle of an epoch at one position without the others. Batch b
holds the elements b * batch_size and following, so that a run resumes anywhere, and every process
of a job reads only its rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sink_jax.component import from_string, option

# Importing chat and stdlib makes their sources available to configs.
from sink_jax.data import build, chat, counter_rng, stdlib  # noqa: F401
from sink_jax.data.batches import Batch, Dataset, FixedBatches
from sink_jax.data.packed import FORMAT, SPLITS, Packed
from sink_jax.data.sources import DocumentSource, HubDataset, PackedDataset, Source
from sink_jax.data.synthetic import SyntheticDataset, SyntheticTask
from sink_jax.data.token_edits import FixedToken, TokenEdit
from sink_jax.data.tokenizer import Bytes, TextTokenizer, Tokenizer
from sink_jax.io.paths import cache_root, expanded, is_local, to_path

# Keys of `counter_rng`, fixed on purpose: the subset of a smaller data amount and the order of the
# validation rows must not depend on the seed of a run, or runs could not be compared.
_SUBSET_KEY, _VALID_KEY = 1, 2
# 2^32 over the golden ratio; it is odd, so that no two seeds become one.
_FAR_APART = 2_654_435_761
_LAYOUT = ('context', 'bos', 'eos')  # keys of a config and of a manifest


class Sizes(NamedTuple):
  """The ids of a model, or the features of continuous inputs and outputs.

  vocab_size: 0 for continuous inputs, None if it is not known before the tokenizer is opened.
  """

  vocab_size: int | None
  input_features: int = 0
  output_features: int = 0


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Everything that decides the tokens of a run, except seed and batch size.

  With a `valid_source` nothing of `source` is held out, and the two sources have separate domains.
  A synthetic task does not use `eos` and `cache_dir`, and its `length` must equal `context`.

  ids: of packed text, which `as_packed` reads.
  """

  source: Source = option(
    stdlib.Stdlib(),
    'Stdlib, TextFolder, Jsonl, ChatJsonl, Tfds, HubDataset, PackedDataset, '
    'InstalledPackages, PythonManual, StdlibFunctions, or a synthetic task',
  )
  tokenizer: Tokenizer = option(
    Bytes(), "Bytes, HuggingFace, TrainedBpe; with init.source the source's"
  )
  context: int = option(2048, 'C: the model sees C tokens, rows have C + 1', least=1)
  bos: bool = option(False, 'put BOS before every document')
  eos: bool = option(True, 'put EOS after every document')
  max_tokens: int = option(0, 'tokens of training data (Figure 5 right); 0: all', least=0)
  interventions: tuple[TokenEdit, ...] = option(
    (), "'FixedToken(position=1); RandomTokens(first=2)'"
  )
  valid_fraction: float = option(0.05, 'share of documents held out')
  valid_source: Source | None = option(
    None, 'another source for validation; empty: hold documents out'
  )
  cache_dir: str = option(
    '', 'folder of packed text, also gs://; empty: $SINK_JAX_CACHE or ~/.cache/sink_jax', where=True
  )
  ids: int | None = dataclasses.field(default=None, metadata={'key': False})

  def __post_init__(self) -> None:
    if not 0 < self.valid_fraction < 1:
      raise ValueError(f'data.valid_fraction={self.valid_fraction} must be between 0 and 1.')

  def check_remote(self) -> None:
    """Raises a ValueError where a path is of this machine, and other machines run the job."""
    for key, source in (('source', self.source), ('valid_source', self.valid_source)):
      path = getattr(source, 'path', None)
      if not path or isinstance(source, HubDataset):
        continue
      if '://' not in path and not expanded(path).is_absolute():
        raise ValueError(
          f'data.{key} = {source!r} is a folder of this machine: pack it with python -m sink_jax '
          'data_build --out=gs://BUCKET/PATH, and name that (DATA in launch/settings.sh).'
        )

  @property
  def sizes(self) -> Sizes:
    """The sizes of a model of these data, as far as they are known before the text is opened."""
    if isinstance(task := self.source, SyntheticTask):
      return Sizes(task.vocab_size, task.input_features, task.output_features)
    ids = self.ids or getattr(self.tokenizer, 'vocab_size', None)
    if ids is not None:
      ids = functools.reduce(lambda n, edit: edit.vocab_size(n), self.interventions, ids)
    return Sizes(ids)


def open_data(config: DataConfig) -> Dataset:
  """Opens the data of a config; packs the text first if that has not been done.

  Raises:
    ValueError: anything wrong with the corpus or the options, with the remedy.
  """
  config = as_packed(config)
  task = config.source
  if not isinstance(task, SyntheticTask):
    return CorpusDataset(*open_packed(config), config)
  for name in ('valid_source', 'valid_fraction', 'tokenizer', 'bos', 'max_tokens', 'interventions'):
    if getattr(config, name) != getattr(DataConfig, name):
      raise ValueError(f'data.{name} is for document corpora; leave it out with {task!r}.')
  if config.context != task.length:
    raise ValueError(
      f'data.context={config.context} must equal the length {task.length} of '
      f'{task!r}: change one of them.'
    )
  return SyntheticDataset(task)


def as_packed(config: DataConfig) -> DataConfig:
  """The config with the values that its `PackedDataset` was built with; others are unchanged.

  They are tokenizer, context, BOS, EOS and held-out share. A value of the config that equals the
  default counts as not set.

  Raises:
    ValueError: the folder is not packed data, or the config asks for another value.
  """
  if not isinstance(config.source, PackedDataset):
    return config
  manifest = Packed(to_path(config.source.path)).manifest
  built = {key: manifest[key] for key in _LAYOUT}
  built['tokenizer'] = from_string(Tokenizer, manifest['tokenizer'])
  if config.valid_source is None and manifest['valid_fraction'] not in (0, 1):
    built['valid_fraction'] = manifest['valid_fraction']
  for name, value in built.items():
    asked = getattr(config, name)
    if asked not in (getattr(DataConfig, name), value):
      raise ValueError(
        f'{config.source!r} was built with {name}={value}, and the config asks for '
        f'{asked}: set --config.data.{name}="{value}", or build it again.'
      )
  return dataclasses.replace(config, **built, ids=manifest['vocab_size'])


def open_packed(config: DataConfig, out: str = '', workers: int = 0) -> tuple[Packed, Packed]:
  """The packed training and validation text; what is missing is built first.

  Without a validation source both are the same folder, a part of whose documents is held out. The
  name of a folder in `data.cache_dir` is a hash of everything that decides its content.

  Args:
    out: the folder itself, on a disk or gs://; with a `valid_source` its sub-folders train and
      valid. '' is a folder in the cache.
    workers: processes that tokenize; 0 is only this one, with the threads of the tokenizer.
  """
  if config.valid_source is None:
    packed = _open(config, config.source, config.valid_fraction, out, workers)
    return packed, packed
  training = _open(config, config.source, 0, out and f'{out}/train', workers)
  return training, _open(
    config, config.valid_source, 1, out and f'{out}/valid', workers, training.tokenizer
  )


def _open(
  config: DataConfig,
  source: Source,
  valid_fraction: float,
  out: str,
  workers: int,
  tokenizer: TextTokenizer | None = None,
) -> Packed:
  """One folder of packed data; `tokenizer`: for validation text, the one of the training text."""
  if isinstance(source, PackedDataset):
    packed = Packed(to_path(source.path))
    _check_pair(packed, config, source, valid_fraction, tokenizer)
    return packed
  if not isinstance(source, DocumentSource):
    raise ValueError(f'data.valid_source = {source!r} has no text; name documents.')
  settings = _settings(config, source, valid_fraction, tokenizer)
  key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
  name = f'{type(source).__name__.lower()}-{config.context}-{key}'
  cache = to_path(config.cache_dir) if config.cache_dir else cache_root()
  folder = to_path(out) if out else cache / name
  build.check(folder, settings)  # before a tokenizer is trained
  if not (folder / 'manifest.json').exists():
    tokenizer = tokenizer or config.tokenizer.open(source, valid_fraction)
    layout = build.Layout(tokenizer, source, config.context, config.bos, config.eos, valid_fraction)
    build.build(folder, layout, settings, workers)
  return Packed(folder)


def _check_pair(
  packed: Packed,
  config: DataConfig,
  source: PackedDataset,
  valid_fraction: float,
  tokenizer: TextTokenizer | None,
) -> None:
  """Raises a ValueError if a folder is not packed as the config and its other folder are."""
  manifest = packed.manifest
  built = manifest['valid_fraction']
  one_of_a_pair = built != valid_fraction and bool({valid_fraction, built} & {0, 1})
  layout = {key: manifest[key] for key in _LAYOUT}
  same_layout = all(getattr(config, key) == value for key, value in layout.items())
  same_ids = tokenizer is None or manifest['ids'] == tokenizer.digest
  if one_of_a_pair or not same_layout or not same_ids:
    raise ValueError(
      f'{source!r} was built with valid_fraction={built}, {manifest["tokenizer"]} and {layout}, '
      'not as the training text: a folder of only training or validation text is one of a pair, '
      'which one call of data_build makes for data.source and data.valid_source.'
    )


def _settings(
  config: DataConfig, source: DocumentSource, valid_fraction: float, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
  """Everything that decides the content of a folder."""
  # The tokenizer's path in a manifest is of the machine where the training text was packed.
  elsewhere = tokenizer is not None and isinstance(config.source, PackedDataset)
  return {
    'source': repr(source),
    'source_fingerprint': source.fingerprint(),
    'tokenizer': repr(config.tokenizer),
    'tokenizer_fingerprint': '' if elsewhere else config.tokenizer.fingerprint(),
    'of_training': tokenizer and tokenizer.digest,
    **{key: getattr(config, key) for key in _LAYOUT},
    'valid_fraction': valid_fraction,
    'format': FORMAT,
    'shard_characters': build.SHARD_CHARACTERS,
  }


class CorpusDataset(Dataset):
  """The data of a document corpus.

  Args:
    packed, valid: the packed training and validation text, which may be the same folder.
    config: `max_tokens` takes the same subset of rows in every epoch. `interventions` are applied
      in their order to every training and validation row.

  Raises:
    ValueError: an option does not fit.
  """

  def __init__(self, packed: Packed, valid: Packed, config: DataConfig):
    self._packed = {'train': packed, 'valid': valid}
    for split, text in self._packed.items():
      if not text.size(split):
        raise ValueError(
          f'{text.folder} has no row for {split}: add text to a domain, or lower data.context.'
        )
    self.tokenizer = packed.tokenizer
    self._interventions = config.interventions
    self._row_length = packed.manifest['context'] + 1
    self._text_vocabulary = self.vocab_size = packed.manifest['vocab_size']
    for edit in self._interventions:
      edit.check(self._row_length, self._text_vocabulary)
      self.vocab_size = edit.vocab_size(self.vocab_size)
    self._read_threads = 1 if is_local(packed.folder) else 8  # which wait for a store
    self._rows = self._training_rows(config.max_tokens)

  def validation(
    self, batch_size: int, max_batches: int = 0, rows: np.ndarray | None = None
  ) -> dict[str, Sequence[Batch]]:
    """'valid', all rows, and one set for each domain if there are several."""
    valid = self._packed['valid']
    # Shuffled once, so that the first few batches are a fair sample of all.
    order = counter_rng.permutation(valid.size('valid'), _VALID_KEY)
    sets = {'valid': order}
    if len(valid.domains) > 1:
      domains = np.searchsorted(valid.bounds['valid'], order, side='right') - 1
      by_domain = {name: order[domains == d] for d, name in enumerate(valid.domains)}
      sets |= {name: numbers for name, numbers in by_domain.items() if len(numbers)}
    make = functools.partial(self._batch, 'valid')
    return {
      name: FixedBatches(make, numbers, batch_size, max_batches, rows)
      for name, numbers in sets.items()
    }

  def probe_tokens(self, sequences: int = 100, length: int = 64) -> np.ndarray:
    """The first tokens (S, T) of validation documents, int32, without BOS and EOS.

    If they are too few, pieces of validation rows follow. The only intervention applied is
    FixedToken: a model trained with random tokens is measured on ordinary text, as in the official
    implementation (sail-sg/Attention-Sink).
    """
    probes = self._packed['valid'].prompts(sequences, length)
    if len(probes) < sequences:
      raise ValueError(
        f'The validation text has only {len(probes)} prompts of '
        f'probe.length={length} tokens, not probe.sequences={sequences}: lower one '
        'of them, or raise data.valid_fraction.'
      )
    for edit in self._interventions:
      if isinstance(edit, FixedToken) and edit.position <= length:
        probes = edit.apply(probes, np.arange(sequences), 'valid', self._text_vocabulary)
    return probes

  def remarks(self) -> list[str]:
    names = dict.fromkeys(
      name
      for packed in self._packed.values()
      for name, entry in packed.manifest['domains'].items()
      if entry['split_by_rows']
    )
    return (
      [
        f'{", ".join(names)}: too few documents to hold some out, so the last rows are for '
        'validation; they continue the training text.'
      ]
      if names
      else []
    )

  def summary(self) -> dict[str, Any]:
    training, valid = (self._packed[split] for split in SPLITS)
    manifest, rows = training.manifest, len(self._rows)
    summary = {
      'source': manifest['source'],
      'content': manifest['content'],
      'vocab_size': self.vocab_size,
      'context': manifest['context'],
      'domains': training.counts(),
      'training_rows': rows,
      'unique_training_tokens': rows * self._row_length,
      'tokens_per_epoch': rows * (self._row_length - 1),  # predicted tokens
      'validation_rows': valid.size('valid'),
      'unigram_loss': self.unigram_loss,
    }
    if valid is not training:
      summary |= {
        'valid_source': valid.manifest['source'],
        'valid_content': valid.manifest['content'],
        'valid_domains': valid.counts(),
      }
    return summary

  def _training_rows(self, max_tokens: int) -> Sequence[int]:
    """The row numbers that may be used, sorted."""
    available, wanted = self._packed['train'].size('train'), max_tokens // self._row_length
    if not max_tokens:
      return range(available)
    if not 1 <= wanted <= available:
      raise ValueError(
        f'data.max_tokens={max_tokens} must be between one row ({self._row_length} '
        f'tokens) and the {available * self._row_length} tokens of the training '
        'set; 0 uses all of it.'
      )
    # The first rows of one permutation: a smaller amount of data is a subset of a larger one.
    return np.sort(counter_rng.permutation(available, _SUBSET_KEY)[:wanted]).tolist()

  def _training_batch(self, numbers: np.ndarray, seed: int) -> Batch:
    # The order of grain.MapDataset.source(rows).shuffle(seed).repeat(), which takes ten times as
    # long: it counts and times every element. Epoch e is shuffled with the seed plus e, so that the
    # seeds of runs must lie far apart: else they share epochs.
    from grain.experimental import index_shuffle

    last = len(self._rows) - 1
    epochs, positions = np.divmod(numbers, len(self._rows))
    seeds = (seed * _FAR_APART % 2**32 + epochs) % 2**32
    shuffled = [
      index_shuffle(position, max_index=last, seed=epoch_seed, rounds=4)
      for position, epoch_seed in zip(positions.tolist(), seeds.tolist(), strict=True)
    ]
    return self._batch('train', np.array([self._rows[i] for i in shuffled]))

  def _batch(self, split: str, rows: np.ndarray) -> Batch:
    packed = self._packed[split]
    tokens, answers = packed.rows(split, rows)
    weights = np.ones(tokens.shape, np.float32) if answers is None else answers.astype(np.float32)
    for edit in self._interventions:
      tokens = edit.apply(tokens, rows, split, self._text_vocabulary)
      if answers is not None:  # what is written is not an answer
        weights[:, edit.written] = 0
    # A row has C + 1 tokens, so that all C positions have a next token to predict.
    return Batch(*map(np.ascontiguousarray, (tokens[:, :-1], tokens[:, 1:], weights[:, 1:])))
