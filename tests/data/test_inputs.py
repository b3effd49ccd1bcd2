"""What models are probed with: BOS protocols, tokenizer folders, drawn tokens."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from sink_jax.data.sources import Jsonl, TextFolder
from sink_jax.data.inputs import (
  by_domain,
  long_text,
  natural,
  open_source,
  random_tokens,
  repeated_token,
  stored,
)
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.text_tokenizer import TextTokenizer
from sink_jax.data.tokenizer import ByteEncoder

TEXT = 'the quick brown fox jumps over the lazy dog, again and again'


def byte_level(special=('<s>', '</s>'), template=None, size=300):
  """A byte-level BPE; template: what the post-processor makes of a text, such as '<s> $A'."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(
      vocab_size=size, special_tokens=list(special), show_progress=False,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
  if template:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(s, tokenizer.token_to_id(s)) for s in special])
  return tokenizer


def folder(tmp_path, tokenizer, config=None, **files):
  path = tmp_path / 'model'
  path.mkdir()
  tokenizer.save(str(path / 'tokenizer.json'))
  for name, content in {'tokenizer_config': config, **files}.items():
    if content is not None:
      (path / f'{name}.json').write_text(json.dumps(content))
  return path


def read(tmp_path, *arguments, **files):
  return TextTokenizer.from_folder(folder(tmp_path, *arguments, **files))


BOS = {'bos_token': {'content': '<s>', 'special': True}}


@pytest.mark.parametrize('template, config, prefix', [
    (None, BOS, ()),                                         # GPT-NeoX
    ('<s> $A', BOS, (0,)), ('<s> $A', {}, (0,)),             # LLaMA 3; no config at all
    ('<s> $A </s>', BOS, (0,)),                              # an EOS at the end is dropped
    ('$A </s>', BOS, ()),
    (None, BOS | {'add_bos_token': True}, (0,)),             # add_bos_token goes first
    ('<s> $A', BOS | {'add_bos_token': False}, ()),
    ('<s> <s> $A', BOS | {'add_bos_token': True}, (0,)),
    (None, {'bos_token': '</s>', 'add_bos_token': True}, (1,))], ids=str)  # OPT
def test_what_a_tokenizer_puts_before_a_text(tmp_path, template, config, prefix):
  own = byte_level(template=template)
  read_back = read(tmp_path, own, config)
  body = own.encode(TEXT, add_special_tokens=False).ids
  assert read_back.prefix == prefix
  assert read_back.encode(TEXT).tolist() == body and read_back.decode(body) == TEXT
  assert read_back.encode(TEXT, special=True).tolist() == [*prefix, *body]
  assert read_back.encode(TEXT).dtype == np.int32
  assert read_back.vocab_size == own.get_vocab_size()
  if 'add_bos_token' not in config and '</s>' not in (template or ''):
    assert read_back.encode(TEXT, special=True).tolist() == own.encode(TEXT).ids


def test_where_the_bos_is_named(tmp_path):
  own = byte_level(template='<s> $A')
  path = folder(tmp_path, own, None)
  assert TextTokenizer.from_folder(path).bos_id == 0  # what comes first
  (path / 'special_tokens_map.json').write_text('{"bos_token": "</s>"}')
  assert TextTokenizer.from_folder(path).bos_id == 1
  (path / 'tokenizer_config.json').write_text('{"bos_token": "<s>"}')
  assert TextTokenizer.from_folder(path).bos_id == 0
  byte_level().save(str(path / 'tokenizer.json'))
  (path / 'special_tokens_map.json').unlink()
  (path / 'tokenizer_config.json').write_text('{}')
  assert TextTokenizer.from_folder(path).bos_id is None
  (path / 'config.json').write_text('{"bos_token_id": 1}')  # as GPT-2's own folder has it
  assert TextTokenizer.from_folder(path).bos_id == 1
  (path / 'tokenizer_config.json').write_text('{"bos_token": null}')  # there is none, it says
  assert TextTokenizer.from_folder(path).bos_id is None


