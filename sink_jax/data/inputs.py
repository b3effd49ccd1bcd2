"""What a published model is probed with: text, random tokens, one repeated token (Section 3.3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sink_jax.component import from_string
from sink_jax.data.documents import DocumentSource, Jsonl, TextFolder
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.text_tokenizer import BOS, TextTokenizer
from sink_jax.io.paths import expanded

KINDS = ('natural', 'random', 'repeat')
_SHOWN = 4  # first tokens in a description
_CHARACTERS = 64  # per token that is wanted: only the head of a long document is tokenized


@dataclasses.dataclass(frozen=True)
class Inputs:
  """S sequences of T tokens (S, T), int32, and how they were made, ready for JSON.

  description: kind ('natural', 'random', 'repeat'), sequences, length, bos {protocol,
  applied}, first_token_ids and first_tokens of the first sequence, vocab_size and tokenizer
  (None without one), source, seed, domains [{domain, sequences, ...}] where there is more
  than one or one was chosen, skipped_short and skipped_bos: documents that were left out.
  tokenizer: that they were made with; None where token ids are all there is.
  """

  tokens: np.ndarray
  description: dict[str, Any]
  tokenizer: TextTokenizer | None = None


def natural(tokenizer: TextTokenizer, source: DocumentSource, *, sequences: int = 100,
            length: int = 64, bos: str = 'tokenizer', domain: str | None = None) -> Inputs:
  """The first `length` tokens of the first `sequences` documents that are long enough.

  Args:
    bos: 'none': no BOS. 'tokenizer': what the tokenizer itself puts before a text. 'force':
      one BOS at position 1, whatever the tokenizer does. No sequence has more than one.
    domain: of which documents are taken; all by default.

  Raises:
    ValueError: too few documents; a tokenizer that adds two BOS tokens, or adds one though
      there should be none.
  """
  rows, counts = [], {}
  for name, row, outcome in _rows(tokenizer, source, length, bos,
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
    domains: after which the reading may stop; the source is read to its end without them.

  Returns:
    Inputs whose description['domains'] says how many sequences each domain has, in the order
    of tokens; domains that have none are left out of tokens, and are listed with 0.

  Raises:
    ValueError: no domain has a document of `length` tokens; see also `natural`.
  """
  rows, counts = {}, {}
  lacks = lambda name: len(rows.get(name, ())) < sequences
  for name, row, outcome in _rows(tokenizer, source, length, bos, lacks):
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

  A text begins as `natural` ones do, and goes on where the one before it ended.

  Raises:
    ValueError: too little text; see also `natural`.
  """
  front = _front(tokenizer, bos)
  # Of a text that happens to go on with an ordinary first token, one token more is taken.
  wanted = sequences * (length - (0 if front.bos is None else len(front.ids)))
  parts, count, skipped = [], 0, 0
  for document in source.documents():
    head = document.text[:_CHARACTERS * (wanted - count)]  # of a book, what is needed
    ids = tokenizer.encode(head.rstrip() + '\n\n')[front.dropped:]
    if front.bos is not None and (ids == front.bos).any():  # '<s>' of the text, read as a BOS
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
    begun = front.before(rest)
    rows.append(begun[:length])
    rest = rest[length - (len(begun) - len(rest)):]
  return _described(np.stack(rows), tokenizer, 'natural', bos, source=repr(source),
                    skipped_bos=skipped)


def random_tokens(vocab_size: int, *, sequences: int = 100, length: int = 64, seed: int = 0,
                  bos: str = 'none', tokenizer: TextTokenizer | None = None) -> Inputs:
  """Tokens drawn uniformly from the vocabulary; without the BOS where `tokenizer` names it.

  Args:
    tokenizer: needed for a `bos` other than 'none'; makes the description readable.

  Raises:
    ValueError: no BOS where one is asked for.
  """
  draw = _uniform(vocab_size, tokenizer, seed)
  return _drawn(draw((sequences, length)), vocab_size, tokenizer, 'random', bos, seed)


def repeated_token(vocab_size: int, *, sequences: int = 100, length: int = 64, seed: int = 0,
                   bos: str = 'none', tokenizer: TextTokenizer | None = None) -> Inputs:
  """One token per sequence, drawn as in `random_tokens`, again and again.

  Raises:
    ValueError: no BOS where one is asked for.
  """
  drawn = _uniform(vocab_size, tokenizer, seed)((sequences, 1))
  return _drawn(np.repeat(drawn, length, 1), vocab_size, tokenizer, 'repeat', bos, seed)


def stored(tokens: np.ndarray, vocab_size: int, source: str) -> Inputs:
  """The probe tokens (S, T) of a training run whose task has no text; bos 'as in training'."""
  return _described(np.asarray(tokens), None, 'natural', 'as in training', source=source,
                    vocab_size=vocab_size)


def open_source(text: str = '') -> DocumentSource:
  """The source of a command line: a config string, or the path of a folder or a file.

  The default is Python's own documentation, which is always there.

  Raises:
    ValueError: neither a path nor a source; lists the choices.
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
  return from_string(DocumentSource, text)


