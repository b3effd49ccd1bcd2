"""Conversations: templates, weights of tokens, chunk edges, batches, and what bad lines get."""

import json
import random
import string

import numpy as np
import pytest
import tokenizers

from sink_jax.data import stdlib, stdlib_questions
from sink_jax.data.chat import ChatJsonl, StdlibChat
from sink_jax.data.chat_template import Message, load_template, rendered
from sink_jax.data.dataset import DataConfig, open_data
from sink_jax.data.sources import Document, PackedDataset, held_out
from sink_jax.data.part_encoding import answer_weights, encoded
from sink_jax.data.prepare import open_cache
from sink_jax.data.token_edits import FixedToken
from sink_jax.data.tokenizer import Bytes, FileEncoder, TrainedBpe

_EOS = '\0'  # stands for the id 0 of bytes below
_TALK = [('system', 'Be brief.'), ('user', 'Näme?'), ('assistant', 'Ada.\n'), ('user', 'Sure?'),
         ('assistant', 'Yes.')]
# The text of this conversation, by hand. What is underlined is an answer or ends one.
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


def _whole(tables, split='train'):
  return tables[split].take(np.arange(len(tables[split])))


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
  # One conversation fills a chunk, so that every chunk is the one by hand.
  options = Bytes(), len(tokens) - 1, delimiters, delimiters, 0.2
  answers = open_cache(ChatJsonl(path=path, template=name, loss='answers'), *options)
  everything = open_cache(ChatJsonl(path=path, template=name), *options)
  assert answers.folder != everything.folder and everything.weight_tables is None
  for split in ('train', 'valid'):
    assert len(answers.tables[split]) >= 4
    for cache in (answers, everything):
      assert (_whole(cache.tables, split) == tokens).all()
    assert (_whole(answers.weight_tables, split) == weights).all()
  counts = answers.manifest['domains']['text']['chat']
  assert counts == {'conversations': 40, 'turns': 200, 'answers': 80, 'long': 0, 'dropped': 0,
                    'turns_cut': 0, 'templates_cut': 0}
  data = open_data(DataConfig(source=ChatJsonl(path=path, template=name, loss='answers'),
                              context=len(tokens) - 1, bos=delimiters, eos=delimiters,
                              valid_fraction=0.2))
  for batch in (data.batch(0, 3, 0), data.validation(3)['valid'][0]):
    assert (batch.weights == weights[1:]).all() and batch.weights.dtype == np.float32
  plain = open_data(DataConfig(source=ChatJsonl(path=path, template=name), bos=delimiters,
                               context=len(tokens) - 1, eos=delimiters, valid_fraction=0.2))
  assert (plain.batch(0, 3, 0).weights == 1).all()


def _random_talks(count, seed=0):
  """Conversations of random lengths; some have no answer, some no system message."""
  draw = random.Random(seed)
  letters = string.ascii_letters + ' \né'
  words = lambda most: ''.join(draw.choices(letters, k=draw.randint(1, most)))
  talks = []
  for _ in range(count):
    talk = [('system', words(20))] * draw.randint(0, 1)
    for _ in range(draw.randint(1, 4)):
      talk += [('user', words(60)), ('assistant', words(90) + '.')]
    talks.append(talk[:-1] if draw.random() < 0.1 else talk)
  return talks


@pytest.fixture
def talks(tmp_path):
  talks = _random_talks(120)
  _write(tmp_path / 'talks.jsonl', map(_messages, talks))
  return talks


@pytest.fixture
def config(tmp_path, talks):
  def make(**options):
    of_source = {key: options.pop(key) for key in ('template', 'loss', 'long') if key in options}
    source = ChatJsonl(**{'path': str(tmp_path / 'talks.jsonl'), 'loss': 'answers', **of_source})
    return DataConfig(**{'source': source, 'context': 40, 'valid_fraction': 0.2, **options})
  return make


