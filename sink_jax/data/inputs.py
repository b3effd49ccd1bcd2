"""What a published model is probed with: text, random tokens, one repeated token (Section 3.3).

A sink sits on the first token, so what that is decides the result. Every function here takes `bos`,
the protocol for it, refuses sequences with two BOS tokens, and records what was done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sink_jax.component import from_string
from sink_jax.data.sources import DocumentSource, Jsonl, TextFolder
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.text_tokenizer import BOS, TextTokenizer
from sink_jax.io.paths import expanded

KINDS = ('natural', 'random', 'repeat')
_SHOWN = 4  # first tokens that a description lists
_CHARACTERS = 64  # per token that is needed: only the head of a long document is tokenized


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Sequences of tokens and how they were made.

  Attributes:
    tokens: (S, T) int32.
    description: a record, ready for JSON: kind ('natural', 'random', 'repeat'), sequences, length,
      bos {protocol, applied}, first_token_ids and first_tokens of the first sequence, vocab_size
      and tokenizer (None without one), source, seed, domains [{domain, sequences, ...}] where
      there are several or one was chosen, skipped_short and skipped_bos: documents left out.
    tokenizer: the tokenizer of the model; None where there are token ids alone.
  """

  tokens: np.ndarray
  description: dict[str, Any]
  tokenizer: TextTokenizer | None = None


def natural(tokenizer: TextTokenizer, source: DocumentSource, *, sequences: int = 100,
            length: int = 64, bos: str = 'tokenizer', domain: str | None = None) -> Inputs:
  """The first `length` tokens of the first `sequences` documents that are long enough.

  Args:
    bos: 'none': no BOS. 'tokenizer': what the tokenizer itself puts before a text. 'force': one BOS
      at position 1, whatever the tokenizer does. No sequence has more than one.
    domain: the domain of which documents are taken; None takes all of them.

  Raises:
    ValueError: too few documents; a tokenizer that adds two BOS tokens, or adds one though
      there should be none.
  """
  rows, counts = [], {}
  for name, row, outcome in _sequences(tokenizer, source, length, bos,
                                       lambda name: domain in (None, name)):
    _count(counts, name, outcome)
    if row is not None:
      rows.append(row)
    if len(rows) == sequences:
      break
  if len(rows) < sequences:
    where = f' of the domain {domain!r}' if domain else ''
    raise ValueError(f'{source!r} has only {len(rows)} documents{where} of {length} tokens or '
                     'more: use a smaller --sequences or --length, or another --source.')
  return _described(np.stack(rows), tokenizer, 'natural', bos, source=repr(source),
                    domains=_listed(counts) if domain or len(counts) > 1 else None,
                    **_skipped(counts))


def by_domain(tokenizer: TextTokenizer, source: DocumentSource, *, sequences: int = 100,
              length: int = 64, bos: str = 'tokenizer', domains: Sequence[str] = ()) -> Inputs:
  """Up to `sequences` sequences of every domain, one domain after the other (Figure 9).

  Args:
    domains: reading stops once these have their sequences; without them, at the end of the source.

  Returns:
    Inputs whose description['domains'] lists the number of sequences of each domain, in the order
    of `tokens`; a domain without any is listed with 0.

  Raises:
    ValueError: no domain has a document of `length` tokens; see also `natural`.
  """
  rows, counts = {}, {}
  lacks = lambda name: len(rows.get(name, ())) < sequences
  for name, row, outcome in _sequences(tokenizer, source, length, bos, lacks):
    _count(counts, name, outcome)
    if row is not None:
      rows.setdefault(name, []).append(row)
    if domains and not any(map(lacks, domains)):
      break
  if not rows:
    raise ValueError(f'{source!r} has no document of {length} tokens or more: use a smaller '
                     '--length, or another --source.')
  tokens = np.stack([row for name in counts for row in rows.get(name, ())])
  return _described(tokens, tokenizer, 'natural', bos, source=repr(source),
                    domains=_listed(counts), **_skipped(counts))


def long_text(tokenizer: TextTokenizer, source: DocumentSource, *, sequences: int = 1,
              length: int = 4096, bos: str = 'tokenizer') -> Inputs:
  """Texts longer than a document: documents one after the other, an empty line between them.

  A sequence begins as those of `natural` do, and continues the text at the end of the one before.

  Raises:
    ValueError: too little text; see also `natural`.
  """
  prefix = _prefix(tokenizer, bos)
  # A text that continues with the ordinary token of the prefix gives one token more; see `before`.
  wanted = sequences * (length - (0 if prefix.bos is None else len(prefix.ids)))
  parts, count, skipped = [], 0, 0
  for document in source.documents():
    head = document.text[:_CHARACTERS * (wanted - count)]  # of a book, the part that is needed
    ids = tokenizer.encode(head.rstrip() + '\n\n')[prefix.dropped:]
    if prefix.bos is not None and (ids == prefix.bos).any():  # '<s>' of the text, read as a BOS
      skipped += 1
      continue
    parts.append(ids)
    count += len(ids)
    if count >= wanted:
      break
  if count < wanted:
    raise ValueError(f'{source!r} has only {count} tokens of the {wanted} that are '
                     'wanted: use a smaller --sequences or --length, or another --source.')
  rest, rows = np.concatenate(parts), []
  for _ in range(sequences):
    with_prefix = prefix.before(rest)
    rows.append(with_prefix[:length])
    rest = rest[length - (len(with_prefix) - len(rest)):]
  return _described(np.stack(rows), tokenizer, 'natural', bos, source=repr(source),
                    skipped_bos=skipped)