def test_what_ends_a_text_is_named_by_the_tokenizer_and_by_the_model(tmp_path):
  path = folder(tmp_path, byte_level(), None)
  ends = lambda: TextTokenizer.from_folder(path).eos_ids
  assert ends() == ()
  (path / 'config.json').write_text('{"eos_token_id": 3}')
  assert ends() == (3,)
  (path / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')
  # A chat model has several, and what it is generated with outranks its config; 10**6 is no token.
  (path / 'generation_config.json').write_text('{"eos_token_id": [5, 1, 1000000, "x"]}')
  assert ends() == (1, 5)


def test_gpt2_s_older_layout(tmp_path):
  own = byte_level(special=('<|endoftext|>',))
  own.model.save(str(tmp_path))  # vocab.json, merges.txt
  (tmp_path / 'config.json').write_text('{"bos_token_id": 0}')
  (tmp_path / 'tokenizer_config.json').write_text('{"model_max_length": 1024}')
  found = TextTokenizer.from_folder(tmp_path)
  assert (found.bos_id, found.prefix) == (0, ())
  text = TEXT + ' é<|endoftext|>\n'
  assert found.decode(found.encode(text)) == text and 0 not in found.encode(text)
  assert found.encode(TEXT).tolist() == own.encode(TEXT).ids
  (tmp_path / 'tokenizer_config.json').write_text(
      '{"bos_token": "<|endoftext|>", "add_bos_token": true}')
  assert TextTokenizer.from_folder(tmp_path).prefix == (0,)


def byte_fallback():
  vocab = {'<s>': 0, '▁': 1} | {f'<0x{b:02X}>': 2 + b for b in range(256)} | {'▁a': 258, 'a': 259}
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[('▁', 'a')],
                                              byte_fallback=True))
  tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('▁'),
                                               normalizers.Replace(' ', '▁')])
  tokenizer.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(),
                                         decoders.Fuse(), decoders.Strip(' ', 1, 0)])
  tokenizer.add_special_tokens(['<s>'])
  return tokenizer


def test_byte_fallback(tmp_path):
  found = read(tmp_path, byte_fallback(), BOS | {'add_bos_token': True})
  assert found.encode('a é', special=True).tolist() == [0, 258, 1, 0xC3 + 2, 0xA9 + 2]
  assert found.decode(found.encode('a é')) == 'a é' and found.vocab_size == 260
  assert 0 not in found.encode('<s> a')  # letter by letter


def test_the_tokenizer_of_a_run():
  found = TextTokenizer.from_encoder(ByteEncoder(), bos=True)
  assert found.encode('A', special=True).tolist() == [0, 67] and found.encode('A').tolist() == [67]
  assert (found.bos_id, found.vocab_size, found.decode([67])) == (0, 258, 'A')
  assert TextTokenizer.from_encoder(ByteEncoder()).prefix == ()


def test_an_ordinary_first_token_comes_before_texts_once(tmp_path):
  dot = ByteEncoder().encode('.')[0]
  tokenizer = TextTokenizer.from_encoder(ByteEncoder(), first_token=dot)
  assert tokenizer.bos_in_texts and tokenizer.prefix == (dot,)
  for i, text in enumerate(('one. two', '.two. one', 'three.')):
    (tmp_path / f'{i}.txt').write_text(text)
  source, texts = TextFolder(str(tmp_path)), ['.one. ', '.two. ', '.three']
  found = natural(tokenizer, source, sequences=3, length=6)
  assert [tokenizer.decode(row) for row in found.tokens] == texts
  assert found.description['skipped_bos'] == 0
  assert found.description['bos']['applied'] == f'bos id {dot} at position 1'
  forced = natural(tokenizer, source, sequences=3, length=6, bos='force')
  assert (forced.tokens == found.tokens).all()
  bare = natural(tokenizer, source, sequences=3, length=6, bos='none')
  assert [tokenizer.decode(row) for row in bare.tokens] == ['one. t', '.two. ', 'three.']
  long = long_text(tokenizer, source, sequences=3, length=8)
  assert [tokenizer.decode(row) for row in long.tokens] == ['.one. tw', '.o\n\n.two', '. one\n\nt']
  drawn = random_tokens(60, sequences=99, length=9, tokenizer=tokenizer)
  assert (drawn.tokens != dot).all()


def test_texts_as_tokens():
  tokenizer = TextTokenizer.from_encoder(ByteEncoder(), bos=True)
  assert [row.tolist() for row in tokenizer.tokens(['ab', 'c'])] == [[0, 99, 100], [0, 101]]
  assert tokenizer.tokens('ab', bos='none')[0].tolist() == [99, 100]
  found = tokenizer.tokens(['ab', 'cde'], 3)
  assert found.tolist() == [[0, 99, 100], [0, 101, 102]] and found.dtype == np.int32
  for arguments, words in (((['abc', 'c'], 3), r'texts\[1\] has 2 tokens, fewer than length = 3'),
                           ((['a'], 0), 'length = 0 must be at least 1'),
                           (([],), 'one string or more'), (([b'a'],), 'one string or more'),
                           (('a', None, 'always'), 'choose none, tokenizer, force')):
    with pytest.raises(ValueError, match=words):
      tokenizer.tokens(*arguments)