@pytest.mark.parametrize('tokenizer', [Bytes(), TrainedBpe(vocab_size=300)])
def test_the_sum_of_the_weights_is_the_tokens_of_the_answers(config, talks, tokenizer):
  cache = open_data(config(tokenizer=tokenizer, context=7))._cache
  if tokenizer == Bytes():
    size = lambda text: len(text.encode())
  else:
    model = tokenizers.Tokenizer.from_file(str(cache.folder / 'tokenizer.json'))
    size = lambda text: len(model.encode(text).ids)
  # Each answer and its EOS; the last, incomplete chunk of a split holds at most 7 tokens.
  counted = sum(size(text) + 1 for talk in talks for role, text in talk if role == 'assistant')
  entry = cache.manifest['domains']['text']
  stored = sum(int(_whole(cache.weight_tables, split).sum()) for split in ('train', 'valid'))
  cut_off = sum(entry[s]['tokens'] - 8 * entry[s]['chunks'] for s in ('train', 'valid'))
  assert counted - cut_off <= stored <= counted and cut_off <= 14
  assert stored == sum(entry[split]['weights']['sum'] for split in ('train', 'valid'))
  predicted = int(_whole(cache.weight_tables)[:, 1:].sum())
  assert entry['train']['weights']['predicted'] == predicted < entry['train']['weights']['sum']


@pytest.mark.parametrize('long', ['parts', 'drop'])
@pytest.mark.parametrize('context', [90, 150])
def test_what_the_edges_of_chunks_cut_is_counted(config, talks, long, context):
  data = open_data(config(long=long, context=context, loss='all'))
  entry, = data.summary()['domains'].values()  # what data.json holds
  chunk, at = context + 1, {'train': 0, 'valid': 0}
  expected = dict.fromkeys(('conversations', 'turns', 'answers', 'long', 'dropped', 'turns_cut',
                            'templates_cut'), 0)
  for number, talk in enumerate(talks, 1):
    # A letter for each token: m where the message wrote it, t where the template did.
    marks = [mark for role, text in talk
             for mark in ['t' * len(f'<|{role}|>\n') + 'm' * len(text.encode()) + 't' * 2]]
    expected['long'] += (is_long := sum(map(len, marks)) + 1 > chunk)
    if is_long and long == 'drop':
      expected['dropped'] += 1
      continue
    split = 'valid' if held_out(f'talks.jsonl:{number}', 0.2) else 'train'
    expected['conversations'] += 1
    expected['turns'] += len(talk)
    expected['answers'] += sum(role == 'assistant' for role, _ in talk)
    for mark in marks:
      first = at[split]
      cuts = [i for i in range(1, len(mark)) if (first + i) % chunk == 0]
      expected['turns_cut'] += bool(cuts)
      expected['templates_cut'] += any(mark[i - 1:i + 1] == 'tt' for i in cuts)
      at[split] += len(mark)
    at[split] += 1  # the EOS behind a document
  assert entry['chat'] == expected
  assert expected['turns_cut'] > expected['templates_cut'] > 0 < expected['long'] < 120
  said = ' '.join(data.remarks())
  assert f'{expected["long"]} of 120 conversations are longer than a chunk' in said
  assert ('left out' if long == 'drop' else 'kept in parts') in said
  assert f'{expected["turns_cut"]} of {expected["turns"]} turns go on in the next chunk' in said


def test_dropping_every_conversation_says_so(config):
  with pytest.raises(ValueError, match=r"120 longer ones were dropped, long='parts' keeps them"):
    open_data(config(long='drop', context=4))