def _rows(tokenizer, source, length, bos, wanted):
  """(domain, row (T,) or None, outcome) of the documents of wanted domains, in their order."""
  if length < 2:
    raise ValueError(f'--length={length} must be at least 2.')
  front = _front(tokenizer, bos)
  for document in source.documents():
    if not wanted(document.domain):
      continue
    row = front.before(_head(tokenizer, document.text, length)[front.dropped:])[:length]
    if len(row) < length:
      yield document.domain, None, 'skipped_short'
    elif front.bos is not None and (row == front.bos).sum() > front.allowed:  # '<s>' of the text
      yield document.domain, None, 'skipped_bos'
    else:
      yield document.domain, row, 'sequences'


def _count(counts, name, outcome):
  counts.setdefault(name, {'sequences': 0, 'skipped_short': 0, 'skipped_bos': 0})[outcome] += 1


def _head(tokenizer, text, length):
  """The first tokens of a text; the end of what is read is far from what is kept."""
  head = text[:_CHARACTERS * length]
  ids = tokenizer.encode(head)
  return ids if len(ids) >= length or len(head) == len(text) else tokenizer.encode(text)


class _Front(NamedTuple):
  """What comes first. dropped: first ids of a text that give way. allowed: BOS tokens in a row.

  bos: None where the token that comes first is an ordinary one, which may come again.
  """

  ids: tuple[int, ...] = ()
  dropped: int = 0
  allowed: int = 0
  bos: int | None = -1

  def before(self, ids) -> np.ndarray:
    """A text's ids behind it, int32; an ordinary token is not put before itself."""
    if self.bos is None and tuple(ids[:len(self.ids)]) == self.ids:
      return ids
    return np.concatenate([self.ids, ids]).astype(np.int32)


def _front(tokenizer, bos):
  """Raises a ValueError where a sequence would have two BOS tokens, or one too many."""
  if bos not in BOS:
    raise ValueError(f'--bos={bos}: choose {", ".join(BOS)}.')
  if tokenizer is None:
    if bos != 'none':
      raise ValueError(f'--bos={bos} needs a tokenizer, and there is none: use --bos=none.')
    return _Front()
  if tokenizer.bos_in_texts:
    first = {'none': (), 'tokenizer': tokenizer.prefix, 'force': (tokenizer.bos_id,)}
    return _Front(first[bos], bos=None)
  one = -1 if tokenizer.bos_id is None else tokenizer.bos_id
  # A normalizer, too, can write a BOS into every text.
  own = tokenizer.encode('a')[:1].tolist().count(one)
  if bos == 'force':
    if tokenizer.bos_id is None:
      raise ValueError(f'{tokenizer.name} names no BOS token, so --bos=force has nothing to add: '
                       'set bos_token in tokenizer_config.json, or use --bos=tokenizer.')
    return _Front((one,), own, 1, one)
  ids = tokenizer.prefix if bos == 'tokenizer' else ()
  number = ids.count(one) + own
  if bos == 'none' and number:
    raise ValueError(f'{tokenizer.name} begins every text with a BOS even where no special tokens '
                     'are asked for (its normalizer does): use --bos=tokenizer, or correct it.')
  if number > 1:
    raise ValueError(f'{tokenizer.name} begins every text with {number} BOS tokens: correct its '
                     'post_processor, or use --bos=force for one or --bos=none for none.')
  return _Front(ids, 0, number, one)


def _uniform(vocab_size, tokenizer, seed):
  one = tokenizer.bos_id if tokenizer else None
  random = np.random.default_rng(seed)

  def draw(shape):
    if one is None:
      return random.integers(0, vocab_size, shape, np.int32)
    ids = random.integers(0, vocab_size - 1, shape, np.int32)
    return ids + (ids >= one)

  return draw


def _drawn(tokens, vocab_size, tokenizer, kind, bos, seed):
  front = _front(tokenizer, bos).ids
  tokens[:, :len(front)] = front
  return _described(tokens, tokenizer, kind, bos, vocab_size=vocab_size, seed=seed)


def _listed(counts):
  return [{'domain': name, **count} for name, count in counts.items()]


def _skipped(counts):
  return {key: sum(c[key] for c in counts.values()) for key in ('skipped_short', 'skipped_bos')}


def _described(tokens, tokenizer, kind, bos, *, source=None, vocab_size=None, **more):
  tokens = tokens.astype(np.int32)
  one, applied = tokenizer.bos_id if tokenizer else None, 'none'
  if one is not None:
    number = (tokens == one).sum(1)
    assert tokenizer.bos_in_texts or (number <= 1).all(), 'a sequence has two BOS tokens'
    if number.all() and (tokens[:, 0] == one).all():
      applied = f'bos id {one} at position 1'
  first = tokens[0, :_SHOWN].tolist()
  return Inputs(tokens, {
      'kind': kind, 'sequences': tokens.shape[0], 'length': tokens.shape[1],
      'bos': {'protocol': bos, 'applied': applied}, 'first_token_ids': first,
      'first_tokens': [tokenizer.decode([i]) for i in first] if tokenizer else None,
      'vocab_size': tokenizer.vocab_size if tokenizer else vocab_size,
      'tokenizer': _short(tokenizer.name) if tokenizer else None, 'source': source,
      **{'seed': None, 'domains': None, 'skipped_short': 0, 'skipped_bos': 0, **more}}, tokenizer)


def _short(name):
  """The file and the folder of it, without what is above."""
  return '/'.join(name.split('/')[-2:])
