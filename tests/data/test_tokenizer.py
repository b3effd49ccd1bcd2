"""Tokenizers: ids, special tokens, tokens before a text, files."""

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


def test_hugging_face_finds_special_tokens(tmp_path):
  model = byte_level(('<pad>', '<s>', '</s>'))
  model.enable_truncation(2)
  model.enable_padding(length=9)
  model.save(str(tmp_path / 'tokenizer.json'))
  found = HuggingFace(path=str(tmp_path / 'tokenizer.json')).open()
  assert (found.eos_id, found.bos_id, found.pad_id) == (2, 1, 0)
  assert found.vocab_size == model.get_vocab_size()
  ids = found.encode(TEXT)  # neither truncated nor padded
  assert found.decode(ids) == TEXT and found.encode_batch([TEXT, 'a']) == [ids, found.encode('a')]
  before = HuggingFace(path=str(tmp_path)).fingerprint()
  (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "<s>", "bos_token": "<pad>"}')
  chosen = HuggingFace(path=str(tmp_path)).open()
  assert (chosen.eos_id, chosen.bos_id, chosen.bos_in_texts) == (1, 0, False)
  assert HuggingFace(path=str(tmp_path)).fingerprint() != before
  (tmp_path / 'tokenizer_config.json').unlink()
  byte_level(('x', '<|endoftext|>')).save(str(tmp_path / 'tokenizer.json'))
  again = HuggingFace(path=str(tmp_path)).open()
  assert (again.eos_id, again.bos_id, again.pad_id) == (1, 1, 1)


def test_no_special_token_is_read_from_text_whatever_its_role(tmp_path):
  model = byte_level(('<|endoftext|>',))
  model.add_special_tokens(['<mask>'])
  found = read(tmp_path, model)
  assert found.vocab_size == model.get_vocab_size() and len(found.encode('a<mask>b')) >= 8
  assert found.decode(found.encode('a<mask>b')) == 'a<mask>b' and 0 not in found.encode(TRICKY)
  unpickled = pickle.loads(pickle.dumps(found))
  assert unpickled.encode('a<mask>b') == found.encode('a<mask>b') and unpickled.digest == found.digest


CHAT = '<|im_start|>user\nthe fox<|im_end|>\n'


def chat_tokenizer(folder):
  """A tokenizer with the special tokens of a chat: <s> 0, </s> 1, <|im_start|> 2, <|im_end|> 3."""
  special = ('<s>', '</s>', '<|im_start|>', '<|im_end|>')
  return read(folder, byte_level(special, '<s> $A'), BOS | {'eos_token': '<|im_end|>'})


def test_special_tokens_in_a_text_are_text_unless_they_are_asked_for(tmp_path):
  found = chat_tokenizer(tmp_path)
  letters = lambda text: found.model.encode(text, add_special_tokens=False).ids
  parsed = [0, 2, *letters('user\nthe fox'), 3, *letters('\n')]
  read_as = lambda text, **options: found.tokens(text, **options)[0].tolist()
  assert read_as(CHAT, special=True) == parsed
  assert read_as(f'<s>{CHAT}', special=True) == parsed  # no text begins with two BOS
  as_text = read_as(CHAT)
  assert as_text == read_as(CHAT, special=False) and not {1, 2, 3} & set(as_text)
  assert found.decode(as_text[1:]) == CHAT
  assert read_as(TEXT, special=True) == read_as(TEXT)
  # The option of one call does not remain.
  assert found.encode(CHAT, special=True) == parsed[1:] and found.encode(CHAT) == as_text[1:]


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
    ('<s> $A', BOS, (0,)), ('<s> $A', {}, (0,)),             # LLaMA 3; without any config
    ('<s> $A </s>', BOS, (0,)),                              # drops an EOS at the end
    ('$A </s>', BOS, ()),
    (None, BOS | {'add_bos_token': True}, (0,)),             # add_bos_token has priority
    ('<s> $A', BOS | {'add_bos_token': False}, ()),
    ('<s> <s> $A', BOS | {'add_bos_token': True}, (0,)),
    (None, {'bos_token': '</s>', 'add_bos_token': True}, (1,)),  # OPT
    # Nothing is added without a name, as in transformers 5.23 (update_post_processor).
    (None, {'add_bos_token': True}, ()), (None, {'add_bos_token': True, 'bos_token': None}, ()),
    ('<s> $A', {'add_bos_token': True}, (0,))], ids=str)