@pytest.mark.parametrize('hosts', [1, 2, 8])
def test_batches_and_weights_are_those_of_one_host(config, hosts):
  data = open_data(config())
  for whole, share in [(data.batch(999, 8, 3), lambda rows: next(data.batches(999, 8, 3, rows))),
                       (data.validation(8)['valid'][-1 + len(data.validation(8)['valid'])],
                        lambda rows: list(data.validation(8, rows=rows)['valid'])[-1])]:
    parts = [share(rows) for rows in np.array_split(np.arange(8), hosts)]
    for field in whole._fields:
      np.testing.assert_array_equal(np.concatenate([getattr(part, field) for part in parts]),
                                    getattr(whole, field))
    assert 0 < whole.weights.mean() < 1


def test_validation_leaves_out_chunks_without_an_answer(config):
  data = open_data(config(context=15))
  weights = _whole(data._cache.weight_tables, 'valid')
  answered = weights[:, 1:].any(1)
  assert not answered.all()
  # A batch of the first few rows has a mean for certain, and the mean over all is the same.
  batches = list(data.validation(4)['valid'])
  assert all(batch.weights[batch.weights.any(1)].any(1).all() for batch in batches)
  assert all(batch.weights.sum() for batch in batches)
  assert sum(batch.weights.sum() for batch in batches) == weights[:, 1:].sum()


def test_a_token_that_is_written_over_has_no_weight(config):
  plain, edited = (open_data(config(interventions=edits))
                   for edits in ((), (FixedToken(position=3, token=1),)))
  before, after = plain.batch(2, 32, 0), edited.batch(2, 32, 0)
  assert before.weights[:, 1].any() and not after.weights[:, 1].any()
  np.testing.assert_array_equal(np.delete(before.weights, 1, 1), np.delete(after.weights, 1, 1))
  assert any('overwrites tokens' in line for line in edited.remarks())


def test_weights_are_of_the_content_and_travel_with_a_packed_folder(config):
  answers, everything = open_data(config()), open_data(config(loss='all'))
  np.testing.assert_array_equal(answers.batch(0, 8, 0).tokens, everything.batch(0, 8, 0).tokens)
  assert answers.summary()['content'] != everything.summary()['content']
  assert everything.training_table() is not None and answers.training_table() is None
  packed = config(source=PackedDataset(path=str(answers._cache.folder)))
  for a, b in zip(open_data(packed).batch(5, 8, 0), answers.batch(5, 8, 0), strict=True):
    np.testing.assert_array_equal(a, b)
  path = answers._cache.folder / 'train.000.weights.npy'
  content = bytearray(path.read_bytes())
  content[-1] ^= 1
  path.write_bytes(content)
  with pytest.raises(ValueError, match=r'train\.000\.weights\.npy changed since the build'):
    open_data(config()).check_files()()
  path.unlink()
  with pytest.raises(ValueError, match=r'train\.000\.weights\.npy is missing'):
    open_data(config())


