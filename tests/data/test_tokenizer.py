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
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
BOS = {'bos_token': {'content': '<s>', 'special': True}}


def byte_level(special=('<s>', '</s>'), template=None, texts=(TEXT,), words=(WORDS,)):
  """A byte-level BPE.

  template: what the post-processor makes of a text, such as '<s> $A'. words: pre-tokenizers.
  """
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(words))
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator(
    texts * 3,
    trainers.BpeTrainer(
      vocab_size=300,
      special_tokens=list(special),
      show_progress=False,
      initial_alphabet=WORDS.alphabet(),
    ),
  )
  if template:
    tokenizer.post_processor = processors.TemplateProcessing(
      single=template, special_tokens=[(s, tokenizer.token_to_id(s)) for s in special]
    )
  return tokenizer


def read(folder, tokenizer, config=None):
  tokenizer.save(str(folder / 'tokenizer.json'))
  if config is not None:
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return TextTokenizer.from_path(folder)


def test_bytes():
  tokenizer = Bytes().open()
  assert tokenizer.encode('é\ud800') == [2 + byte for byte in 'é?'.encode()]
  assert tokenizer.vocab_size == 258
  assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (0, 0, 1)
  text = TRICKY + ''.join(map(chr, range(0x500)))
  assert tokenizer.decode(tokenizer.encode(text)) == text
  ids = [0, 67, 1, 2 + 0xFF, 67, 300]
  assert tokenizer.decode(ids) == '<|endoftext|>A<|padding|>\N{REPLACEMENT CHARACTER}A'
  begun = tokenizer.beginning_with(0)
  assert [row.tolist() for row in begun.tokens(['ab', 'c'])] == [[0, 99, 100], [0, 101]]
  assert begun.tokens('ab', bos='none')[0].tolist() == [99, 100]
  rows = begun.tokens(['ab', 'cde'], 3)
  assert rows.tolist() == [[0, 99, 100], [0, 101, 102]]
  assert rows.dtype == np.int32


def test_hugging_face_reads_a_file_or_its_folder_and_neither_cuts_nor_pads(tmp_path):
  model = byte_level()
  model.enable_truncation(2)
  model.enable_padding(length=9)
  model.save(str(tmp_path / 'tokenizer.json'))
  tokenizer = HuggingFace(path=str(tmp_path / 'tokenizer.json')).open()
  ids = tokenizer.encode(TEXT)
  assert tokenizer.decode(ids) == TEXT
  assert tokenizer.encode_batch([TEXT, 'a']) == [ids, tokenizer.encode('a')]
  before = HuggingFace(path=str(tmp_path)).fingerprint()
  (tmp_path / 'tokenizer_config.json').write_text('{"bos_token": "</s>"}')
  assert HuggingFace(path=str(tmp_path)).fingerprint() != before


_PADDED = ('<pad>', '<s>', '</s>')


@pytest.mark.parametrize(
  'special, config, ids',
  [
    (_PADDED, {}, (2, 1, 0)),
    (_PADDED, {'eos_token': '<s>', 'bos_token': '<pad>'}, (1, 0, 0)),
    (('x', '<|endoftext|>'), {}, (1, 1, 1)),
  ],
)
def test_hugging_face_takes_tokens_with_usual_names(tmp_path, special, config, ids):
  read(tmp_path, byte_level(special), config)
  opened = HuggingFace(path=str(tmp_path)).open()
  assert (opened.eos_id, opened.bos_id, opened.pad_id) == ids
  assert opened.prefix == ()


def test_no_special_token_is_read_from_text_whatever_its_role(tmp_path):
  model = byte_level(('<|endoftext|>',))
  model.add_special_tokens(['<mask>'])
  tokenizer = read(tmp_path, model)
  assert tokenizer.vocab_size == model.get_vocab_size()
  ids = tokenizer.encode(f'<mask>{TRICKY}')
  assert not {0, model.token_to_id('<mask>')} & set(ids)
  assert tokenizer.decode(ids) == f'<mask>{TRICKY}'
  unpickled = pickle.loads(pickle.dumps(tokenizer))
  assert unpickled.encode(f'<mask>{TRICKY}') == ids
  assert unpickled.digest == tokenizer.digest


CHAT = '<|im_start|>user\nthe fox<|im_end|>\n'


def chat_tokenizer(folder):
  """A tokenizer with the special tokens of a chat: <s> 0, </s> 1, <|im_start|> 2, <|im_end|> 3."""
  special = ('<s>', '</s>', '<|im_start|>', '<|im_end|>')
  return read(folder, byte_level(special, '<s> $A'), BOS | {'eos_token': '<|im_end|>'})


def test_special_tokens_in_a_text_are_text_unless_they_are_asked_for(tmp_path):
  tokenizer = chat_tokenizer(tmp_path)
  letters = lambda text: tokenizer.model.encode(text, add_special_tokens=False).ids
  parsed = [0, 2, *letters('user\nthe fox'), 3, *letters('\n')]
  read_as = lambda text, **options: tokenizer.tokens(text, **options)[0].tolist()
  assert read_as(CHAT, special=True) == parsed
  assert read_as(f'<s>{CHAT}', special=True) == parsed  # no text begins with two BOS
  as_text = read_as(CHAT)
  assert not {1, 2, 3} & set(as_text)
  assert tokenizer.decode(as_text[1:]) == CHAT

  # The option of one call does not remain.
  assert tokenizer.encode(CHAT, special=True) == parsed[1:]
  assert tokenizer.encode(CHAT) == as_text[1:]