def random_tokens(vocab_size: int, *, sequences: int = 100, length: int = 64, seed: int = 0,
                  bos: str = 'none', tokenizer: TextTokenizer | None = None) -> Inputs:
  """Tokens drawn uniformly from the vocabulary, but for the BOS that `tokenizer` names.

  Args:
    tokenizer: is needed for a `bos` other than 'none', and for texts in the description.

  Raises:
    ValueError: there is no BOS where one is asked for.
  """
  draw = _uniform(vocab_size, tokenizer, seed)
  return _drawn(draw((sequences, length)), vocab_size, tokenizer, 'random', bos, seed)


def repeated_token(vocab_size: int, *, sequences: int = 100, length: int = 64, seed: int = 0,
                   bos: str = 'none', tokenizer: TextTokenizer | None = None) -> Inputs:
  """Sequences of one token that is repeated, drawn as in `random_tokens`.

  Raises:
    ValueError: there is no BOS where one is asked for.
  """
  drawn = _uniform(vocab_size, tokenizer, seed)((sequences, 1))
  return _drawn(np.repeat(drawn, length, 1), vocab_size, tokenizer, 'repeat', bos, seed)


def stored(tokens: np.ndarray, vocab_size: int, source: str) -> Inputs:
  """Inputs of the probe tokens (S, T) of a training run whose task has no text.

  Their protocol for the BOS is called 'as in training'.
  """
  return _described(np.asarray(tokens), None, 'natural', 'as in training', source=source,
                    vocab_size=vocab_size)


def open_source(text: str = '') -> DocumentSource:
  """The source that a command line names: a config string, or the path of a folder or a file.

  The default is the documentation in Python's standard library, which is on every machine.

  Raises:
    ValueError: the text is neither a path nor a source; lists the choices.
  """
  if not text:
    return Stdlib(domains='docs')
  path = expanded(text)
  if path.is_dir():
    return TextFolder(str(path)) if next(path.rglob('*.txt'), None) else Jsonl(str(path))
  if path.is_file():
    if path.suffix == '.txt':
      return TextFolder(str(path.parent), path.name)
    return Jsonl(str(path))
  if '(' not in text and ('/' in text or '.' in text):
    raise ValueError(f'--source={text}: no such file or folder.')
  try:
    source = from_string(DocumentSource, text)
  except ValueError as error:
    raise ValueError(f'--source={text}: {error}') from None
  assert isinstance(source, DocumentSource)
  return source


def _sequences(tokenizer: TextTokenizer, source: DocumentSource, length: int, bos: str,
               wanted: Callable[[str], bool]) -> Iterator[tuple[str, np.ndarray | None, str]]:
  """Yields (domain, sequence (T,) or None, outcome) for the documents of wanted domains.

  The outcome is the key of the description that counts it.
  """
  if length < 2:
    raise ValueError(f'--length={length} must be at least 2.')
  prefix = _prefix(tokenizer, bos)
  for document in source.documents():
    if not wanted(document.domain):
      continue
    row = prefix.before(_head(tokenizer, document.text, length)[prefix.dropped:])[:length]
    if len(row) < length:
      yield document.domain, None, 'skipped_short'
    elif prefix.bos is not None and (row == prefix.bos).sum() > prefix.allowed:  # '<s>' of the text
      yield document.domain, None, 'skipped_bos'
    else:
      yield document.domain, row, 'sequences'


def _count(counts: dict[str, dict[str, int]], name: str, outcome: str) -> None:
  counts.setdefault(name, {'sequences': 0, 'skipped_short': 0, 'skipped_bos': 0})[outcome] += 1


def _head(tokenizer: TextTokenizer, text: str, length: int) -> np.ndarray:
  """The first tokens of a text, at least `length` if it has so many.

  A cut text may be tokenized otherwise at its end, which is far behind the tokens that are kept.
  """
  head = text[:_CHARACTERS * length]
  ids = tokenizer.encode(head)
  return ids if len(ids) >= length or len(head) == len(text) else tokenizer.encode(text)


class _Prefix(NamedTuple):
  """What a sequence begins with.

  Attributes:
    ids: ids that are put before a text.
    dropped: first ids of an encoded text that are removed: a BOS of the normalizer.
    allowed: BOS tokens that a sequence may hold.
    bos: the BOS; None where the first token is an ordinary one, which the text may hold as well.
  """

  ids: tuple[int, ...] = ()
  dropped: int = 0
  allowed: int = 0
  bos: int | None = -1

  def before(self, ids: np.ndarray) -> np.ndarray:
    """The prefix and then the ids of a text, int32; an ordinary token is not put before itself."""
    if self.bos is None and tuple(ids[:len(self.ids)]) == self.ids:
      return ids
    return np.concatenate([self.ids, ids]).astype(np.int32)


