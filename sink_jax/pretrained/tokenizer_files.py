"""A run's tokenizer as the files that transformers loads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sink_jax.data.dataset import DataConfig
from sink_jax.data.packed import Packed
from sink_jax.data.sources import DocumentSource, PackedDataset
from sink_jax.data.tokenizer import EOS_TEXT, PAD_TEXT, ByteEncoder, Bytes, Encoder, HuggingFace
from sink_jax.io.paths import cache_root, to_path
from sink_jax.pretrained.files import write_object

if TYPE_CHECKING:  # a run of bytes or of a synthetic task needs no tokenizers
  import tokenizers
  from tokenizers.processors import PostProcessor


def encoder_of(data: DataConfig, content: str) -> Encoder:
  """The encoder of a run's data.

  A tokenizer that depends on the documents is the one in the packed data of the run, which
  are known by their content: trained again, it could be another.

  Args:
    content: the entry of that name in the `Dataset.summary()` of the run.

  Raises:
    ValueError: a synthetic task has no encoder, or the packed data are not on this machine.
  """
  if not isinstance(data.source, DocumentSource):
    raise ValueError(f'{data.source!r} makes its own tokens: such a run has no text.')
  if isinstance(data.tokenizer, Bytes):
    return ByteEncoder()
  # Without a PackedDataset every folder below the root is looked at, and the one with the content of
  # the run is taken, whatever its name.
  root = to_path(data.cache_dir) if data.cache_dir else cache_root()
  folders = ([to_path(data.source.path)] if isinstance(data.source, PackedDataset) else
             sorted(path.parent for path in root.glob('*/manifest.json')))
  for folder in folders:
    try:
      packed = Packed(folder)
    except ValueError:  # damaged, or of another version: it cannot be known to be that of the run
      continue
    if packed.manifest['content'] == content:
      return packed.encoder
  # Only its file decides this tokenizer, so it can be made without the packed data.
  if isinstance(data.tokenizer, HuggingFace):
    return data.tokenizer.resolve(data.source, data.valid_fraction, cache_root(data.cache_dir))
  raise ValueError(f'the packed data of this run, which hold {data.tokenizer!r}, are not below '
                   f'{root}: set SINK_JAX_CACHE to the folder that it was trained with.')


def write_tokenizer(encoder: Encoder, folder: str | os.PathLike, *, context: int, bos: bool,
                    first_token: int | None = None, sink_token: int | None = None,
                    ) -> dict[str, int]:
  """Writes tokenizer.json and tokenizer_config.json; returns the ids for config.json.

  A text gets the ids that the encoder gives it, with one exception: the name of a special
  token inside a text, such as <|endoftext|>, is read as this token, which the encoder never does.

  Args:
    context: the longest sequence in tokens.
    bos: whether documents began with BOS.
    first_token: the token that every sequence of the training began with; it is then the BOS.
    sink_token: the token that takes the place of a learned sink token; it is then the BOS, and
      stands before the first token, or the BOS of the documents.

  Raises:
    ValueError: the tokenizer has no token of this id.
  """
  import tokenizers
  path = Path(folder, 'tokenizer.json')
  if isinstance(encoder, ByteEncoder):
    _bytes_tokenizer().save(str(path))
  else:
    encoder.save(folder)
  whole = tokenizers.Tokenizer.from_file(str(path))
  # These overwrite the ids of config.json, which transformers generates with.
  ids = {'bos_token_id': encoder.bos_id, 'eos_token_id': encoder.eos_id,
         'pad_token_id': encoder.pad_id}
  begin = [encoder.bos_id] if bos else []
  if first_token is not None:
    begin = [first_token]
  if sink_token is not None:
    begin = [sink_token, *begin]
  if first_token is not None or sink_token is not None:
    ids['bos_token_id'] = begin[0]
    if encoder.pad_id in begin:  # padding is masked out, and what comes first must not be
      ids['pad_token_id'] = encoder.eos_id
  if first_token is not None or sink_token is not None or bos and whole.post_processor is None:
    # A file that has a post-processor says itself which BOS it adds.
    whole.post_processor = _template(whole, begin)
    whole.save(str(path))
  names = {key.removesuffix('_id'): whole.id_to_token(id_) for key, id_ in ids.items()}
  about = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': context,
           'add_bos_token': bos or first_token is not None,
           'clean_up_tokenization_spaces': False, **names}
  if sink_token is not None:
    del about['add_bos_token']  # with it a program would add the BOS alone
  elif first_token is not None and first_token not in whole.get_added_tokens_decoder():
    # transformers cuts what is named here out of every text that holds it: the template will do.
    del about['bos_token'], about['add_bos_token']
  write_object(Path(folder, 'tokenizer_config.json'), about)
  return ids


def _template(tokenizer: tokenizers.Tokenizer, begin: Sequence[int]) -> PostProcessor:
  """The post-processor that puts one token or more before every text.

  It does not look at the text: where that begins with an ordinary token of the same number,
  other programs make sequences that begin with it twice, and sink_jax ones that begin once.
  """
  from tokenizers.processors import TemplateProcessing
  special = []
  for i, token in enumerate(begin):
    name = tokenizer.id_to_token(token)
    if name is None:
      raise ValueError(f'the tokenizer has no token {token}, which the run begins with.')
    # The name itself could be read as a part of the template.
    special.append({'id': f'first{i}', 'ids': [token], 'tokens': [name]})
  first = ' '.join(entry['id'] for entry in special)
  return TemplateProcessing(single=f'{first} $A', pair=f'{first} $A $B', special_tokens=special)


def _bytes_tokenizer() -> tokenizers.Tokenizer:
  """UTF-8 bytes with the ids of ByteEncoder: no character is a token, so all fall back."""
  from tokenizers import AddedToken, Tokenizer, decoders, models
  vocabulary = {EOS_TEXT: 0, PAD_TEXT: 1} | {f'<0x{b:02X}>': 2 + b for b in range(256)}
  tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
  tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)
                                for name in (EOS_TEXT, PAD_TEXT)])
  tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
  return tokenizer
