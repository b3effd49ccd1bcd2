"""Inputs for the probe of a published model: text, random tokens, one repeated token (Section 3.3).

A sink sits on the first token. `bos` is the protocol for it, as in `TextTokenizer.before`: 'none',
'tokenizer' or 'force'. No sequence begins with two BOS tokens, and the description records what was
done.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sink_jax.component import from_string
from sink_jax.data.sources import JSONL, DocumentSource, Jsonl, TextFolder
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.paths import expanded

KINDS = ('natural', 'random', 'repeat')
_CHARACTERS = 64  # per token that is needed: only the head of a long document is tokenized
_TEXT = ('.txt', '.txt.gz', '.md')  # endings of files that are a document each
_NOT_DATA = ('license.txt', 'licence.txt', 'readme.txt', 'requirements.txt')


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
  """Sequences of tokens and how they were made.

  tokens: (S, T) int32. tokenizer: of the model; None where there are only token ids. description:
  ready for JSON: kind, sequences, length, bos {protocol, applied}, first_token_ids of the first
  sequence, vocab_size, tokenizer, source, seed, and domains [{domain, sequences}] in the order of
  tokens.
  """

  tokens: np.ndarray
  description: dict[str, Any]
  tokenizer: TextTokenizer | None = None


def natural(
  tokenizer: TextTokenizer,
  source: DocumentSource,
  *,
  sequences: int = 100,
  length: int = 64,
  bos: str = 'tokenizer',
  least: int | None = None,
) -> Inputs:
  """The first tokens of the first documents of that length.

  A ValueError if there are fewer than `sequences`, or than `least`, if it is given.
  """
  heads = list(itertools.islice(_heads(tokenizer, source, length, bos), sequences))
  if len(heads) < min(least or sequences, sequences):
    raise ValueError(
      f'{source!r} has only {len(heads)} documents of {length} tokens or more, and a file is '
      'one document: ask for fewer or shorter sequences, or for another source.'
    )
  domains, rows = zip(*heads)
  return _described(rows, tokenizer, 'natural', bos, domains, source=repr(source))


def by_domain(
  tokenizer: TextTokenizer,
  source: DocumentSource,
  *,
  sequences: int = 100,
  length: int = 64,
  bos: str = 'tokenizer',
  domains: Sequence[str] = (),
) -> Inputs:
  """Up to `sequences` sequences of every domain, one domain after the other (Figure 9).

  Reading stops once those of `domains` have their sequences, or at the end of the source.
  """
  rows: dict[str, list[np.ndarray]] = {}
  lacks = lambda name: len(rows.get(name, ())) < sequences
  for name, row in _heads(tokenizer, source, length, bos, lacks):
    rows.setdefault(name, []).append(row)
    if domains and not any(map(lacks, domains)):
      break
  if not rows:
    raise ValueError(f'{source!r} has no document of {length} tokens: ask for shorter sequences.')
  return _described(
    sum(rows.values(), []),
    tokenizer,
    'natural',
    bos,
    [name for name in rows for _ in rows[name]],
    source=repr(source),
  )


def long_text(
  tokenizer: TextTokenizer,
  source: DocumentSource,
  *,
  sequences: int = 1,
  length: int = 4096,
  bos: str = 'tokenizer',
) -> Inputs:
  """Texts longer than a document: documents one after the other, an empty line between them.

  A sequence continues the text at the end of the one before; a ValueError if there is too little.
  """
  # `with_prefix` puts no token before a text that begins with it, so that such a text gives one
  # more.
  first = () if tokenizer.bos_in_texts else tokenizer.before(bos)
  wanted, rest, rows = sequences * (length - len(first)), [], []
  for document in source.documents():
    head = document.text[: _CHARACTERS * (wanted - len(rest))]  # of a book, the part that is needed
    rest += tokenizer.encode(head.rstrip() + '\n\n')
    if len(rest) >= wanted:
      break
  if len(rest) < wanted:
    raise ValueError(
      f'{source!r} has {len(rest)} tokens, and {wanted} are wanted: ask for fewer or shorter '
      'sequences.'
    )
  for _ in range(sequences):
    row = tokenizer.with_prefix(rest, bos)
    rows.append(row[:length])
    rest = row[length:]
  return _described(rows, tokenizer, 'natural', bos, source=repr(source))


def random_tokens(
  vocab_size: int,
  *,
  sequences: int = 100,
  length: int = 64,
  seed: int = 0,
  bos: str = 'none',
  tokenizer: TextTokenizer | None = None,
  repeat: bool = False,
) -> Inputs:
  """Tokens drawn uniformly from the vocabulary, except the BOS of `tokenizer`.

  repeat: whether every sequence repeats one token.
  """
  if tokenizer is None and bos != 'none':
    raise ValueError(f'--bos={bos} needs a tokenizer, and there is none: use --bos=none.')
  left_out, first = (tokenizer.bos_id, tokenizer.before(bos)) if tokenizer else (None, ())
  tokens = np.random.default_rng(seed).integers(
    0, vocab_size - (left_out is not None), (sequences, 1 if repeat else length), np.int32
  )
  tokens = np.repeat(tokens, length // tokens.shape[1], 1)
  if left_out is not None:
    tokens += tokens >= left_out
  tokens[:, : len(first)] = first  # instead of drawn tokens: the length is the one asked for
  return _described(
    tokens, tokenizer, 'repeat' if repeat else 'random', bos, vocab_size=vocab_size, seed=seed
  )


def stored(tokens: np.ndarray, vocab_size: int, source: str) -> Inputs:
  """Inputs of the probe tokens (S, T) that a training run stores."""
  return _described(tokens, None, 'natural', 'as in training', source=source, vocab_size=vocab_size)


def open_source(text: str = '') -> DocumentSource:
  """The source that a command line names; by default Python's documentation.

  Args:
    text: a config string, a file, or a folder with data files of one kind: JSONL, .txt, .txt.gz
      or .md.

  Raises:
    ValueError: there is no such file, folder or source; or a folder holds no data files, two
      kinds of them, or a README.txt, LICENSE.txt or requirements.txt next to its texts. Names the
      sources to choose from.
  """
  if not text:
    return Stdlib(domains='docs')
  path = expanded(text)
  if path.is_dir():
    return _of_folder(path)
  if path.is_file():
    is_text = path.name.endswith(_TEXT)
    return TextFolder(str(path.parent), glob.escape(path.name)) if is_text else Jsonl(str(path))
  try:
    return from_string(DocumentSource, text)
  except ValueError as error:
    raise ValueError(
      f'--source={text} is not a file or folder, and not a source: {error}'
    ) from None


def _of_folder(folder: Path) -> DocumentSource:
  """The source that reads all data files of a folder, which must be of one kind."""
  names = sorted(file.name for file in folder.rglob('*') if file.is_file())
  kinds: dict[str, DocumentSource] = {}  # by the ending of the files that each source reads
  if any(name.endswith(JSONL) for name in names):
    kinds['.jsonl'] = Jsonl(str(folder))
  for ending in _TEXT:
    if any(name.endswith(ending) for name in names):
      kinds[ending] = TextFolder(str(folder), f'**/*{ending}')
  where = f'--source={folder} holds'
  choice = ' or '.join(f'--source="{source!r}"' for source in kinds.values())
  if not kinds:
    raise ValueError(
      f'{where} no files ending in {", ".join([*JSONL, *_TEXT])}: name others by '
      f'--source="TextFolder(path={str(folder)!r}, pattern=...)".'
    )
  if len(kinds) > 1:
    raise ValueError(f'{where} files of several kinds, {", ".join(kinds)}: choose {choice}.')
  texts = [name for name in names if name.endswith('.txt')]
  others = [name for name in texts if name.casefold() in _NOT_DATA]
  if others and len(others) < len(texts):
    raise ValueError(
      f'{where} {others[0]} next to other texts: move it out of the folder, or '
      f'read all of them by {choice}.'
    )
  return next(iter(kinds.values()))


def _heads(
  tokenizer: TextTokenizer,
  source: DocumentSource,
  length: int,
  bos: str,
  wanted: Callable[[str], bool] = lambda domain: True,
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (domain, sequence (T,)) of the documents of wanted domains that are long enough."""
  for document in source.documents():
    if wanted(document.domain):
      # A cut text may be tokenized otherwise at its end, far behind the tokens that are kept.
      ids = tokenizer.encode(head := document.text[: _CHARACTERS * length])
      if len(ids) < length and len(head) < len(document.text):
        ids = tokenizer.encode(document.text)
      if len(row := tokenizer.with_prefix(ids, bos)[:length]) == length:
        yield document.domain, row


