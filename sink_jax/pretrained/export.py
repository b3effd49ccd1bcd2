"""A training run as a checkpoint that transformers loads, where it has a counterpart there.

What the class of transformers lacks is folded into weights where that computes the same
(`folds`); the first class that holds what is left is taken (`targets`). Where there is an importer
of this class, the tensors to write are those of its table, so an exported run comes back as it was.
A run that no class holds is written with PyTorch code of its own, if asked (`to_custom`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from sink_jax.data.dataset import DataConfig
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.paths import to_local_path, to_path
from sink_jax.models.run import Run
from sink_jax.pretrained import to_custom
from sink_jax.pretrained.files import INDEX, WEIGHTS, write_object
from sink_jax.pretrained.folds import Folded, folded, with_plain_linear
from sink_jax.pretrained.load import load_run
from sink_jax.pretrained.model_card import model_card
from sink_jax.pretrained.sink_token import unused_token
from sink_jax.pretrained.target import Leaves, WrittenTensor, common_keys
from sink_jax.pretrained.targets import CUSTOM, choose
from sink_jax.train.config import from_dict
from sink_jax.train.workdir import read_config

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}


class Exported(NamedTuple):
  """What was written: config.json, and lines on how the run became it, for the user."""

  hf: dict[str, Any]
  notes: tuple[str, ...]


def export_checkpoint(run: Run, folder: str | os.PathLike, *, dtype: str = 'float32',
                      context: int = 2048, target: str | None = None,
                      sink_id: int | None = None, shard_bytes: int = 5 * 10**9) -> Exported:
  """Writes config.json and the weights of a model.

  Args:
    folder: it is made where it does not exist, and must be empty.
    dtype: of the weights, 'float32' or 'bfloat16'.
    context: the max_position_embeddings of config.json.
    target: the class that it must be, a key of `TARGETS`, or 'custom' for PyTorch code of its own
      beside the weights; None for the first of `TARGETS` that holds it.
    sink_id: a token that training never held as input, which becomes the learned sink token of a
      run that has one. Inputs of the checkpoint begin with it.
    shard_bytes: weights above this size go into several files of at most this size (a
      larger tensor into a file of its own), with an index.

  Raises:
    ValueError: an option of the model has no counterpart in transformers, or none in this class,
      or the folder holds something already.
  """
  if dtype not in DTYPES:
    raise ValueError(f'dtype = {dtype!r}; choices: {", ".join(DTYPES)}.')
  # Every option is checked before the first file is written.
  if run.config.sink_tokens != 1 or target == to_custom.NAME:
    sink_id = None
  elif not 0 <= (sink_id or 0) < run.config.vocab_size:
    raise ValueError(f'sink_id = {sink_id}: the model has {run.config.vocab_size} tokens.')
  if target == to_custom.NAME:  # its file computes the parts themselves
    model = with_plain_linear(Folded(run.config, _leaves(run)))
  else:
    model = folded(run.config, _leaves(run), sink_id)
  chosen, reason = choose(model.config, run.config, target)
  hf = (common_keys(model.config, chosen, dtype=dtype, context=context)
        | chosen.keys(model.config, context) | {
            'bos_token_id': run.first_token if sink_id is None else sink_id})
  folder = Path(folder)
  # The folder of the run itself has a config.json, too, which must not be lost.
  if present := [p.name for kind in ('config.json', '*.safetensors*', '*')
                 for p in sorted(folder.glob(kind))]:
    raise ValueError(f'{folder} already holds {present[0]}: choose another folder, or empty it.')
  folder.mkdir(parents=True, exist_ok=True)
  table = chosen.tensors(model.config)
  shards, total = _shards(table, DTYPES[dtype].itemsize, shard_bytes)
  index = {}
  for number, names in enumerate(shards, 1):
    # The names that transformers gives its shards; a checkpoint of one file has no index.
    file = f'model-{number:05}-of-{len(shards):05}.safetensors' if len(shards) > 1 else WEIGHTS
    tensors = _tensors(table, names, model.leaves, DTYPES[dtype])
    save_file(dict(tensors), folder / file, {'format': 'pt'})
    index |= dict.fromkeys(names, file)
  if len(shards) > 1:
    write_object(folder / INDEX, {'metadata': {'total_size': total}, 'weight_map': index})
  if chosen is CUSTOM:
    (folder / f'{to_custom.MODULE}.py').write_text(to_custom.code(), encoding='utf-8')
  # Last: a folder without it is not taken for a checkpoint, so an export that is killed is none.
  write_object(folder / 'config.json', hf)
  return Exported(hf, (f'{chosen.ARCHITECTURE}: {reason}', *model.notes))


def _leaves(run: Run) -> Leaves:
  """The reader of a run's leaves."""
  def read(path: str, index: tuple[int, ...]) -> np.ndarray:
    leaf: Any = run.params
    for key in path.split('/'):
      leaf = leaf[key]
    # One layer of the stacked leaf at a time comes to the host.
    return np.asarray(leaf[index])

  return read