def test_what_a_tokenizer_puts_before_a_text(tmp_path, template, config, prefix):
  model = byte_level(template=template)
  found = read(tmp_path, model, config)
  body = model.encode(TEXT, add_special_tokens=False).ids
  assert found.prefix == prefix and not found.bos_in_texts
  assert found.encode(TEXT) == body and found.decode(body) == TEXT
  assert found.with_prefix(body, 'tokenizer').tolist() == [*prefix, *body]
  # Other programs read the saved files with the same ids, and so does this one.
  found.save(tmp_path / 'saved')
  saved = tokenizers.Tokenizer.from_file(str(tmp_path / 'saved' / 'tokenizer.json'))
  assert saved.encode(TEXT).ids == [*prefix, *body]
  again = TextTokenizer.from_path(tmp_path / 'saved')
  assert (again.prefix, again.bos_id, again.eos_ids) == (prefix, found.bos_id, found.eos_ids)
  assert again.digest == found.digest


def test_where_the_bos_and_what_ends_a_text_are_named(tmp_path):
  found = lambda: TextTokenizer.from_path(tmp_path).bos_id
  assert read(tmp_path, byte_level(template='<s> $A')).bos_id == 0  # the template's first token
  (tmp_path / 'special_tokens_map.json').write_text('{"bos_token": "</s>"}')
  assert found() == 1
  (tmp_path / 'tokenizer_config.json').write_text('{"bos_token": "<s>"}')
  assert found() == 0
  (tmp_path / 'special_tokens_map.json').unlink()
  assert read(tmp_path, byte_level(), {}).bos_id is None
  (tmp_path / 'config.json').write_text('{"bos_token_id": 1}')  # like GPT-2's folder
  assert found() == 1
  (tmp_path / 'tokenizer_config.json').write_text('{"bos_token": null}')  # states that there is none
  assert found() is None
  for file in tmp_path.iterdir():
    file.unlink()
  ends = lambda: TextTokenizer.from_path(tmp_path).eos_ids
  assert read(tmp_path, byte_level()).eos_ids == ()
  with pytest.raises(ValueError, match='set eos_token'):
    TextTokenizer.from_path(tmp_path).eos_id
  (tmp_path / 'config.json').write_text('{"eos_token_id": 3}')
  assert ends() == (3,)
  (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')
  # A chat model has several end tokens, and its generation config has priority. 10**6 is not a token id.
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


POINTER = 'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n'
SOUND = {'tokenizer.json': byte_level().to_str()}


@pytest.mark.parametrize('files, words', [
    ({}, 'sentencepiece'), ({'tokenizer.json': '{'}, 'tokenizer.json'),
    ({'vocab.json': '{', 'merges.txt': ''}, 'vocab.json'), (SOUND | {'config.json': '[1]'}, 'config.json'),
    (SOUND | {'tokenizer_config.json': '{"bos_token": "<b>"}'}, '<b>'),
    ({'tokenizer.json': POINTER}, 'tokenizer.json is .*git lfs pull'),
    (SOUND | {'tokenizer_config.json': POINTER}, 'tokenizer_config.json is .*git lfs pull'),
    ({'vocab.json': POINTER, 'merges.txt': ''}, 'vocab.json is .*git lfs pull'),
    ({'vocab.json': '{}', 'merges.txt': POINTER}, 'merges.txt is .*git lfs pull')])
def test_files_that_do_not_fit_are_named(tmp_path, files, words):
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=words):
    TextTokenizer.from_path(tmp_path)


@pytest.mark.parametrize('call, words', [
    (lambda _: TrainedBpe(vocab_size=257), 'vocab_size'),
    (lambda _: Bytes().open().tokens(['abc', 'c'], 3), 'length = 3'),
    (lambda _: Bytes().open().tokens([]), 'texts'),
    (lambda _: Bytes().open().tokens('a', None, 'always'), 'force'),
    (lambda folder: read(folder, byte_level()).tokens('a', None, 'force'), 'tokenizer_config.json'),
    (lambda folder: HuggingFace(path=str(folder / 'nope')).fingerprint(), 'nope')])
def test_what_cannot_be_asked_for(tmp_path, call, words):
  with pytest.raises(ValueError, match=words):
    call(tmp_path)
