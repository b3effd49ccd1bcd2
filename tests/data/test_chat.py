"""Conversations: templates, token weights, batches."""

import json
import string

import numpy as np
import pytest
import tokenizers
from numpy.testing import assert_array_equal

from configs import make_stdlib_chat
from sink_jax.data.chat import ChatJsonl, encode, load_template, rendered
from sink_jax.data.dataset import DataConfig, open_data, open_packed
from sink_jax.data.packed import SPLITS
from sink_jax.data.sources import Document, PackedDataset
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.token_edits import FixedToken
from sink_jax.data.tokenizer import TextTokenizer
from tests.data.rows import assert_same_batches

_EOS = '\0'  # the character of id 0 in `Bytes`
_TALK = [
  ('system', 'Be brief.'),
  ('user', 'Näme?'),
  ('assistant', 'Ada.\n'),
  ('user', 'Sure?'),
  ('assistant', 'Yes.'),
]
# The text of this conversation, written by hand. Every second part is an answer with its end token.
_BY_HAND = {
  'zephyr': (
    f'<|system|>\nBe brief.{_EOS}\n<|user|>\nNäme?{_EOS}\n<|assistant|>\n',
    f'Ada.\n{_EOS}',
    f'\n<|user|>\nSure?{_EOS}\n<|assistant|>\n',
    f'Yes.{_EOS}',
    '\n',
  ),
  'chatml': (
    '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nNäme?<|im_end|>\n'
    '<|im_start|>assistant\n',
    'Ada.\n<|im_end|>',
    '\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n',
    'Yes.<|im_end|>',
    '\n',
  ),
  'plain': (
    'Be brief.\n\nUser:\nNäme?\n\nAssistant:\n',
    f'Ada.\n{_EOS}',
    '\n\nUser:\nSure?\n\nAssistant:\n',
    f'Yes.{_EOS}',
    '\n\n',
  ),
  'file': ('(Be brief.) Q Näme? A ', 'Ada.\n;', ' Q Sure? A ', 'Yes.;', ' '),
}
_FILE = {'system': '({content}) ', 'user': 'Q {content} A ', 'assistant': '{content}; '}


def _messages(talk):
  return {'messages': [{'role': role, 'content': content} for role, content in talk]}


def _share_gpt(talk):
  names = {'user': 'human', 'assistant': 'gpt', 'system': 'system'}
  return {'conversations': [{'from': names[role], 'value': content} for role, content in talk]}


def _write(path, records):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  return str(path)


def _ids(text):
  return [0 if byte == 0 else byte + 2 for byte in text.encode()]


def _by_hand(template):
  """The tokens of the conversation, and their weights."""
  parts = [_ids(text) for text in _BY_HAND[template]]
  weights = np.repeat(np.arange(len(parts)) % 2, [len(ids) for ids in parts])
  return np.concatenate(parts), weights


@pytest.fixture
def config(tmp_path):
  """Makes configs of forty times the same conversation."""
  path = _write(tmp_path / 'a.jsonl', [_messages(_TALK), _share_gpt(_TALK)] * 20)

  def make(loss='answers', template='zephyr', **options):
    source = ChatJsonl(path=path, loss=loss, template=template)
    return DataConfig(**{'source': source, 'context': 40, 'valid_fraction': 0.2} | options)

  return make


@pytest.mark.parametrize('delimiters', [False, True])
@pytest.mark.parametrize('template', _BY_HAND)
def test_tokens_and_weights_of_a_conversation_by_hand(config, tmp_path, template, delimiters):
  tokens, weights = (np.pad(part, int(delimiters)) for part in _by_hand(template))
  if template == 'file':
    (tmp_path / 'formats.json').write_text(json.dumps(_FILE))
    template = str(tmp_path / 'formats.json')

  # One conversation fills a row, so every row equals the text by hand.
  layout = {'context': len(tokens) - 1, 'bos': delimiters, 'eos': delimiters}
  opened = lambda loss: open_data(config(loss, template, **layout))
  for data, expected in ((opened('answers'), weights), (opened('all'), 1 + 0 * weights)):
    for batch in (data.batch(0, 3, 0), data.validation(3)['valid'][0]):
      assert (batch.tokens == tokens[:-1]).all()
      assert (batch.targets == tokens[1:]).all()
      assert (batch.weights == expected[1:]).all()
      assert batch.weights.dtype == np.float32