@pytest.mark.parametrize('files, words', [
    ({}, 'has no tokenizer.json.*download'),
    ({'tokenizer.model': 'x'}, 'sentencepiece model.*save_pretrained'),
    ({'tokenizer.model': 'IQ== 0\nIg== 1\n'}, 'is a tiktoken model.*and tiktoken are .*save_pretr'),
    ({'qwen.tiktoken': 'IQ== 0\n'}, 'qwen.tiktoken is a tiktoken model.*convert_tiktoken_to_fast'),
    ({'tokenizer.json': '{'}, 'tokenizer.json is damaged'),
    ({'vocab.json': '{', 'merges.txt': ''}, 'vocab.json is damaged'),
    ({'tokenizer.json': None, 'tokenizer_config.json': '['}, 'tokenizer_config.json is damaged'),
    ({'tokenizer.json': None, 'tokenizer_config.json': '[]'}, 'must hold a JSON object'),
    ({'tokenizer.json': None, 'tokenizer_config.json': '{"bos_token": "<b>"}'}, "no token '<b>'"),
    ({'tokenizer.json': None, 'tokenizer_config.json': '{"add_bos_token": true}'},
     'add_bos_token is true, but there is no bos_token')])
def test_folders_that_cannot_be_read(tmp_path, files, words):
  for name, content in files.items():
    if content is None:
      byte_level().save(str(tmp_path / name))
    else:
      (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=words):
    TextTokenizer.from_folder(tmp_path)


def test_ids_beyond_the_model_s():
  found = TextTokenizer.from_encoder(ByteEncoder())
  found.check_vocabulary(258)
  with pytest.raises(ValueError, match='ids up to 257.*only has 257 tokens'):
    found.check_vocabulary(257)


def test_a_tokenizer_with_more_ids_than_the_model_is_cut(tmp_path, caplog):
  own = byte_level()
  size = own.get_vocab_size()
  for kind, tokens in ((own.add_special_tokens, ['<pad>']), (own.add_tokens, ['fox ju'])):
    kind(tokens)
  path = folder(tmp_path, own, BOS)
  assert size + 1 in TextTokenizer.from_folder(path, size + 2).encode(TEXT) and not caplog.text
  found = TextTokenizer.from_folder(path, size)
  assert f'ids up to {size + 1}, but the model only has {size} tokens: it is cut' in caplog.text
  assert found.encode(TEXT).tolist() == byte_level().encode(TEXT).ids
  assert (found.vocab_size, found.bos_id) == (size, 0)
  # BPE makes one merge after another, so one with fewer merges is the beginning of a longer one.
  shorter = byte_level(size=size - 9)
  assert TextTokenizer.from_folder(path, size - 9).encode(TEXT).tolist() == shorter.encode(TEXT).ids
  with pytest.raises(ValueError, match='has 100 tokens, and cannot be cut to them.*the id 100'):
    TextTokenizer.from_folder(path, 100)
  own.post_processor = processors.TemplateProcessing(
      single='<pad> $A', special_tokens=[('<pad>', size)])
  own.save(str(path / 'tokenizer.json'))
  with pytest.raises(ValueError, match=f'and {size} comes before every text: use the tokenizer'):
    TextTokenizer.from_folder(path, size)


def test_natural_inputs_are_the_heads_of_documents(tmp_path, corpus):
  tokenizer = read(tmp_path, byte_level(template='<s> $A </s>'), BOS)
  texts = [d.text for d in corpus.documents()]
  long = [t for t in texts if len(tokenizer.encode(t)) >= 300]
  found = natural(tokenizer, corpus, sequences=7, length=300, bos='none')
  np.testing.assert_array_equal(found.tokens, [tokenizer.encode(t)[:300] for t in long[:7]])
  assert found.tokens.dtype == np.int32 and found.tokenizer is tokenizer
  told = found.description
  assert (told['kind'], told['sequences'], told['length']) == ('natural', 7, 300)
  assert told['skipped_short'] == texts.index(long[6]) - 6 > 0 == told['skipped_bos']
  assert told['bos'] == {'protocol': 'none', 'applied': 'none'} and told['source'] == repr(corpus)
  assert told['first_token_ids'] == found.tokens[0, :4].tolist()
  assert ''.join(told['first_tokens']) == tokenizer.decode(found.tokens[0, :4])
  assert told['tokenizer'] == 'model/tokenizer.json' and told['domains'] is None
  json.dumps(told, allow_nan=False)

  begun = natural(tokenizer, corpus, sequences=7, length=300)
  # With a BOS, 299 tokens of a document do.
  assert (begun.tokens[:, 0] == 0).all() and (begun.tokens[:, 1:] > 1).all()
  assert begun.description['bos'] == {'protocol': 'tokenizer', 'applied': 'bos id 0 at position 1'}

  verse = natural(tokenizer, corpus, sequences=3, length=20, domain='verse')
  assert verse.description['domains'] == [
      {'domain': 'verse', 'sequences': 3, 'skipped_short': 0, 'skipped_bos': 0}]
  assert tokenizer.decode(verse.tokens[0]).startswith('<s>verse 0')
  with pytest.raises(ValueError, match="only 40 documents of the domain 'verse'.*--sequences"):
    natural(tokenizer, corpus, sequences=41, length=20, domain='verse')


