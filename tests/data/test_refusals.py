"""What the room refuses: in one line that names the file or the option, and the remedy."""

import functools
import gzip
import json

import pytest
from backports import zstd

from sink_jax.component import from_string
from sink_jax.data.chat import ChatJsonl
from sink_jax.data.dataset import DataConfig, open_data
from sink_jax.data.sources import HubDataset, Jsonl, PackedDataset, Source, TextFolder
from sink_jax.data.synthetic import BigramBackcopy
from sink_jax.data.token_edits import FixedToken, RandomTokens
from sink_jax.data.tokenizer import Bytes, HuggingFace, TextTokenizer, TrainedBpe
from tests.data.test_gguf_tokenizer import PLAIN, read_gguf
from tests.data.test_tokenizer import byte_level


def _write(folder, files):
  for name, content in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def text(folder, files, source=TextFolder, **options):
  """Opens the data of a folder with these files."""
  _write(folder, files)
  layout = {'context': 16, 'valid_fraction': 0.2}
  open_data(DataConfig(source=source(path=str(folder)), **layout | options))


def task(folder, config_string, **options):
  """Opens the data of a synthetic task."""
  open_data(DataConfig(source=from_string(Source, config_string), **{'context': 64} | options))


def documents(folder, files, source=Jsonl, **options):
  """Reads the documents of a folder with these files."""
  _write(folder, files)
  list(source(path=str(folder), **options).documents())


def chat(folder, line, formats, **options):
  """Reads a file of conversations, one of them this line, with a template."""
  _write(folder, {'a.jsonl': f'{_talk("user")}\n\n{line}\n', 'template.json': formats})
  options = {'template': str(folder / 'template.json')} | options
  list(ChatJsonl(path=str(folder / 'a.jsonl'), **options).documents())


def _talk(role):
  message = {'role': role, 'content': 'Sure? ' * 20}
  return json.dumps({'messages': [message]})


def tokenizer(folder, files):
  """Reads the tokenizer of a folder with these files."""
  _write(folder, files)
  TextTokenizer.from_path(folder)


def gguf(folder, values):
  """Reads the tokenizer of a GGUF file with other metadata; None: without them."""
  values = {key: value for key, value in (PLAIN | values).items() if value is not None}
  read_gguf(folder / 'x.gguf', **values)


def edit(folder, make):
  """Checks an edit of rows of 9 tokens, of 50 ids."""
  make().check(9, 50)


def call(folder, function):
  function(folder)


_POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n'
_LINE = '{"text": "a"}\n'
_UTF16 = _LINE.encode('utf-16')
_GZ = functools.partial(TextFolder, pattern='*.gz')
_LONG = {'a.txt': 'x' * 999}
_TWO = '{"user": "{content} ", "assistant": "{content}{eos}"}'
_SOUND = {'tokenizer.json': byte_level().to_str()}
_LINE_3 = r'a\.jsonl, line 3: '
REFUSALS = {  # by what is done: words of the error, and the arguments
  text: [
    ('too few', {'a.txt': ''}),
    ('data.context', {'a.txt': 'short'}),
    ('no row for', {'a/0.txt': 'x' * 20, 'b/0.txt': 'x' * 20}),
    ("called 'valid'", {'valid/a.txt': 'x' * 99}),
    (
      'no answer',
      {'a.jsonl': f'{_talk("user")}\n' * 9},
      functools.partial(ChatJsonl, loss='answers'),
    ),
    ('not a complete folder of packed data .*data_build', {'a.txt': ''}, PackedDataset),
    ('data.max_tokens=16 must be between', _LONG, {'max_tokens': 16}),
    ('data.max_tokens=1000 must be between', _LONG, {'max_tokens': 1000}),
    ('has no text', _LONG, {'valid_source': BigramBackcopy()}),
  ],
  task: [
    ('context=32 must equal the length 64', 'BigramBackcopy()', {'context': 32}),
    ('max_tokens is for document corpora', 'BigramBackcopy()', {'max_tokens': 100}),
    ('tokenizer is for document corpora', 'BigramBackcopy()', {'tokenizer': TrainedBpe()}),
    ('valid_source is for document', 'BigramBackcopy()', {'valid_source': TextFolder()}),
    ('vocab_size', 'BigramBackcopy(vocab_size=5)'),
    ('length', 'TriggerAveraging(length=2)'),
  ],
  documents: [
    ('pattern', {}, TextFolder),
    ('.jsonl.zst', {}),
    ('HubDataset', {}, HubDataset),
    ('line 2', {'cut.jsonl': _LINE + _LINE[:-4]}),
    ('body, id', {'a.jsonl': '{"body": "x", "id": 3}\n'}),
    # Readers go through io, whose tests have more remedies.
    ('a.txt is .*git lfs pull', {'a.txt': _POINTER}, TextFolder),
    ('a.jsonl.gz is .*git lfs pull', {'a.jsonl.gz': _POINTER}),
    ('a.txt.gz.*iconv -f UTF-16 ', {'a.txt.gz': gzip.compress(_UTF16)}, _GZ),
    ('a.jsonl.zst.*iconv -f UTF-16 ', {'a.jsonl.zst': zstd.compress(_UTF16)}),
    ('byte 2', {'a.txt': b'na\xefve'}, TextFolder),
    ('line 1.*position', {'a.jsonl': b'{"text": "na\xefve"}\n'}),
  ],
  chat: [
    (f'{_LINE_3}Expecting', '{', _TWO),
    (f'{_LINE_3}.*not a conversation', '[1]', _TWO),
    (f'{_LINE_3}.*conversations', _LINE.strip(), _TWO),
    (f'{_LINE_3}.*no list', '{"messages": []}', _TWO),
    (f'{_LINE_3}.*message 1', _talk(3), _TWO),
    (f"{_LINE_3}.*'tool'", _talk('tool'), _TWO),
    ("'system'", _talk('system'), _TWO),
    (r'template\.json.*not a template', '', '[]'),
    (r'template\.json.*assistant', '', '{"user": "{content}"}'),
    (r"template\.json.*'user'", '', _TWO.replace('{content} ', '{content}{content}')),
    (r'template\.json.*data\.bos', '', _TWO.replace('{content} ', '{bos}{content}')),
    (r'template\.json.*\{eos\}', '', _TWO.replace('{eos}', '')),
    ("'llama' is not a template", '', _TWO, {'template': 'llama'}),
    ('answers', '', _TWO, {'loss': 'answer'}),
  ],
  tokenizer: [
    ('sentencepiece', {}),
    ('tokenizer.json', {'tokenizer.json': '{'}),
    ('vocab.json', {'vocab.json': '{', 'merges.txt': ''}),
    ('config.json', _SOUND | {'config.json': '[1]'}),
    ('<b>', _SOUND | {'tokenizer_config.json': '{"bos_token": "<b>"}'}),
    ('digest differs', _SOUND | {'tokenizer_config.json': '{"digest": "0"}'}),
    ('tokenizer.json is .*git lfs pull', {'tokenizer.json': _POINTER}),
    ('tokenizer_config.json is .*git lfs pull', _SOUND | {'tokenizer_config.json': _POINTER}),
    ('vocab.json is .*git lfs pull', {'vocab.json': _POINTER, 'merges.txt': ''}),
    ('merges.txt is .*git lfs pull', {'vocab.json': '{}', 'merges.txt': _POINTER}),
  ],
  gguf: [
    ('model', {'model': 't5'}),
    ('pre', {'pre': 'tekken'}),
    ('tokens', {'tokens': ['a', 'a']}),
    ('tokenizer.ggml.pre', {'pre': None}),
    ('tokenizer.ggml.tokens', {'tokens': None}),
    ('tokenizer.ggml.merges', {'merges': None}),
    ('tokenizer', {'merges': ['a q']}),
    ('bos_token_id', {'bos_token_id': 99}),
    ('bos_token_id', {'bos_token_id': 2**32 - 1, 'add_bos_token': True}),
    ('remove_extra_whitespaces', {'remove_extra_whitespaces': True}),
    ('precompiled_charsmap', {'precompiled_charsmap': 'x'}),
    ('a_new_key', {'a_new_key': 1}),
  ],
  edit: [
    ('RandomTokens', lambda: RandomTokens(first=0)),
    ('RandomTokens', lambda: RandomTokens(first=3, last=2)),
    ('RandomTokens', lambda: RandomTokens(below=2**31)),
    ('FixedToken', lambda: FixedToken(token=-1)),
    ('only 9 tokens', lambda: RandomTokens(last=10)),
    ('only 9 tokens', lambda: FixedToken(position=10)),
    ('only 50 tokens', lambda: FixedToken(token=50)),
  ],
  call: [
    (r'TextFolder\(path=', lambda _: list(TextFolder().documents())),
    ('--config.data.source', lambda _: list(TextFolder(path='/no/such').documents())),
    ('data_build', lambda _: list(Jsonl(path='gs://bucket/a').documents())),
    ('vocab_size', lambda _: TrainedBpe(vocab_size=257)),
    ('length = 3', lambda _: Bytes().open().tokens(['abc', 'c'], 3)),
    ('texts', lambda _: Bytes().open().tokens([])),
    ('force', lambda _: Bytes().open().tokens('a', None, 'always')),
    ('set eos_token', lambda _: TextTokenizer(byte_level(), 'name').eos_id),
    (
      'bos_token in tokenizer_config.json',
      lambda _: TextTokenizer(byte_level(), 'name').before('force'),
    ),
    ('nope', lambda folder: HuggingFace(path=str(folder / 'nope')).fingerprint()),
  ],
}


@pytest.mark.parametrize(
  'function, words, arguments',
  [
    (function, words, arguments)
    for function, cases in REFUSALS.items()
    for words, *arguments in cases
  ],
)
def test_what_is_refused(tmp_path, function, words, arguments):
  options = arguments.pop() if isinstance(arguments[-1], dict) and len(arguments) > 1 else {}
  with pytest.raises(ValueError, match=words) as error:
    function(tmp_path, *arguments, **options)
  message = str(error.value)
  assert '\n' not in message
  if function in (tokenizer, gguf):  # the file is named
    assert str(tmp_path) in message
  if function is documents:
    assert 'damaged' not in message