def test_rows_are_cut_from_the_tokens_and_from_their_weights(config):
  packed, _ = open_packed(config(context=6, eos=False))
  for split in SPLITS:
    stored = packed.rows(split, np.arange(packed.size(split)))
    for rows, part in zip(stored, _by_hand('zephyr')):
      assert_array_equal(rows.ravel(), np.resize(part, rows.size))
    if split == 'train':
      assert packed.counts()['text'][split]['weight'] == stored[1][:, 1:].sum()


def test_a_token_that_is_written_over_has_no_weight(config):
  plain, edited = (
    open_data(config(interventions=edits)).batch(2, 32, 0)
    for edits in ((), (FixedToken(position=3, token=1),))
  )
  assert plain.weights[:, 1].any()
  assert not edited.weights[:, 1].any()
  assert_array_equal(np.delete(plain.weights, 1, 1), np.delete(edited.weights, 1, 1))


def test_weights_are_of_the_content_and_travel_with_a_packed_folder(config):
  answers, everything = open_data(config()), open_data(config('all'))
  assert answers.summary()['content'] != everything.summary()['content']
  folder = open_packed(config())[0].folder
  packed = open_data(config(source=PackedDataset(path=str(folder))))
  assert_same_batches(packed.batch(5, 8, 0), answers.batch(5, 8, 0))


def _sentencepiece(prepend_scheme):
  """A tokenizer with tokens for the role names of ChatML, like many on the Hub."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token='<unk>'))
  model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
  model.decoder = tokenizers.decoders.Metaspace(prepend_scheme=prepend_scheme)
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=200,
    special_tokens=['<unk>', '</s>', '<|im_start|>', '<|im_end|>'],
    show_progress=False,
  )
  texts = [string.printable, 'äNäme Ada. Sure? Yes. user assistant ']
  model.train_from_iterator(texts * 9, trainer)
  return TextTokenizer(model, '', bos_id=1, eos_ids=(1,), pad_id=0)


def _document(template, talk):
  parts = rendered(load_template(template), talk)
  return Document('', '', '', parts)


def test_special_tokens_come_only_from_the_template():
  encoder = _sentencepiece('never')
  document = _document('chatml', [('user', 'Say <|im_end|> and </s>'), ('assistant', 'No.')])
  ids, weights = encode([document], encoder)[0]
  assert list(ids[ids < 4]) == [2, 3, 2, 3]

  # The end token has the same weight as its answer.
  assert ids[weights > 0][-1] == 3
  assert encoder.decode(ids[weights > 0]) == 'No.<|im_end|>'


def test_a_message_is_not_given_a_space_that_it_has_not():
  # Like sentencepiece, this tokenizer puts a space in front of each separately tokenized text.
  encoder, templates = _sentencepiece('always'), ('plain', 'zephyr', 'chatml')
  alone = [encoder.encode('\n'), encoder.encode('a')]
  assert encoder.decode(np.concatenate(alone)) == '\n a'
  talks = [_document(name, _TALK) for name in templates]
  (first, _), *encoded = encode([Document('between', '', ''), *talks], encoder)
  assert_array_equal(first, encoder.encode('between'))
  for (ids, _), name in zip(encoded, templates, strict=True):
    assert encoder.decode(ids) == ''.join(_BY_HAND[name]).replace(_EOS, '</s>')


def test_the_fingerprint_sees_the_template(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [_messages(_TALK)])
  source = ChatJsonl(path=path, template=_write(tmp_path / 'template.json', [_FILE]))
  before = source.fingerprint()
  _write(tmp_path / 'template.json', [_FILE | {'user': 'Question: {content} A '}])
  assert source.fingerprint() != before


def test_the_written_conversations_of_the_library(tmp_path, monkeypatch):
  """Answers are texts of the library, and each package is in only one of the two files."""
  module = '''"""Counts."""

class Counter:
  """Counts hashable things."""

def total(x):
  "The sum."
'''
  modules = [('json/made.py', module), ('abc.py', module)]
  monkeypatch.setattr(make_stdlib_chat, 'modules', lambda: modules)
  monkeypatch.setattr(Stdlib, 'held_out', lambda self, name, fraction: name == 'json')
  make_stdlib_chat.main(str(tmp_path))
  for file, name in (('train', 'abc'), ('valid', 'json.made')):
    lines = (tmp_path / f'{file}.jsonl').read_text().splitlines()
    talks = [json.loads(line)['messages'] for line in lines]
    assert len(talks) == 2
    for *_, question, answer in talks:
      assert name in question['content'] or name in answer['content']
      assert answer['content'].removeprefix(f'{name}.') in module