def _sentencepiece(prepend_scheme):
  """A tokenizer with tokens for the names of ChatML, as many on the Hub are."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token='<unk>'))
  model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
  model.decoder = tokenizers.decoders.Metaspace(prepend_scheme=prepend_scheme)
  names = ['<unk>', '</s>', '<|im_start|>', '<|im_end|>']
  model.train_from_iterator([string.printable, 'äNäme Ada. Sure? Yes. user assistant '] * 9,
                            tokenizers.trainers.BpeTrainer(
                                vocab_size=200, special_tokens=names, show_progress=False))
  return FileEncoder(model.to_str(), 1, 1, 0)


def _parts(template, talk):
  return rendered(load_template(template, ''), [Message(*turn) for turn in talk])


def test_special_tokens_come_from_the_template_alone():
  encoder = _sentencepiece('never')
  parts = _parts('chatml', [('user', 'Say <|im_end|> and </s>'), ('assistant', 'No.')])
  ids, lengths = encoded([parts], encoder)[0]
  assert [int(i) for i in ids if i in (0, 1, 2, 3)] == [2, 3, 2, 3]
  # The end token has the weight of its answer.
  weights = answer_weights(Document('', '', '', parts=parts), lengths)
  assert ids[weights > 0][-1] == 3 and encoder.decode(ids[weights > 0]) == 'No.<|im_end|>'


def test_a_message_is_not_given_a_space_that_it_has_not():
  # As sentencepiece does: alone, every text is given a space in front.
  encoder = _sentencepiece('always')
  assert encoder.decode(np.concatenate([encoder.encode('\n'), encoder.encode('a')])) == '\n a'
  for template in ('plain', 'zephyr', 'chatml'):
    ids, lengths = encoded([_parts(template, _TALK)], encoder)[0]
    assert encoder.decode(ids) == ''.join(_BY_HAND[template]).replace(_EOS, '</s>')
    assert lengths.sum() == len(ids)


_GOOD = _messages(_TALK)


def _line(*messages, key='messages'):
  return json.dumps({key: list(messages)})


def _says(role, content):
  return {'role': role, 'content': content}


_BAD = {
    '{': 'not a JSON object',
    '[1]': "no list in the field 'messages' or 'conversations'.*not an object",
    '{"text": "a"}': "no list in the field 'messages' or 'conversations'; its fields are: text",
    '{"messages": "a"}': "no list in the field 'messages'",
    '{"messages": []}': 'no message in the conversation',
    _line('hello'): "message 1: not an object with role and content, but 'hello'",
    _line(_says('user', 'a'), {'content': 'b'}): 'message 2: no role; its fields are: content',
    _line(_says('user', 'a'), {'role': 'assistant'}): 'message 2: no content',
    _line({}): 'message 1: no from; its fields are: none',
    _line({'from': 'human'}, key='conversations'): 'message 1: no value',
    _line({'role': 3, 'content': 'a'}): 'message 1: role must be a string, not 3',
    _line(_says('user', None)): 'message 1: content must be a string, not None',
    _line(_says('user', [{'type': 'text'}])): 'message 1: content must be a string',
    _line(_says('tool', 'a')): "the role 'tool' is unknown; roles are system, user, assistant",
    _line(_says('user', 'a'), _says('assistant', ' \n')): 'message 2: an empty answer',
    _line(_says('user', 'a'), _says('assistant', 'b'), _says('assistant', 'c')):
        'message 3: a second answer in a row',
}


@pytest.mark.parametrize('line', _BAD)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, line):
  file = tmp_path / 'a.jsonl'
  file.write_text(f'{json.dumps(_GOOD)}\n\n{line}\n')
  with pytest.raises(ValueError, match=rf'a\.jsonl, line 3.*{_BAD[line]}') as caught:
    open_data(DataConfig(source=ChatJsonl(path=str(file))))
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('count', [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_each_hostile_line_gets_a_message(tmp_path, count):
  draw, file = random.Random(count), tmp_path / 'a.jsonl'
  good = json.dumps(_GOOD)
  junk = [None, True, 0, -1.5, 10**400, [], {}, [[]], {'a': 1}, [None] * 9]
  roles = ['', 'System', 'tool', 'ASSISTANT', 'user ', '\0', '\ud800', 'a' * 10**4, "'", '\u2028']

  def broken(talk):
    turn = draw.randrange(len(talk))
    message = talk[turn]
    kind = draw.randrange(8)
    if kind == 0:
      message['role'] = draw.choice(roles + junk)
    elif kind == 1:
      message['content'] = draw.choice(junk)
    elif kind == 2:
      del message[draw.choice(list(message))]
    elif kind == 3:
      talk[turn] = draw.choice(['', 'text'] + junk)
    elif kind == 4:
      talk[turn:turn] = [_says('assistant', draw.choice('ab'))] * 2
    elif kind == 5:
      talk.append(_says('user', 'a'))
      talk.append(_says('assistant', draw.choice(['', ' ', '\n\t', '\u3000'])))
    elif kind == 6:
      return draw.choice(['', 'text'] + junk)
    else:
      talk.clear()
    return talk

  for number in range(count):
    record = json.loads(good)
    record['messages'] = broken(record['messages'])
    line = json.dumps(record).encode()
    if number % 4 == 0:  # cut off, or a byte that no UTF-8 has
      line = draw.choice([good.encode()[:draw.randrange(1, len(good))],
                          good.encode().replace(b'Be', b'\xff'), b'[' * 10**5, line[:-1]])
    before = draw.randrange(3)
    file.write_bytes((good + '\n').encode() * before + line + b'\n' + good.encode())
    with pytest.raises(ValueError, match=rf'^{file}, line {before + 1}[,:]') as caught:
      list(ChatJsonl(path=str(file)).documents())
    assert len(str(caught.value)) < 600 and str(caught.value).isprintable(), line[:99]


@pytest.mark.parametrize('records,said', [
    ([], 'no answer in its 0 conversations'),
    ([_messages(_TALK[:2]), _messages(_TALK[1:2])], 'no answer in its 2 conversations')])
def test_a_file_without_an_answer_is_refused(tmp_path, records, said):
  _write(tmp_path / 'a.jsonl', [_GOOD])
  _write(tmp_path / 'b.jsonl', records)
  source = ChatJsonl(path=str(tmp_path))
  with pytest.raises(ValueError, match=rf'b\.jsonl has {said}'):
    list(source.documents())
  with pytest.raises(ValueError, match=rf'b\.jsonl has {said}'):  # whatever was done before
    list(source.documents_from(1 + len(records)))


def test_validation_text_without_an_answer_is_refused(tmp_path, config):
  path = _write(tmp_path / 'late.jsonl', [_messages(_TALK[:2])] * 30 + [_GOOD])
  with pytest.raises(ValueError, match="no answer in its text for valid.*loss='all'"):
    # Without delimiters, the last tokens of the stream are in no chunk.
    open_data(config(valid_source=ChatJsonl(path=path, loss='answers'), context=200))


@pytest.mark.parametrize('content,match', [
    ('{', 'not a template.*Jinja templates are not executed'),
    ('[]', 'not a template, since it holds list'),
    ('{"user": "{content}"}', "no format for 'assistant'"),
    ('{"user": "{content}", "assistant": "{content}{eos}", "tool": ""}', "'tool'"),
    ('{"user": "{content}", "assistant": "A: {eos}"}', "'assistant'.*where the answer goes"),
    ('{"user": "{content}{content}", "assistant": "{content}{eos}"}', "'user'.*once"),
    ('{"user": 3, "assistant": "{content}{eos}"}', "format of 'user' must be a string, not 3"),
    ('{"user": "{bos}{content}", "assistant": "{content}{eos}"}', 'holds {bos}; only'),
    ('{"user": "{content}", "assistant": "A: {content}"}', 'could not learn to end an answer')])
def test_a_bad_template_is_named(tmp_path, talks, content, match):
  file = tmp_path / 'template.json'
  file.write_text(content)
  source = ChatJsonl(path=str(tmp_path / 'talks.jsonl'), template=str(file))
  with pytest.raises(ValueError, match=rf'template\.json: .*{match}'):
    open_data(DataConfig(source=source))


def test_other_bad_options(tmp_path, talks):
  path = str(tmp_path / 'talks.jsonl')
  for source, match in ((ChatJsonl(path=path, template='llama'), 'zephyr, chatml, plain'),
                        (ChatJsonl(), 'needs the path'),
                        (ChatJsonl(path=str(tmp_path / 'no')), 'does not exist')):
    with pytest.raises(ValueError, match=match):
      open_data(DataConfig(source=source))
  (tmp_path / 't.json').write_text('{"user": "{content} ", "assistant": "{content}{eos}"}')
  _write(tmp_path / 'a.jsonl', [_messages(_TALK[1:]), _GOOD])
  with pytest.raises(ValueError, match=r"a\.jsonl, line 2: a message of 'system'.*t\.json"):
    open_data(DataConfig(source=ChatJsonl(path=str(tmp_path / 'a.jsonl'),
                                          template=str(tmp_path / 't.json'))))
  for options, match in (({'loss': 'answer'}, "'all' tokens or 'answers'"),
                         ({'long': 'cut'}, "kept in 'parts'"), ({'template': ''}, 'choose zephyr')):
    for kind in (ChatJsonl, StdlibChat):
      with pytest.raises(ValueError, match=match):
        kind(**options)
  with pytest.raises(ValueError, match='max_files'):
    StdlibChat(max_files=-1)


def test_a_changed_template_is_another_cache(tmp_path, talks):
  source = ChatJsonl(path=str(tmp_path / 'talks.jsonl'), template=str(tmp_path / 'formats.json'))
  fingerprints = []
  for formats in (_FILE, _FILE | {'user': '{content}\n'}):
    (tmp_path / 'formats.json').write_text(json.dumps(formats))
    fingerprints.append(source.fingerprint())
  assert len(set(fingerprints)) == 2


_MODULE = '''"""Counts.

