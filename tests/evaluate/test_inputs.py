"""The inputs of the probe: text, drawn tokens, and the protocols for their BOS."""

import dataclasses
import gzip
import json
import re

import numpy as np
import pytest

from sink_jax.data.sources import Document, Jsonl, TextFolder
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.tokenizer import Bytes, TextTokenizer
from sink_jax.evaluate.inputs import by_domain, long_text, natural, open_source, random_tokens

BYTES = Bytes().open()  # its BOS, 0, is not put before a text
BEGUN = BYTES.beginning_with(0)


class Texts:
  """A source of the given texts. The first word of each text is its domain."""

  def __init__(self, *texts):
    self.texts, self.read = texts, 0

  def documents(self):
    for text in self.texts:
      self.read += 1
      yield Document(name='', domain=text.split()[0], text=text)


def corpus():
  """60 documents in 'prose' and 40 in 'verse', 50 to 400 letters each."""
  random = np.random.default_rng(0)
  return Texts(
    *(
      f'{domain} {i} '.ljust(random.integers(50, 400), 'x')
      for domain, count in (('prose', 60), ('verse', 40))
      for i in range(count)
    )
  )


def test_natural_inputs_are_the_heads_of_documents():
  found = natural(BEGUN, source := corpus(), sequences=7, length=300, bos='none')
  long = [text for text in source.texts if len(text) >= 300]
  np.testing.assert_array_equal(found.tokens, [BYTES.encode(text)[:300] for text in long[:7]])
  assert found.tokens.dtype == np.int32
  assert found.tokenizer is BEGUN
  assert json.loads(json.dumps(found.description)) == dict(
    kind='natural',
    sequences=7,
    length=300,
    domains=[{'domain': 'prose', 'sequences': 7}],
    seed=None,
    first_token_ids=found.tokens[0, :4].tolist(),
    bos={'protocol': 'none', 'applied': 'none'},
    source=repr(source),
    vocab_size=BEGUN.vocab_size,
    tokenizer='Bytes()',
  )
  # With a BOS, a document of 299 tokens is long enough.
  begun = natural(BEGUN, corpus(), sequences=7, length=300)
  assert (begun.tokens[:, 0] == 0).all()
  assert (begun.tokens[:, 1:] > 1).all()


@pytest.mark.parametrize(
  'tokenizer, protocol, begins',
  [
    (BEGUN, 'none', False),
    (BEGUN, 'tokenizer', True),
    (BEGUN, 'force', True),
    (BYTES, 'tokenizer', False),
    (BYTES, 'force', True),
  ],
)
def test_bos_protocols(tokenizer, protocol, begins):
  found = natural(tokenizer, corpus(), sequences=5, length=10, bos=protocol)
  assert ((found.tokens == 0).sum(1) == begins).all()
  assert (found.tokens[:, 0] == 0).all() == begins
  plain = BYTES.encode(corpus().texts[0])
  assert found.tokens[0].tolist() == [*([0] if begins else []), *plain][:10]
  for repeat in (False, True):
    drawn = random_tokens(
      4, sequences=300, length=6, bos=protocol, tokenizer=tokenizer, repeat=repeat
    )
    assert ((drawn.tokens[:, 0] == 0) == begins).all()
    assert set(np.unique(drawn.tokens[:, 1:])) == {1, 2, 3}
    assert drawn.description['bos']['applied'] == ('bos id 0 at position 1' if begins else 'none')


def test_an_ordinary_first_token_comes_before_texts_once():
  (dot,) = BYTES.encode('.')
  tokenizer = BYTES.beginning_with(dot)
  assert tokenizer.bos_in_texts
  assert tokenizer.prefix == (dot,)
  source, texts = Texts('one. two', '.two. one', 'three.'), ['.one. ', '.two. ', '.three']
  found = natural(tokenizer, source, sequences=3, length=6)
  assert [tokenizer.decode(row) for row in found.tokens] == texts
  assert found.description['bos']['applied'] == f'bos id {dot} at position 1'
  forced = natural(tokenizer, source, sequences=3, length=6, bos='force')
  assert (forced.tokens == found.tokens).all()
  bare = natural(tokenizer, source, sequences=3, length=6, bos='none')
  assert [tokenizer.decode(row) for row in bare.tokens] == ['one. t', '.two. ', 'three.']
  long = long_text(tokenizer, source, sequences=3, length=8)
  assert [tokenizer.decode(row) for row in long.tokens] == ['.one. tw', '.o\n\n.two', '. one\n\nt']
  assert (random_tokens(60, sequences=99, length=9, tokenizer=tokenizer).tokens != dot).all()