def _described(
  rows: Sequence[np.ndarray] | np.ndarray,
  tokenizer: TextTokenizer | None,
  kind: str,
  bos: str,
  domains: Sequence[str] = (),
  **more: Any,
) -> Inputs:
  tokens, applied = np.array(rows), 'none'
  if np.issubdtype(tokens.dtype, np.integer):  # a synthetic task may have features (S, T, F)
    tokens = tokens.astype(np.int32)
  if tokenizer and (bos_id := tokenizer.bos_id) is not None:
    most = (tokens == bos_id).sum(1).max()
    if most > 1 and not tokenizer.bos_in_texts:
      raise ValueError(
        f'{tokenizer.name} begins texts with {most} BOS tokens: use --bos=force or none.'
      )
    if (tokens[:, 0] == bos_id).all():  # the actual beginning, not the one asked for
      applied = f'bos id {bos_id} at position 1'
  counts = collections.Counter(domains).items()
  description = (
    dict.fromkeys(('source', 'vocab_size', 'seed', 'tokenizer'))
    | more
    | {
      'kind': kind,
      'sequences': tokens.shape[0],
      'length': tokens.shape[1],
      'domains': [{'domain': name, 'sequences': count} for name, count in counts],
      'bos': {'protocol': bos, 'applied': applied},
      'first_token_ids': tokens[0, :4].tolist(),
    }
  )
  if tokenizer:  # the file and its folder: a record names no home directory
    description |= {
      'vocab_size': tokenizer.vocab_size,
      'tokenizer': '/'.join(Path(tokenizer.name).parts[-2:]),
    }
  return Inputs(tokens, description, tokenizer)