def _prefix(tokenizer: TextTokenizer | None, bos: str) -> _Prefix:
  """What a protocol puts before a text.

  Raises:
    ValueError: a sequence would have two BOS tokens, or one where there should be none.
  """
  if bos not in BOS:
    raise ValueError(f'--bos={bos}: choose {", ".join(BOS)}.')
  if tokenizer is None:
    if bos != 'none':
      raise ValueError(f'--bos={bos} needs a tokenizer, and there is none: use --bos=none.')
    return _Prefix()
  if tokenizer.bos_in_texts:
    assert tokenizer.bos_id is not None
    first = {'none': (), 'tokenizer': tokenizer.prefix, 'force': (tokenizer.bos_id,)}
    return _Prefix(first[bos], bos=None)
  bos_id = -1 if tokenizer.bos_id is None else tokenizer.bos_id  # -1: no token is it
  # A normalizer can write a BOS into every text, even where no special tokens are asked for.
  of_normalizer = tokenizer.encode('a')[:1].tolist().count(bos_id)
  if bos == 'force':
    if tokenizer.bos_id is None:
      raise ValueError(f'{tokenizer.name} names no BOS token, so --bos=force has nothing to add: '
                       'set bos_token in tokenizer_config.json, or use --bos=tokenizer.')
    return _Prefix((bos_id,), of_normalizer, 1, bos_id)
  ids = tokenizer.prefix if bos == 'tokenizer' else ()
  number = ids.count(bos_id) + of_normalizer
  if bos == 'none' and number:
    raise ValueError(f'{tokenizer.name} begins every text with a BOS even where no special tokens '
                     'are asked for (its normalizer does): use --bos=tokenizer, or correct it.')
  if number > 1:
    raise ValueError(f'{tokenizer.name} begins every text with {number} BOS tokens: correct its '
                     'post_processor, or use --bos=force for one or --bos=none for none.')
  return _Prefix(ids, 0, number, bos_id)


def _uniform(vocab_size: int, tokenizer: TextTokenizer | None, seed: int
             ) -> Callable[[tuple[int, int]], np.ndarray]:
  """A function that draws ids of a shape, int32: all ids but the BOS are equally likely."""
  bos_id = tokenizer.bos_id if tokenizer else None
  random = np.random.default_rng(seed)

  def draw(shape: tuple[int, int]) -> np.ndarray:
    if bos_id is None:
      return random.integers(0, vocab_size, shape, np.int32)
    ids = random.integers(0, vocab_size - 1, shape, np.int32)
    return ids + (ids >= bos_id)  # leaves out the BOS, and draws no number in vain

  return draw


def _drawn(tokens: np.ndarray, vocab_size: int, tokenizer: TextTokenizer | None, kind: str,
           bos: str, seed: int) -> Inputs:
  first = _prefix(tokenizer, bos).ids
  # In place of drawn tokens, so that the length stays the one that was asked for.
  tokens[:, :len(first)] = first
  return _described(tokens, tokenizer, kind, bos, vocab_size=vocab_size, seed=seed)


def _listed(counts: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
  return [{'domain': name, **count} for name, count in counts.items()]


def _skipped(counts: dict[str, dict[str, int]]) -> dict[str, int]:
  return {key: sum(c[key] for c in counts.values()) for key in ('skipped_short', 'skipped_bos')}


def _described(tokens: np.ndarray, tokenizer: TextTokenizer | None, kind: str, bos: str, *,
               source: str | None = None, vocab_size: int | None = None, **more: Any) -> Inputs:
  tokens = tokens.astype(np.int32)
  bos_id, applied = tokenizer.bos_id if tokenizer else None, 'none'
  if tokenizer and bos_id is not None:
    number = (tokens == bos_id).sum(1)
    assert tokenizer.bos_in_texts or (number <= 1).all(), 'a sequence has two BOS tokens'
    # What the sequences are, whatever was asked for.
    if number.all() and (tokens[:, 0] == bos_id).all():
      applied = f'bos id {bos_id} at position 1'
  first = tokens[0, :_SHOWN].tolist()
  return Inputs(tokens, {
      'kind': kind, 'sequences': tokens.shape[0], 'length': tokens.shape[1],
      'bos': {'protocol': bos, 'applied': applied}, 'first_token_ids': first,
      'first_tokens': [tokenizer.decode([i]) for i in first] if tokenizer else None,
      'vocab_size': tokenizer.vocab_size if tokenizer else vocab_size,
      'tokenizer': _short(tokenizer.name) if tokenizer else None, 'source': source,
      **{'seed': None, 'domains': None, 'skipped_short': 0, 'skipped_bos': 0, **more}}, tokenizer)


def _short(name: str) -> str:
  """The file and its folder, without the folders above: a record names no home directory."""
  return '/'.join(name.split('/')[-2:])