More of it."""

class Counter:
  """Counts hashable things."""

  def add(self, item, *more, n=1):
    """Count an item.

    Twice, if it must be.
    """
    self[item] += n

  def _hidden(self):
    """Not shown."""

def total(counter):
  "The sum."
\x0c
def undocumented():
  pass
'''


_ADD = ('def add(self, item, *more, n=1):\n  """Count an item.\n\n  Twice, if it must be.\n  """\n'
        '  self[item] += n')


def test_questions_about_a_module_have_their_answers_in_its_text():
  made = list(stdlib_questions.conversations('a/counts.py', _MODULE))
  # What the hash of each name chooses, in every version of Python.
  assert [[message.content for message in messages] for messages in made] == [
      ['Which classes does a.counts define?', 'Counter',
       'Which functions does a.counts define?', 'total, undocumented'],
      ['You explain Python to somebody who knows another language.',
       'What is the class a.counts.Counter?', 'Counts hashable things.',
       'Which methods does a.counts.Counter have?', 'add',
       'How is a.counts.Counter written?',
       _MODULE[_MODULE.index('class'):_MODULE.index('\n\ndef')]],
      ['Which arguments does a.counts.Counter.add take?', 'item, *more, n',
       'How is a.counts.Counter.add written?', _ADD],
      ['Which arguments does a.counts.total take?', 'counter']]
  assert [[message.role for message in messages] for messages in made] == [
      ['user', 'assistant'] * 2, ['system', *['user', 'assistant'] * 3], ['user', 'assistant'] * 2,
      ['user', 'assistant']]


def test_stdlib_chat_is_the_same_whenever_it_is_read_and_split_by_module():
  source = StdlibChat(max_files=60)
  documents = list(source.documents())
  assert documents[7:] == list(source.documents_from(7)) and len(documents) > 200
  modules = {document.name for document in documents}
  held = {name for name in modules if source.held_out(name, 0.1)}
  library = stdlib.Stdlib(split='content', max_files=60)
  assert held == {name for name in modules if library.held_out(name, 0.1)} and 0 < len(held) < 30
  count = lambda document: len({p.turn for p in document.parts if p.is_answer})
  assert {count(document) for document in documents} == {1, 2, 3}
  systems = sum(document.text.startswith('<|system|>') for document in documents)
  assert 0.2 < systems / len(documents) < 0.45
  assert all(answer.strip() for d in documents for answer, _, is_answer, is_template in d.parts
             if is_answer and not is_template)
  for question in ('What is the module ', 'Which functions does ', 'Name the classes of the module ',
                   'What does the function ', 'What is the class ', ' is documented like this: ',
                   'Which methods does ', 'What can I give to ', 'Show me the source of the '):
    assert any(question in document.text for document in documents), question