def test_trained_bpe(corpus):
  tokenizer, again = (TrainedBpe(vocab_size=300).open(corpus, 0.1) for _ in range(2))
  assert tokenizer.digest == again.digest
  assert tokenizer.vocab_size == 300
  assert tokenizer.decode(tokenizer.encode(TRICKY)) == TRICKY
  assert min(tokenizer.encode(TRICKY)) >= 2  # neither EOS (0) nor padding (1)
  assert tokenizer.decode([0, 1]) == '<|endoftext|><|padding|>'
  text = next(corpus.documents()).text
  assert len(tokenizer.encode(text)) < len(text)
  names = {d.text: d.name for d in corpus.documents()}
  texts = list(TrainedBpe()._texts(corpus, 0.3))
  assert 0 < len(texts) < len(names)
  assert not any(corpus.held_out(names[text], 0.3) for text in texts)
  first = TrainedBpe(characters=500)._texts(corpus, 0.3)
  assert sum(map(len, first)) == 500


@pytest.mark.parametrize(
  'template, config, prefix',
  [
    (None, BOS, ()),  # GPT-NeoX
    ('<s> $A', BOS, (0,)),
    ('<s> $A', {}, (0,)),  # LLaMA 3; without any config
    ('<s> $A </s>', BOS, (0,)),  # drops an EOS at the end
    ('$A </s>', BOS, ()),
    (None, BOS | {'add_bos_token': True}, (0,)),  # add_bos_token has priority
    ('<s> $A', BOS | {'add_bos_token': False}, ()),
    ('<s> <s> $A', BOS | {'add_bos_token': True}, (0,)),
    (None, {'bos_token': '</s>', 'add_bos_token': True}, (1,)),  # OPT
    # Nothing is added without a name, as in transformers 5.23 (update_post_processor).
    (None, {'add_bos_token': True}, ()),
    (None, {'add_bos_token': True, 'bos_token': None}, ()),
    ('<s> $A', {'add_bos_token': True}, (0,)),
  ],
  ids=str,
)
def test_what_a_tokenizer_puts_before_a_text(tmp_path, template, config, prefix):
  model = byte_level(template=template)
  tokenizer = read(tmp_path, model, config)
  body = model.encode(TEXT, add_special_tokens=False).ids
  assert tokenizer.prefix == prefix
  assert not tokenizer.bos_in_texts
  assert tokenizer.encode(TEXT) == body
  assert tokenizer.decode(body) == TEXT
  assert tokenizer.with_prefix(body, 'tokenizer').tolist() == [*prefix, *body]

  # Other programs read the saved files with the same ids, and so does this one.
  tokenizer.save(tmp_path / 'saved')
  saved = tokenizers.Tokenizer.from_file(str(tmp_path / 'saved' / 'tokenizer.json'))
  assert saved.encode(TEXT).ids == [*prefix, *body]
  again = TextTokenizer.from_path(tmp_path / 'saved')
  for name in ('prefix', 'bos_id', 'eos_ids', 'digest'):
    assert getattr(again, name) == getattr(tokenizer, name)


@pytest.mark.parametrize(
  'role, expected, files',
  [
    ('bos_id', 1, {'special_tokens_map': {'bos_token': '</s>'}}),
    (
      'bos_id',
      0,
      {'special_tokens_map': {'bos_token': '</s>'}, 'tokenizer_config': {'bos_token': '<s>'}},
    ),
    ('bos_id', None, {'tokenizer_config': {}}),
    ('bos_id', 1, {'config': {'bos_token_id': 1}}),  # like GPT-2's folder
    ('bos_id', None, {'config': {'bos_token_id': 1}, 'tokenizer_config': {'bos_token': None}}),
    ('pad_id', 0, {'tokenizer_config': {'pad_token': '<s>'}}),
    ('eos_ids', (), {}),
    ('eos_ids', (3,), {'config': {'eos_token_id': 3}}),
    (
      'eos_ids',
      (1, 3),
      {'config': {'eos_token_id': 3}, 'tokenizer_config': {'eos_token': '</s>'}},
    ),
    # A chat model has several end tokens, and its generation config has priority.
    (
      'eos_ids',
      (5, 1),
      {
        'config': {'eos_token_id': 3},
        'generation_config': {'eos_token_id': [5, 1, 10**6, 'x']},  # 10**6 is not an id
      },
    ),
  ],
  ids=str,
)
def test_where_special_tokens_are_named(tmp_path, role, expected, files):
  for name, content in files.items():
    (tmp_path / f'{name}.json').write_text(json.dumps(content))
  tokenizer = read(tmp_path, byte_level())
  assert getattr(tokenizer, role) == expected
  assert tokenizer.encode(TEXT) == byte_level().encode(TEXT).ids


def test_gpt2_s_older_layout(tmp_path):
  model = byte_level(special=('<|endoftext|>',))
  model.model.save(str(tmp_path))  # vocab.json, merges.txt
  (tmp_path / 'config.json').write_text('{"bos_token_id": 0}')
  tokenizer = TextTokenizer.from_path(tmp_path)
  assert (tokenizer.bos_id, tokenizer.prefix, tokenizer.bos_in_texts) == (0, (), False)
  assert 0 not in tokenizer.encode(TRICKY)
  assert tokenizer.encode(TEXT) == model.encode(TEXT).ids
  (tmp_path / 'tokenizer_config.json').write_text(
    '{"bos_token": "<|endoftext|>", "add_bos_token": true}'
  )
  assert TextTokenizer.from_path(tmp_path).prefix == (0,)
