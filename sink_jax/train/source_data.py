"""Whether the data of a run are what the model that it begins with reads."""

from __future__ import annotations

import logging

from sink_jax.data.dataset import DataConfig, Dataset
from sink_jax.data.sources import DocumentSource, PackedDataset
from sink_jax.data.tokenizer import Bytes, Encoder, HuggingFace
from sink_jax.io.paths import cache_root
from sink_jax.train.multihost import is_first
from sink_jax.train.start import Encodes, Source

# Two tokenizers are the same one if they make the same ids of this: words, code, numbers, spaces,
# line ends, other scripts, symbols, and names of special tokens, which are text here.
_SAMPLE = ('The quick brown fox  jumps over\tthe "lazy" dog\'s back; 3.14159 - 2024/07/31!\r\n\n'
           'def f(x):\n    return x**2 != {"a": [None, True]}  # déjà vu, naïve façade\n'
           'Съешь же ещё этих мягких булок. 敏捷的棕色狐狸。 こんにちは 안녕하세요 مرحبا 😀 ½µΩ\n'
           '<s> <|endoftext|>')
_log = logging.getLogger('sink_jax')


def check_before_data(source: Source, data: DataConfig) -> None:
  """Raises what `check_data` would, as far as it is known before the data are opened.

  That may take hours, of text that has not been tokenised yet.
  """
  is_text = isinstance(data.source, DocumentSource)
  if source.of_text is not None and source.of_text != is_text:
    kinds = ['a task that makes its own tokens', 'text']
    raise ValueError(f'init.source = {source.name!r} is a model of {kinds[source.of_text]}, and '
                     f'the data are {kinds[is_text]}: train it on data of its kind.')
  # Other tokenizers depend on the documents, and packed data have one of their own.
  if (source.tokenizer and isinstance(data.source, DocumentSource)
      and not isinstance(data.source, PackedDataset)
      and isinstance(data.tokenizer, (Bytes, HuggingFace))):
    _check_ids(f'init.source = {source.name!r}', data.tokenizer.resolve(
        data.source, data.valid_fraction, cache_root(data.cache_dir)), source.tokenizer, _SAMPLE)


def check_data(source: Source, data: Dataset) -> None:
  """Checks that a source reads what the data are; logs it where that cannot be known.

  Raises:
    ValueError: the tokenizers differ, or the vocabularies; names both.
  """
  encoder, where = data.encoder, f'init.source = {source.name!r}'
  for name in ('input_features', 'output_features'):
    if getattr(data, name) != getattr(source.model, name):
      raise ValueError(f'{where} has {name} = {getattr(source.model, name)}, and the data have '
                       f'{getattr(data, name)}: train it on data of its own.')
  if data.vocab_size > source.model.vocab_size:
    raise ValueError(f'{where} has {source.model.vocab_size} tokens, and the data have '
                     f'{data.vocab_size}: use the tokenizer of the source.')
  if encoder is None:
    return
  if source.tokenizer is None:
    if is_first():
      _log.warning(f'{where} has no tokenizer: whether it is that of the data cannot be checked')
    return
  _check_ids(where, encoder, source.tokenizer, _SAMPLE)


def _check_ids(where: str, encoder: Encoder, other: Encodes, text: str) -> None:
  here, there = encoder.encode(text).tolist(), other.encode(text).tolist()
  if here == there:
    return
  first = next((i for i, pair in enumerate(zip(here, there)) if pair[0] != pair[1]),
               min(len(here), len(there)))
  shown = lambda ids: f'{ids[first:first + 4]} ({len(ids)} in all)'
  raise ValueError(
      f'{where} has another tokenizer than the data: of {text[:20]!r}... data.tokenizer makes '
      f'{shown(here)} from token {first + 1} on, that of the source {shown(there)}. Use the '
      "source's: --config.data.tokenizer=\"HuggingFace(path='{source}')\" where init.source is a "
      'folder with a tokenizer, or its path in place of {source}.')
