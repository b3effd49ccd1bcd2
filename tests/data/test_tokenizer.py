"""Tokenizers: ids, special tokens, what stands before a text, files."""

import json
import pickle

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from sink_jax.data.tokenizer import Bytes, HuggingFace, TextTokenizer, TrainedBpe

TEXT = 'the quick brown fox jumps over the lazy dog, again and again'
TRICKY = 'a<|endoftext|>b</s> <s> <|padding|> é\n'
BOS = {'bos_token': {'content': '<s>', 'special': True}}


def byte_level(special=('<s>', '</s>'), template=None):
  """A byte-level BPE; template: what the post-processor makes of a text, such as '<s> $A'."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(
      vocab_size=300, special_tokens=list(special), show_progress=False,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
  if template:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(s, tokenizer.token_to_id(s)) for s in special])
  return tokenizer


def word_level(folder, special):
  words = {w: i for i, w in enumerate([*special, 'hello', 'world', '[UNK]'])}
  tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token='[UNK]'))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(special)
  tokenizer.enable_truncation(2)
  tokenizer.enable_padding(length=9)
  tokenizer.save(str(folder / 'tokenizer.json'))
  return str(folder / 'tokenizer.json')


def read(folder, tokenizer, config=None):
  tokenizer.save(str(folder / 'tokenizer.json'))
  if config is not None:
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return TextTokenizer.from_path(folder)


def test_bytes():
  found = Bytes().open()
  assert found.encode('é<|endoftext|>\ud800') == [2 + byte for byte in 'é<|endoftext|>?'.encode()]
  assert (found.vocab_size, found.eos_id, found.bos_id, found.pad_id) == (258, 0, 0, 1)
  text = TRICKY + ''.join(map(chr, range(0x500)))
  assert found.decode(found.encode(text)) == text
  assert found.decode([0, 67, 1, 2 + 0xff, 67, 300]) == '<|endoftext|>A<|padding|>\N{REPLACEMENT CHARACTER}A'
  tokenizer = found.beginning_with(0)
  assert [row.tolist() for row in tokenizer.tokens(['ab', 'c'])] == [[0, 99, 100], [0, 101]]
  assert tokenizer.tokens('ab', bos='none')[0].tolist() == [99, 100]
  rows = tokenizer.tokens(['ab', 'cde'], 3)
  assert rows.tolist() == [[0, 99, 100], [0, 101, 102]] and rows.dtype == np.int32


def test_hugging_face_finds_special_tokens_and_never_parses_them(tmp_path):
  found = HuggingFace(path=word_level(tmp_path, ['<pad>', '<s>', '</s>'])).open()
  assert (found.eos_id, found.bos_id, found.pad_id, found.vocab_size) == (2, 1, 0, 6)
  # Neither truncated nor padded, and '</s>' in the text is not a word that it knows.
  assert found.encode('hello world </s> hello') == [3, 4, 5, 5, 3]
  assert not set(found.encode('hello </s> <s> <pad>')) & {0, 1, 2}
  assert found.encode_batch(['hello', 'world hello hello']) == [[3], [4, 3, 3]]
  assert 'hello' in found.decode([3, 2]) and '</s>' in found.decode([3, 2])
  before = HuggingFace(path=str(tmp_path)).fingerprint()
  (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "world", "bos_token": "hello"}')
  chosen = HuggingFace(path=str(tmp_path)).open()
  assert (chosen.eos_id, chosen.bos_id) == (4, 3) and not chosen.bos_in_texts
  assert not {3, 4} & set(chosen.encode('hello world'))
  assert HuggingFace(path=str(tmp_path)).fingerprint() != before
  (tmp_path / 'tokenizer_config.json').unlink()
  again = HuggingFace(path=word_level(tmp_path, ['x', '<|endoftext|>'])).open()
  assert (again.eos_id, again.bos_id, again.pad_id) == (1, 1, 1)


def test_no_special_token_is_read_from_text_whatever_its_role(tmp_path):
  model = byte_level(('<|endoftext|>',))
  model.add_special_tokens(['<mask>'])
  found = read(tmp_path, model)
  assert found.vocab_size == model.get_vocab_size() and len(found.encode('a<mask>b')) >= 8
  assert found.decode(found.encode('a<mask>b')) == 'a<mask>b'
  unpickled = pickle.loads(pickle.dumps(found))
  assert unpickled.encode('a<mask>b') == found.encode('a<mask>b') and unpickled.digest == found.digest


def test_trained_bpe(corpus):
  found, again = (TrainedBpe(vocab_size=300).open(corpus, 0.1) for _ in range(2))
  assert found.digest == again.digest and found.vocab_size == 300
  assert found.decode(found.encode(TRICKY)) == TRICKY
  assert min(found.encode(TRICKY)) >= 2  # neither EOS (0) nor padding (1)
  assert found.decode([0, 1]) == '<|endoftext|><|padding|>'
  text = next(corpus.documents()).text
  assert len(found.encode(text)) < len(text)
  names = {d.text: d.name for d in corpus.documents()}
  texts = list(TrainedBpe()._texts(corpus, 0.3))
  assert 0 < len(texts) < len(names) and not any(corpus.held_out(names[text], 0.3) for text in texts)
  assert sum(map(len, TrainedBpe(characters=500)._texts(corpus, 0.3))) == 500


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
  model = byte_level(template=template)
  found = read(tmp_path, model, config)
  body = model.encode(TEXT, add_special_tokens=False).ids
  assert found.prefix == prefix and not found.bos_in_texts
  assert found.encode(TEXT) == body and found.decode(body) == TEXT
  assert found.with_prefix(body, 'tokenizer').tolist() == [*prefix, *body]
  # What is written is read by other programs with the same ids, and by this one.
  found.save(tmp_path / 'saved')
  saved = tokenizers.Tokenizer.from_file(str(tmp_path / 'saved' / 'tokenizer.json'))
  assert saved.encode(TEXT).ids == [*prefix, *body]
  again = TextTokenizer.from_path(tmp_path / 'saved')
  assert (again.prefix, again.bos_id, again.eos_ids) == (prefix, found.bos_id, found.eos_ids)
  assert again.digest == found.digest


def test_where_the_bos_is_named(tmp_path):
  found = lambda: TextTokenizer.from_path(tmp_path).bos_id
  assert read(tmp_path, byte_level(template='<s> $A')).bos_id == 0  # what comes first
  (tmp_path / 'special_tokens_map.json').write_text('{"bos_token": "</s>"}')
  assert found() == 1
  (tmp_path / 'tokenizer_config.json').write_text('{"bos_token": "<s>"}')
  assert found() == 0
  (tmp_path / 'special_tokens_map.json').unlink()
  assert read(tmp_path, byte_level(), {}).bos_id is None
  (tmp_path / 'config.json').write_text('{"bos_token_id": 1}')  # as GPT-2's own folder has it
  assert found() == 1
  (tmp_path / 'tokenizer_config.json').write_text('{"bos_token": null}')  # there is none, it says
  assert found() is None


def test_what_ends_a_text_is_named_by_the_tokenizer_and_by_the_model(tmp_path):
  ends = lambda: TextTokenizer.from_path(tmp_path).eos_ids
  assert read(tmp_path, byte_level()).eos_ids == ()
  (tmp_path / 'config.json').write_text('{"eos_token_id": 3}')
  assert ends() == (3,)
  (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')
  # A chat model has several, and what it is generated with outranks its config; 10**6 is no token.
  (tmp_path / 'generation_config.json').write_text('{"eos_token_id": [5, 1, 1000000, "x"]}')
  assert ends() == (1, 5)
  assert TextTokenizer.from_path(tmp_path).encode(TEXT) == byte_level().encode(TEXT).ids


def test_gpt2_s_older_layout(tmp_path):
  model = byte_level(special=('<|endoftext|>',))
  model.model.save(str(tmp_path))  # vocab.json, merges.txt
  (tmp_path / 'config.json').write_text('{"bos_token_id": 0}')
  found = TextTokenizer.from_path(tmp_path)
  assert (found.bos_id, found.prefix, found.bos_in_texts) == (0, (), False)
  text = TEXT + ' é<|endoftext|>\n'
  assert found.decode(found.encode(text)) == text and 0 not in found.encode(text)
  assert found.encode(TEXT) == model.encode(TEXT).ids
  (tmp_path / 'tokenizer_config.json').write_text(
      '{"bos_token": "<|endoftext|>", "add_bos_token": true}')
  assert TextTokenizer.from_path(tmp_path).prefix == (0,)


def written(folder, tokenizer=None, **files):
  if tokenizer:
    tokenizer.save(str(folder / 'tokenizer.json'))
  for name, content in files.items():
    (folder / name.replace('__', '.')).write_text(content)
  return folder


@pytest.mark.parametrize('call, words', [
    (lambda _: TrainedBpe(vocab_size=257), 'vocab_size'),
    (lambda _: Bytes().open().tokens(['abc', 'c'], 3), 'length = 3'),
    (lambda _: Bytes().open().tokens([]), 'texts'),
    (lambda _: Bytes().open().tokens('a', None, 'always'), 'force'),
    (lambda folder: read(folder, byte_level()).tokens('a', None, 'force'), 'tokenizer_config.json'),
    (lambda folder: HuggingFace(path=str(folder / 'nope')).fingerprint(), 'nope'),
    (lambda folder: HuggingFace(path=word_level(folder, ['<start>'])).open(), '<start>'),
    (lambda folder: TextTokenizer.from_path(folder), 'sentencepiece'),
    (lambda folder: TextTokenizer.from_path(written(folder, tokenizer__json='{')), 'tokenizer.json'),
    (lambda folder: TextTokenizer.from_path(written(folder, vocab__json='{', merges__txt='')), 'vocab.json'),
    (lambda folder: TextTokenizer.from_path(written(folder, byte_level(), config__json='[1]')), 'config.json'),
    (lambda folder: TextTokenizer.from_path(
        written(folder, byte_level(), tokenizer_config__json='{"bos_token": "<b>"}')), '<b>'),
    (lambda folder: TextTokenizer.from_path(
        written(folder, byte_level(), tokenizer_config__json='{"add_bos_token": true}')), 'bos_token')])
def test_what_cannot_be_opened_or_asked_for(tmp_path, call, words):
  with pytest.raises(ValueError, match=words):
    call(tmp_path)
