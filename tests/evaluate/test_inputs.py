"""The inputs of the probe: text, drawn tokens, and the protocols for their BOS."""

import dataclasses
import gzip
import json
import re

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

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
  source = corpus()
  found = natural(BEGUN, source, sequences=7, length=300, bos='none')
  long = [BYTES.encode(text)[:300] for text in source.texts if len(text) >= 300]

  assert_array_equal(found.tokens, long[:7])
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
  bos = [0] * begins
  for row, text in zip(found.tokens, corpus().texts):
    assert row.tolist() == [*bos, *BYTES.encode(text)][:10]
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
  source = Texts('one. two', '.two. one', 'three.')

  def read(inputs, **options):
    found = inputs(tokenizer, source, sequences=3, **options)
    return [tokenizer.decode(row) for row in found.tokens]

  texts = ['.one. ', '.two. ', '.three']

  assert read(natural, length=6) == read(natural, length=6, bos='force') == texts
  assert read(natural, length=6, bos='none') == ['one. t', '.two. ', 'three.']
  assert read(long_text, length=8) == ['.one. tw', '.o\n\n.two', '. one\n\nt']
  found = natural(tokenizer, source, sequences=3, length=6)
  assert found.description['bos']['applied'] == f'bos id {dot} at position 1'
  drawn = random_tokens(60, sequences=99, length=9, tokenizer=tokenizer)
  assert (drawn.tokens != dot).all()


def test_fewer_documents_suffice_where_they_may():
  source = Texts(*['prose ' + 'x' * 30] * 3, 'prose')
  found = natural(BYTES, source, sequences=5, length=20, least=3)
  assert found.tokens.shape == (3, 20) and found.description['sequences'] == 3
  with pytest.raises(ValueError, match='only 3 documents of 20 tokens'):
    natural(BYTES, source, sequences=5, length=20, least=4)


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
  shares = [tuple(domain.values()) for domain in found.description['domains']]
  assert shares == [('prose', 50), ('verse', 40)]
  words = [BYTES.decode(row[:5]) for row in found.tokens]
  assert words == ['prose'] * 50 + ['verse'] * 40
  watched = corpus()
  by_domain(BYTES, watched, sequences=2, length=30, bos='none', domains=['prose'])
  assert watched.read == 2


def test_drawn_tokens():
  draw = lambda seed=3, **options: (
    random_tokens(50, sequences=200, length=40, seed=seed, **options).tokens
  )
  tokens = draw()

  assert (tokens.shape, tokens.dtype) == ((200, 40), np.int32)
  counts = np.bincount(tokens.ravel(), minlength=50)
  assert_allclose(counts, np.full(50, 160), atol=6 * np.sqrt(160))
  assert_array_equal(draw(), tokens)
  assert (draw(seed=4) != tokens).any()
  assert (draw(tokenizer=Bytes().open().beginning_with(0)) != 0).all()  # 0 is BOS
  repeated = draw(repeat=True)
  assert (repeated == repeated[:, :1]).all()
  assert len(np.unique(repeated)) > 40


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
  assert '\n' not in message
  for part in [*named, str(tmp_path)]:
    assert part in message

  # Each source that the message names can be given in the folder's place.
  choices = re.findall(r'--source="(.*?\))"', message)
  for choice in choices:
    assert '...' in choice or list(open_source(choice)._files())


def written(folder, files):
  for name in files:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text('x')


def test_a_text_file_may_be_compressed(tmp_path):
  (tmp_path / 'a[1].txt.gz').write_bytes(gzip.compress(b'b'))
  (tmp_path / 'other.txt.gz').write_bytes(gzip.compress(b'c'))
  source = open_source(str(tmp_path / 'a[1].txt.gz'))
  assert [d.text for d in source.documents()] == ['b']


TWICE = dataclasses.replace(BYTES, prefix=(0, 0))
REFUSALS = {  # by function: words of the error, the arguments before a source, options
  natural: [
    ('only 100 documents.*another source', BYTES, dict(sequences=101, length=20)),
    ('twice', BYTES, dict(bos='twice')),
    ('2 BOS', TWICE, dict(length=20)),
  ],
  by_domain: [('9999', BYTES, dict(length=9999))],
  long_text: [('fewer or shorter', BYTES, dict(length=10**6))],
}


@pytest.mark.parametrize(
  'function, words, tokenizer, options',
  [(function, *row) for function, rows in REFUSALS.items() for row in rows],
)
def test_inputs_that_cannot_be_made(function, words, tokenizer, options):
  with pytest.raises(ValueError, match=words):
    function(tokenizer, corpus(), **options)


@pytest.mark.parametrize('text', ['no/such', 'Nothing', 'Jsonl('])
def test_a_source_that_is_not_known_is_named(text):
  with pytest.raises(ValueError, match=re.escape(text)):
    open_source(text)


def test_drawn_tokens_need_a_tokenizer_for_a_bos():
  with pytest.raises(ValueError, match='--bos=force'):
    random_tokens(50, bos='force')
