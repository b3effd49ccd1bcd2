"""Prepares a dataset of TensorFlow Datasets, or of documents, as ArrayRecord."""

from __future__ import annotations

import os
import pathlib
import sys

import tensorflow_datasets as tfds

import sink_jax.data.packages  # noqa: F401  a source is a choice once its module is imported
import sink_jax.data.stdlib  # noqa: F401
from sink_jax.cli.options import BuildTfds
from sink_jax.component import from_string
from sink_jax.data.chat import ChatJsonl, StdlibChat
from sink_jax.data.documents import DocumentSource, PackedDataset, Tfds
from sink_jax.io.progress import Progress


def main(options: BuildTfds) -> None:
  """Prepares a dataset and prints the source that reads it."""
  print(prepare(options))


def prepare(options: BuildTfds) -> Tfds:
  """Downloads and prepares a dataset, unless the folder has it already.

  Returns:
    The source that reads its first split.

  Raises:
    ValueError: the name is unknown, or the dataset needs packages that are not here.
  """
  name = options.name
  source = from_string(DocumentSource, options.source) if options.source else None
  # In a log file every update of a bar would be a line.
  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  default = tfds.core.constants.DATA_DIR  # pyright: ignore  a module that is made at run time
  folder = os.path.expanduser(options.data_dir) or default
  builder = _of_documents(name, folder, source) if source else _known(name, folder)
  file_format = builder.info.file_format
  assert file_format is not None  # every builder has one
  # The folder may hold the dataset from before, in whatever format it was prepared then.
  if file_format.value != 'array_record':
    raise ValueError(f'{builder.data_path} holds {name!r} as {file_format.value}, '
                     'which needs TensorFlow to read: use another --data_dir.')
  try:
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False))
  except ImportError as error:  # of TensorFlow, Beam or a package of the dataset's own
    raise _lacks(name, error) from None
  except (tfds.download.DownloadError, AssertionError, ValueError) as error:
    raise ValueError(f'{name!r} cannot be prepared: {error}') from None
  # Not every dataset has a split called 'train'.
  split = 'train' if 'train' in builder.info.splits else next(iter(builder.info.splits))
  return Tfds(name=name, data_dir=options.data_dir, split=split)


def _known(name, folder):
  try:
    return tfds.builder(name, data_dir=folder, file_format='array_record', try_gcs=False)
  except tfds.core.DatasetNotFoundError:
    base = name.split('/')[0].split(':')[0]
    if any(pathlib.Path(tfds.__file__).parent.glob(f'*/{base}.py')):  # it could not be imported
      raise _lacks(name, 'its code imports TensorFlow') from None
    raise ValueError(f'TFDS has no dataset {name!r}. Names are on '
                     'https://www.tensorflow.org/datasets/catalog; --source makes a dataset of '
                     'your own documents.') from None
  except ImportError as error:
    raise _lacks(name, error) from None
  except (ValueError, RuntimeError) as error:
    raise ValueError(f'{name!r}: {error}') from None


def _lacks(name, why):
  return ValueError(
      f'{name!r} cannot be prepared here: {why}. Run the same command in another environment '
      'that has sink_jax and that package; the folder it writes is read without it. Or take the '
      'text as JSON lines: Jsonl(path=...).')


def _of_documents(name, folder, source):
  if isinstance(source, PackedDataset):
    raise ValueError(f'{source!r} holds chunks, not documents: name the source that it was built '
                     'of.')
  if isinstance(source, (ChatJsonl, StdlibChat)):
    raise ValueError(f'{source!r} has conversations, of which a dataset of texts would lose where '
                     'messages end, and the weights: train on it directly, as data.source.')
  if not (name.isidentifier() and name == name.lower()):
    raise ValueError(f'--name={name}: with --source, use small letters, digits and _.')

  made_of = f'{source!r}, fingerprint {source.fingerprint()}'

  # The type checker does not see the argument of its metaclass.
  class Documents(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # pyright: ignore
    """Documents of a source: text, domain and name, in the order of the source."""
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      text = tfds.features.Text
      return tfds.core.DatasetInfo(
          # Without shuffling the documents keep the order of the source; the description tells
          # later what the folder was made of.
          builder=self, description=made_of, disable_shuffling=True,
          features=tfds.features.FeaturesDict(
              {'text': text(), 'domain': text(), 'name': text()}))

    def _split_generators(self, download):
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      with Progress('preparing', source.size()) as progress:
        for index, document in enumerate(source.documents()):
          progress.update(document.position, documents=index + 1)
          yield index, {'text': document.text, 'domain': document.domain, 'name': document.name}

  # TFDS names a dataset after its class; this one is called as the person says.
  Documents.name = name
  builder = Documents(data_dir=folder, file_format='array_record')
  if pathlib.Path(builder.data_path).exists():
    there = tfds.builder_from_directory(builder.data_path).info.description
    # A builder takes over a folder that is there, without a look at what it was made of.
    if there != made_of:
      raise ValueError(f'{builder.data_path} was made of {there}, and this is {made_of}: use '
                       'another --name, or remove that folder.')
  return builder