def test_only_the_head_of_a_long_document_is_tokenized(monkeypatch):
  for letters, expected in ((1, [640]), (100, [640, 10**6])):  # letters per token; 100 are too many
    seen = []
    monkeypatch.setattr(
      TextTokenizer,
      'encode',
      lambda self, text: seen.append(len(text)) or [3] * (len(text) // letters),
    )
    natural(BYTES, Texts('x' * 10**6), sequences=1, length=10)
    assert seen == expected


def test_every_domain_has_its_share():
  found = by_domain(BYTES, corpus(), sequences=50, length=30, bos='none')
  assert [tuple(d.values()) for d in found.description['domains']] == [('prose', 50), ('verse', 40)]
  assert [BYTES.decode(row[:5]) for row in found.tokens] == ['prose'] * 50 + ['verse'] * 40
  by_domain(BYTES, watched := corpus(), sequences=2, length=30, bos='none', domains=['prose'])
  assert watched.read == 2


def test_drawn_tokens():
  found = random_tokens(50, sequences=200, length=40, seed=3)
  assert found.tokens.shape == (200, 40)
  assert found.tokens.dtype == np.int32
  counts = np.bincount(found.tokens.ravel(), minlength=50)
  assert len(counts) == 50
  assert abs(counts - 160).max() < 6 * np.sqrt(160)
  draw = lambda seed: random_tokens(50, sequences=200, length=40, seed=seed).tokens
  assert (found.tokens == draw(3)).all()
  assert (found.tokens != draw(4)).any()
  repeated = random_tokens(50, sequences=200, length=40, repeat=True).tokens
  assert (repeated == repeated[:, :1]).all()
  assert len(set(repeated[:, 0])) > 40


def test_sources_of_a_command_line(tmp_path):
  lines, text = tmp_path / 'lines.jsonl', tmp_path / 'one.txt'
  lines.write_text('{"text": "a"}\n')
  text.write_text('b')
  for given, source in (
    ('', Stdlib(domains='docs')),
    (lines, Jsonl(str(lines))),
    ("Stdlib(domains='code')", Stdlib(domains='code')),
  ):
    assert open_source(str(given)) == source
  assert [d.text for d in open_source(str(text)).documents()] == ['b']


@pytest.mark.parametrize(
  'files, source',
  [
    (['a.txt', 'b/c.txt', 'LICENSE'], lambda path: TextFolder(path)),
    (['LICENSE.txt'], lambda path: TextFolder(path)),
    (['a.md', 'README.md', 'picture.png'], lambda path: TextFolder(path, '**/*.md')),
    (['a.txt.gz', 'b/c.txt.gz'], lambda path: TextFolder(path, '**/*.txt.gz')),
    (['a.jsonl', 'b.jsonl.gz', 'c/d.jsonl.zst'], lambda path: Jsonl(path)),
  ],
)
def test_a_folder_with_data_of_one_kind_is_read(tmp_path, files, source):
  written(tmp_path, files)
  assert open_source(str(tmp_path)) == source(str(tmp_path))


@pytest.mark.parametrize(
  'files, named',
  [
    ([], ['.jsonl', '.txt.gz', '.md', 'TextFolder(']),
    (['a.csv'], ['TextFolder(', 'pattern']),
    (['a.jsonl', 'LICENSE.txt'], ['Jsonl(', 'TextFolder(']),
    (['a.jsonl', 'README.md'], ['Jsonl(', "pattern='**/*.md'"]),
    (['a.txt', 'a.txt.gz'], ["pattern='**/*.txt.gz'"]),
    (['a.txt', 'b/c.md'], ["pattern='**/*.md'"]),
    (['a.txt', 'LICENSE.txt'], ['LICENSE.txt', 'TextFolder(']),
    (['b/a.txt', 'readme.txt'], ['readme.txt', 'TextFolder(']),
    (['a.txt', 'b/requirements.txt'], ['requirements.txt', 'TextFolder(']),
  ],
)
def test_a_folder_is_not_guessed_at(tmp_path, files, named):
  written(tmp_path, files)
  with pytest.raises(ValueError) as caught:
    open_source(str(tmp_path))
  message = str(caught.value)
  assert all(part in message for part in [*named, str(tmp_path)])
  assert '\n' not in message
  # Each source that the message names can be given in the folder's place.
  for choice in re.findall(r'--source="(.*?\))"', message):
    if '...' not in choice:
      assert list(open_source(choice)._files())


def written(folder, files):
  for name in files:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text('x')


def test_a_text_file_may_be_compressed(tmp_path):
  (tmp_path / 'a[1].txt.gz').write_bytes(gzip.compress(b'b'))
  (tmp_path / 'other.txt.gz').write_bytes(gzip.compress(b'c'))
  source = open_source(str(tmp_path / 'a[1].txt.gz'))
  assert [d.text for d in source.documents()] == ['b']


@pytest.mark.parametrize(
  'call, words',
  [
    (lambda: natural(BYTES, corpus(), sequences=101, length=20), 'only 100 documents.*--sequences'),
    (lambda: natural(BYTES, corpus(), bos='twice'), 'twice'),
    (lambda: natural(dataclasses.replace(BYTES, prefix=(0, 0)), corpus(), length=20), '2 BOS'),
    (lambda: by_domain(BYTES, corpus(), length=9999), '9999'),
    (lambda: long_text(BYTES, corpus(), length=10**6), '--length'),
    (lambda: random_tokens(50, bos='force'), '--bos=force'),
    (lambda: open_source('no/such'), 'no/such'),
    (lambda: open_source('Nothing'), 'Nothing'),
    (lambda: open_source('Jsonl('), 'Jsonl'),
  ],
)
def test_inputs_that_cannot_be_made(call, words):
  with pytest.raises(ValueError, match=words):
    call()
