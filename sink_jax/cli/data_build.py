"""Tokenizes and packs the text of a config ahead of a run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from sink_jax.train.config import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Tokenizes and packs the text of a config once, into shards that runs read in place.

      python -m sink_jax data_build --config=configs/paper.py:default --out=gs://bucket/corpus
      python -m sink_jax data_build --config.data.source="TextFolder(path='texts')" --workers=8

  It prints the data.source (and data.valid_source) that reads them. It may be stopped at any
  moment: the same command keeps the shards that are there.
  """

  #: folder to write, on a disk or gs://bucket/folder; by default one in data.cache_dir, which runs
  #: with this config find.
  out: str = ''
  config: str = ''  # FILE or FILE:TRIAL; by default configs/base.py.
  workers: int = 0  # processes that tokenize; 0: this one, with the threads of the tokenizer.


def main(options: Options, experiment: Experiment) -> None:
  """Builds the packed text of a config and prints what is in it."""
  from sink_jax.data.dataset import open_packed
  from sink_jax.data.sources import DocumentSource, PackedDataset
  from sink_jax.io.terminal import text_table
  from sink_jax.train.start import with_source

  data = with_source(experiment)[0].data  # a source decides the tokenizer
  if not isinstance(data.source, DocumentSource) or isinstance(data.source, PackedDataset):
    raise ValueError(
      f'--config.data.source={data.source!r} is not text: there is nothing to build.'
    )
  training, valid = open_packed(data, options.out, options.workers)
  rows = [
    (name, split, *(f'{entry[split][key]:,}' for key in ('documents', 'tokens', 'rows')))
    for packed in dict.fromkeys((training, valid))
    for name, entry in packed.manifest['domains'].items()
    for split in ('train', 'valid')
    if entry[split]['documents']
  ]
  head = ('domain', 'split', 'documents', 'tokens', 'rows')
  print('\n'.join(text_table(head, rows, left=(0, 1))))
  print(f'--config.data.source="PackedDataset(path=\'{training.folder}\')"')
  if valid is not training:
    print(f'--config.data.valid_source="PackedDataset(path=\'{valid.folder}\')"')