def test_only_the_head_of_a_long_document_is_tokenized():
  seen = []
  encode = lambda text: seen.append(len(text)) or [3] * (len(text) // 100)
  tokenizer = TextTokenizer(encode, str, vocab_size=9, bos_id=None, prefix=(), name='sparse')
  document = [type('Document', (), dict(text='x' * 10**6, domain='text'))]
  source = type('Source', (), dict(documents=lambda self: document))()
  natural(tokenizer, source, sequences=1, length=10, bos='none')
  assert seen == [1, 640, 10**6]  # the head has too few tokens here, so all of it


def test_every_domain_has_its_share(corpus):
  tokenizer = TextTokenizer.from_encoder(ByteEncoder())
  found = by_domain(tokenizer, corpus, sequences=50, length=30, bos='none')
  assert [(d['domain'], d['sequences']) for d in found.description['domains']] == [
      ('prose', 50), ('verse', 40)]
  starts = [tokenizer.decode(row[:5]) for row in found.tokens]
  assert starts == ['prose'] * 50 + ['verse'] * 40
  with pytest.raises(ValueError, match='no document of 9999 tokens'):
    by_domain(tokenizer, corpus, length=9999, bos='none')
  seen = []
  documents = TextFolder.documents

  def watched(self):
    for document in documents(self):
      seen.append(document.domain)
      yield document

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(TextFolder, 'documents', watched)
    by_domain(tokenizer, corpus, sequences=2, length=30, bos='none', domains=['prose'])
  assert seen == ['prose', 'prose']


@pytest.mark.parametrize('template, config, protocol, first', [
    ('<s> $A', BOS, 'none', [5]), ('<s> $A', BOS, 'tokenizer', [0, 5]),
    (None, BOS, 'force', [0, 5]), ('<s> <s> $A', BOS, 'force', [0, 5]),
    ('<s> <s> $A', BOS, 'none', [5]),
    ('<s> <s> $A', BOS, 'tokenizer', 'tokenizer.json begins every text with 2 BOS.*post_processor'),
    (None, {}, 'force', 'names no BOS.*tokenizer_config'), (None, {}, 'tokenizer', [5]),
    ('<s> $A', BOS, 'twice', 'choose none, tokenizer, force')], ids=str)
def test_bos_protocols(tmp_path, corpus, template, config, protocol, first):
  tokenizer = read(tmp_path, byte_level(template=template), config)
  if isinstance(first, str):
    with pytest.raises(ValueError, match=first):
      natural(tokenizer, corpus, sequences=5, length=10, bos=protocol)
    return
  found = natural(tokenizer, corpus, sequences=5, length=10, bos=protocol)
  begins = first[0] == 0
  assert ((found.tokens == 0).sum(1) == begins).all() and (found.tokens[:, 0] == 0).all() == begins
  plain = tokenizer.encode(next(corpus.documents()).text)
  assert found.tokens[0].tolist() == [*([0] if begins else []), *plain][:10]


def word_level(tmp_path, normalizer=None, **config):
  """Words are tokens, the special ones among them."""
  words = ['<s>', 'a', 'b', '[UNK]']
  tokenizer = tokenizers.Tokenizer(models.WordLevel(dict(zip(words, range(4))), unk_token='[UNK]'))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.normalizer = normalizer
  tokenizer.add_special_tokens(['<s>'])
  return read(tmp_path, tokenizer, BOS | config)


def test_a_normalizer_that_writes_a_bos(tmp_path, corpus):
  tokenizer = word_level(tmp_path, normalizers.Prepend('<s> '))
  with pytest.raises(ValueError, match='even where no special tokens are asked for.*normalizer'):
    natural(tokenizer, corpus, sequences=5, length=3, bos='none')
  for protocol in ('tokenizer', 'force'):
    found = natural(tokenizer, corpus, sequences=5, length=3, bos=protocol)
    assert found.tokens.tolist() == [[0, 3, 3]] * 5


def test_documents_with_a_second_bos_are_left_out(tmp_path):
  for i, text in enumerate(('a b a', 'b <s> a', 'b b b', 'a b <s>')):
    (tmp_path / f'{i}.txt').write_text(text)
  tokenizer = word_level(tmp_path, add_bos_token=True)
  found = natural(tokenizer, TextFolder(str(tmp_path)), sequences=3, length=3)
  assert found.tokens.tolist() == [[0, 1, 2], [0, 2, 2], [0, 1, 2]]  # the last is cut before it
  assert found.description['skipped_bos'] == 1


def test_drawn_tokens():
  found = random_tokens(50, sequences=200, length=40, seed=3)
  assert found.tokens.shape == (200, 40) and found.tokens.dtype == np.int32
  counts = np.bincount(found.tokens.ravel(), minlength=50)
  assert len(counts) == 50 and abs(counts - 160).max() < 6 * np.sqrt(160)
  assert found.description['seed'] == 3 and found.description['vocab_size'] == 50
  assert found.description['first_tokens'] is None
  np.testing.assert_array_equal(found.tokens, random_tokens(50, sequences=200, length=40,
                                                            seed=3).tokens)
  assert (found.tokens != random_tokens(50, sequences=200, length=40, seed=4).tokens).any()
  repeated = repeated_token(50, sequences=200, length=40).tokens
  assert (repeated == repeated[:, :1]).all() and len(set(repeated[:, 0])) > 40
  with pytest.raises(ValueError, match='--bos=force needs a tokenizer'):
    random_tokens(50, bos='force')


@pytest.mark.parametrize('make', [random_tokens, repeated_token])
def test_drawn_tokens_have_at_most_the_bos_in_front(make):
  tokenizer = TextTokenizer.from_encoder(ByteEncoder(), bos=True)
  for protocol, first in (('none', False), ('tokenizer', True), ('force', True)):
    found = make(4, sequences=300, length=6, bos=protocol, tokenizer=tokenizer)
    assert ((found.tokens[:, 0] == 0) == first).all()
    assert set(np.unique(found.tokens[:, 1:])) == {1, 2, 3}
    applied = found.description['bos']['applied']
    assert applied == ('bos id 0 at position 1' if first else 'none')


def test_stored_tokens():
  found = stored(np.arange(6).reshape(2, 3), 9, 'probe tokens of a task')
  assert found.tokens.dtype == np.int32 and found.description['bos']['protocol'] == 'as in training'
  assert found.description['source'] == 'probe tokens of a task'


def test_sources_of_a_command_line(tmp_path, corpus):
  lines = tmp_path / 'lines.jsonl'
  lines.write_text('{"text": "a"}\n')
  assert open_source('') == Stdlib(domains='docs')
  assert open_source(corpus.path) == corpus
  assert open_source(str(lines)) == Jsonl(str(lines))
  (tmp_path / 'only').mkdir()
  (tmp_path / 'only' / 'lines.jsonl').write_text('{"text": "a"}\n')
  assert open_source(str(tmp_path / 'only')) == Jsonl(str(tmp_path / 'only'))
  text = tmp_path / 'one.txt'
  text.write_text('b')
  assert [d.text for d in open_source(str(text)).documents()] == ['b']
  assert open_source("Stdlib(domains='code')") == Stdlib(domains='code')
  for wrong, words in (('no/such', 'no such file'), ('Nothing', 'Choices'),
                       ('Jsonl(', 'Cannot read')):
    with pytest.raises(ValueError, match=words):
      open_source(wrong)


def test_tokenizers_that_cannot_encode_are_explained(tmp_path):
  from tokenizers import Tokenizer, models
  Tokenizer(models.WordLevel({'b': 0}, unk_token='[UNK]')).save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(ValueError, match='cannot encode a text'):
    TextTokenizer.from_folder(tmp_path)
  Tokenizer(models.WordLevel({'a': 0}, unk_token='a')).save(str(tmp_path / 'tokenizer.json'))
  for wrong in (-1, 2**40, True, 7):
    (tmp_path / 'config.json').write_text(json.dumps({'bos_token_id': wrong}))
    assert TextTokenizer.from_folder(tmp_path).bos_id is None