def _shards(table: dict[str, WrittenTensor], itemsize: int, limit: int,
            ) -> tuple[list[list[str]], int]:
  """Names of the tensors of every file, and the bytes of all."""
  # Greedily, in the order of the table, as transformers does: no shard is opened again.
  shards: list[list[str]] = [[]]
  room, total = limit, 0
  for name, tensor in table.items():
    size = int(np.prod(tensor.shape)) * itemsize
    if size > room and shards[-1]:
      shards.append([])
      room = limit
    shards[-1].append(name)
    room, total = room - size, total + size
  return shards, total


def _tensors(table: dict[str, WrittenTensor], names: list[str], leaves: Leaves, dtype: np.dtype,
             ) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors as they are stored."""
  for name in names:
    # `asarray`, since np.ascontiguousarray gives a scalar an axis.
    x = np.asarray(table[name].make(leaves), dtype, order='C')
    assert x.shape == tuple(table[name].shape), f'{name}: {x.shape}'
    yield name, x


def export_workdir(workdir: str | os.PathLike, out: str | os.PathLike, *,
                   dtype: str = 'float32', target: str | None = None) -> list[str]:
  """Writes the model of a run, a card of it and, where possible, its tokenizer.

  Returns lines to print.

  Args:
    dtype, target: see `export_checkpoint`.

  Raises:
    ValueError: there is no run, or it has no counterpart in transformers.
    CheckpointError: it has no usable checkpoint.
  """
  folder = to_local_path(out, '--out', 'transformers reads no other; copy it from there')
  data = from_dict(read_config(to_path(workdir))).data
  run = load_run(workdir)
  tokenizer, no_tokenizer = _tokenizer(run)
  sink_id = None
  if run.config.sink_tokens == 1 and target != to_custom.NAME:
    sink_id = _sink_id(tokenizer, no_tokenizer, data)
  hf, notes = export_checkpoint(run, folder, dtype=dtype, context=data.context, target=target,
                                sink_id=sink_id)
  card = model_card(workdir, run.step, hf, notes)
  (folder / 'README.md').write_text(card, encoding='utf-8')
  lines = [f'{folder / "config.json"}: {hf["model_type"]}, step {run.step}, {dtype}', *notes]
  if tokenizer is not None:
    try:
      ids = write_tokenizer(tokenizer, folder, data.context, sink_id)
      write_object(folder / 'config.json', hf | ids)
      return [*lines, f'{folder / "tokenizer.json"}: {tokenizer.vocab_size} tokens']
    except (ValueError, OSError) as error:  # the weights are of use without it
      no_tokenizer = _one_line(error)
  return [*lines, f'No tokenizer written: {no_tokenizer}']


def write_tokenizer(tokenizer: TextTokenizer, folder: str | os.PathLike, context: int,
                    sink_token: int | None = None) -> dict[str, int]:
  """Writes the tokenizer of a run for transformers; returns the ids for config.json.

  Args:
    context: the longest sequence in tokens.
    sink_token: the token that takes the place of a learned sink token: it is then the BOS, and
      stands before the first token or the BOS of the documents.
  """
  if sink_token is not None:
    tokenizer = dataclasses.replace(tokenizer, bos_id=sink_token,
                                    prefix=(sink_token, *tokenizer.prefix))
  if tokenizer.pad_id in tokenizer.prefix:  # padding is masked out, and what comes first must not be
    tokenizer = dataclasses.replace(tokenizer, pad_id=tokenizer.eos_id)
  tokenizer.save(folder, model_max_length=context)
  ids = {'bos_token_id': tokenizer.bos_id, 'eos_token_id': tokenizer.eos_id, 'pad_token_id': tokenizer.pad_id}
  return {key: i for key, i in ids.items() if i is not None}


def _tokenizer(run: Run) -> tuple[TextTokenizer | None, str]:
  """(tokenizer of a run, '') or (None, why there is none)."""
  try:
    assert isinstance(tokenizer := run.tokenizer, TextTokenizer)
    return tokenizer, ''
  except (ValueError, OSError) as error:
    return None, _one_line(error)


def _sink_id(tokenizer: TextTokenizer | None, no_tokenizer: str, data: DataConfig) -> int:
  """The token that a learned sink token becomes; raises a ValueError where there is none."""
  try:
    if tokenizer is None:
      raise ValueError(no_tokenizer.rstrip('.'))
    return unused_token(tokenizer, data)
  except ValueError as error:
    raise ValueError(
        'model.sink_tokens = 1 would be the embedding of a token that training never had as '
        f'input, and there is none: {error}. --as=custom writes the run as it is.') from None


def _one_line(error: Exception) -> str:
  return ' '.join(str(error).split())
