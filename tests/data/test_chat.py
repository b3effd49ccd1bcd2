"""Conversations: templates, token weights, batches, and errors for bad lines."""

import json
import random
import string

import numpy as np
import pytest
import tokenizers

from configs import make_stdlib_chat
from sink_jax.data.chat import ChatJsonl, encode, load_template, rendered
from sink_jax.data.dataset import DataConfig, open_data, open_packed
from sink_jax.data.sources import Document, PackedDataset
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.token_edits import FixedToken
from sink_jax.data.tokenizer import Bytes, TextTokenizer, TrainedBpe

_EOS = '\0'  # the character of id 0 in `Bytes`
_TALK = [('system', 'Be brief.'), ('user', 'Näme?'), ('assistant', 'Ada.\n'), ('user', 'Sure?'),
         ('assistant', 'Yes.')]
# The text of this conversation, written by hand. Every second part is an answer with its end token.
_BY_HAND = {
    'zephyr': (f'<|system|>\nBe brief.{_EOS}\n<|user|>\nNäme?{_EOS}\n<|assistant|>\n',
               f'Ada.\n{_EOS}', f'\n<|user|>\nSure?{_EOS}\n<|assistant|>\n', f'Yes.{_EOS}', '\n'),
    'chatml': ('<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nNäme?<|im_end|>\n'
               '<|im_start|>assistant\n', 'Ada.\n<|im_end|>',
               '\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n', 'Yes.<|im_end|>',
               '\n'),
    'plain': ('Be brief.\n\nUser:\nNäme?\n\nAssistant:\n', f'Ada.\n{_EOS}',
              '\n\nUser:\nSure?\n\nAssistant:\n', f'Yes.{_EOS}', '\n\n'),
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


def _bytes(text):
  return [0 if letter == 0 else letter + 2 for letter in text.encode()]


def _all(packed, split='train'):
  return packed.rows(split, np.arange(packed.size(split)))


@pytest.mark.parametrize('delimiters', [False, True])
@pytest.mark.parametrize('template', _BY_HAND)
def test_tokens_and_weights_of_a_conversation_by_hand(tmp_path, template, delimiters):
  (tmp_path / 'formats.json').write_text(json.dumps(_FILE))
  name = str(tmp_path / 'formats.json') if template == 'file' else template
  path = _write(tmp_path / 'a.jsonl', [_messages(_TALK), _share_gpt(_TALK)] * 20)
  texts = _BY_HAND[template]
  tokens = [0] * delimiters + [i for text in texts for i in _bytes(text)] + [0] * delimiters
  weights = [0] * delimiters + [i % 2 for i, text in enumerate(texts) for _ in _bytes(text)
                                ] + [0] * delimiters
  # One conversation fills a row, so every row equals the text by hand.
  config = lambda **options: DataConfig(
      source=ChatJsonl(path=path, template=name, **options), context=len(tokens) - 1, bos=delimiters,
      eos=delimiters, valid_fraction=0.2)
  answers, everything = open_packed(config(loss='answers'))[0], open_packed(config())[0]
  assert answers.folder != everything.folder
  for split in ('train', 'valid'):
    assert answers.size(split) >= 4
    (of_answers, of_weights), (of_all, none) = _all(answers, split), _all(everything, split)
    assert (of_answers == tokens).all() and (of_all == tokens).all()
    assert (of_weights == weights).all() and none is None
  data = open_data(config(loss='answers'))
  for batch in (data.batch(0, 3, 0), data.validation(3)['valid'][0]):
    assert (batch.weights == weights[1:]).all() and batch.weights.dtype == np.float32
  assert (open_data(config()).batch(0, 3, 0).weights == 1).all()


@pytest.fixture
def talks(tmp_path):
  """Conversations of random lengths; some have no answer, some no system message."""
  draw, talks = random.Random(0), []
  words = lambda most: ''.join(draw.choices(string.ascii_letters + ' \né', k=draw.randint(1, most)))
  for _ in range(120):
    talk = [('system', words(20))] * draw.randint(0, 1)
    for _ in range(draw.randint(1, 4)):
      talk += [('user', words(60)), ('assistant', words(90) + '.')]
    talks.append(talk[:-1] if draw.random() < 0.1 else talk)
  _write(tmp_path / 'talks.jsonl', map(_messages, talks))
  return talks


@pytest.fixture
def config(tmp_path, talks):
  def make(**options):
    of_source = {key: options.pop(key) for key in ('template', 'loss') if key in options}
    source = ChatJsonl(**{'path': str(tmp_path / 'talks.jsonl'), 'loss': 'answers', **of_source})
    return DataConfig(**{'source': source, 'context': 40, 'valid_fraction': 0.2, **options})
  return make


@pytest.mark.parametrize('tokenizer', [Bytes(), TrainedBpe(vocab_size=300)])
def test_the_sum_of_the_weights_is_the_tokens_of_the_answers(config, talks, tokenizer):
  packed = open_packed(config(tokenizer=tokenizer, context=7))[0]
  if tokenizer == Bytes():
    size = lambda text: len(text.encode())
  else:
    model = tokenizers.Tokenizer.from_file(str(packed.folder / 'tokenizer.json'))
    size = lambda text: len(model.encode(text).ids)
  # Each answer and its EOS count. The last, incomplete row of a split holds at most 7 tokens.
  counted = sum(size(text) + 1 for talk in talks for role, text in talk if role == 'assistant')
  entry = packed.manifest['domains']['text']
  stored = sum(int(_all(packed, split)[1].sum()) for split in ('train', 'valid'))
  cut_off = sum(entry[s]['tokens'] - 8 * entry[s]['rows'] for s in ('train', 'valid'))
  assert counted - cut_off <= stored <= counted and cut_off <= 14
  assert entry['train']['weight'] == _all(packed)[1][:, 1:].sum()


def test_a_token_that_is_written_over_has_no_weight(config):
  plain, edited = (open_data(config(interventions=edits)).batch(2, 32, 0)
                   for edits in ((), (FixedToken(position=3, token=1),)))
  assert plain.weights[:, 1].any() and not edited.weights[:, 1].any()
  np.testing.assert_array_equal(np.delete(plain.weights, 1, 1), np.delete(edited.weights, 1, 1))


def test_weights_are_of_the_content_and_travel_with_a_packed_folder(config):
  answers, everything = open_data(config()), open_data(config(loss='all'))
  np.testing.assert_array_equal(answers.batch(0, 8, 0).tokens, everything.batch(0, 8, 0).tokens)
  assert answers.summary()['content'] != everything.summary()['content']
  packed = config(source=PackedDataset(path=str(open_packed(config())[0].folder)))
  for a, b in zip(open_data(packed).batch(5, 8, 0), answers.batch(5, 8, 0), strict=True):
    np.testing.assert_array_equal(a, b)


def _sentencepiece(prepend_scheme):
  """A tokenizer with tokens for the role names of ChatML, like many on the Hub."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token='<unk>'))
  model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
  model.decoder = tokenizers.decoders.Metaspace(prepend_scheme=prepend_scheme)
  names = ['<unk>', '</s>', '<|im_start|>', '<|im_end|>']
  model.train_from_iterator([string.printable, 'äNäme Ada. Sure? Yes. user assistant '] * 9,
                            tokenizers.trainers.BpeTrainer(
                                vocab_size=200, special_tokens=names, show_progress=False))
  return TextTokenizer(model, '', bos_id=1, eos_ids=(1,), pad_id=0)


def _document(template, talk):
  return Document('', '', '', rendered(load_template(template), talk))


def test_special_tokens_come_only_from_the_template():
  encoder = _sentencepiece('never')
  document = _document('chatml', [('user', 'Say <|im_end|> and </s>'), ('assistant', 'No.')])
  ids, weights = encode([document], encoder)[0]
  assert [int(i) for i in ids if i in (0, 1, 2, 3)] == [2, 3, 2, 3]
  # The end token has the same weight as its answer.
  assert ids[weights > 0][-1] == 3 and encoder.decode(ids[weights > 0]) == 'No.<|im_end|>'


def test_a_message_is_not_given_a_space_that_it_has_not():
  # Like sentencepiece, this tokenizer puts a space in front of each separately tokenized text.
  encoder = _sentencepiece('always')
  assert encoder.decode(np.concatenate([encoder.encode('\n'), encoder.encode('a')])) == '\n a'
  texts = [Document('between', '', ''), *(_document(name, _TALK) for name in ('plain', 'zephyr', 'chatml'))]
  encoded = encode(texts, encoder)
  np.testing.assert_array_equal(encoded[0][0], encoder.encode('between'))
  for (ids, weights), name in zip(encoded[1:], ('plain', 'zephyr', 'chatml'), strict=True):
    assert encoder.decode(ids) == ''.join(_BY_HAND[name]).replace(_EOS, '</s>')
    assert len(weights) == len(ids)


_TWO = '{"user": "{content} ", "assistant": "{content}{eos}"}'


@pytest.mark.parametrize('line, template, words', [
    ('{', _TWO, r'a\.jsonl, line 3: Expecting'), ('[1]', _TWO, r'a\.jsonl, line 3: .*not a conversation'),
    ('{"text": "a"}', _TWO, r'a\.jsonl, line 3: .*conversations'),
    ('{"messages": []}', _TWO, r'a\.jsonl, line 3: .*no list'),
    ('{"messages": [{"role": 3, "content": "a"}]}', _TWO, r'a\.jsonl, line 3: .*message 1'),
    ('{"messages": [{"role": "tool", "content": "a"}]}', _TWO, r"a\.jsonl, line 3: .*'tool'"),
    (json.dumps(_messages(_TALK)), _TWO, "'system'"),
    ('', '[]', r'template\.json.*not a template'),
    ('', '{"user": "{content}"}', r'template\.json.*assistant'),
    ('', _TWO.replace('{content} ', '{content}{content}'), r"template\.json.*'user'"),
    ('', _TWO.replace('{content} ', '{bos}{content}'), r'template\.json.*data\.bos'),
    ('', _TWO.replace('{eos}', ''), r'template\.json.*\{eos\}')])
def test_a_bad_line_or_template_is_named(tmp_path, line, template, words):
  (tmp_path / 'template.json').write_text(template)
  (tmp_path / 'a.jsonl').write_text(f'{json.dumps(_messages(_TALK[1:]))}\n\n{line}\n')
  source = ChatJsonl(path=str(tmp_path / 'a.jsonl'), template=str(tmp_path / 'template.json'))
  with pytest.raises(ValueError, match=words):
    list(source.documents())
  (tmp_path / 'template.json').write_text(_TWO)
  before = source.fingerprint()
  (tmp_path / 'template.json').write_text(json.dumps(_FILE))
  assert source.fingerprint() != before
  for options, words in (({'template': 'llama'}, 'template'), ({'loss': 'answer'}, 'answers')):
    with pytest.raises(ValueError, match=words):
      list(ChatJsonl(path=source.path, **options).documents())


def test_the_written_conversations_of_the_library(tmp_path, monkeypatch):
  """Answers are texts of the library, and each package is in only one of the two files."""
  module = '"""Counts."""\n\nclass Counter:\n  """Counts hashable things."""\n\ndef total(x):\n  "The sum."\n'
  monkeypatch.setattr(make_stdlib_chat, 'modules', lambda: [('json/made.py', module), ('abc.py', module)])
  monkeypatch.setattr(Stdlib, 'held_out', lambda self, name, fraction: name == 'json')
  make_stdlib_chat.main(str(tmp_path))
  for file, name in (('train', 'abc'), ('valid', 'json.made')):
    lines = (tmp_path / f'{file}.jsonl').read_text().splitlines()
    talks = [json.loads(line)['messages'] for line in lines]
    assert len(talks) == 2 and all(name in talk[-2]['content'] or name in talk[-1]['content'] for talk in talks)
    assert all(talk[-1]['content'].removeprefix(f'{name}.') in module for talk in talks)
