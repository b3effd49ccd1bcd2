"""Tokenizer files: tokenizer.json, vocab.json with merges.txt, and the settings beside them."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from tests.fuzz import mutate
from tests.fuzz.inputs import File, Input, Kind

_TEXT = 'Hello <s> world\n é \U0001f600 <|endoftext|>'


def _prepare(folder):
  from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
  )
  names = ['<|endoftext|>', '<s>', '<pad>']
  made = {}
  for kind, model, trainer in (
      ('bpe', models.BPE(), trainers.BpeTrainer(
          vocab_size=300, special_tokens=names, show_progress=False,
          initial_alphabet=pre_tokenizers.ByteLevel.alphabet())),
      ('unigram', models.Unigram(), trainers.UnigramTrainer(
          vocab_size=40, special_tokens=[*names, '<unk>'], show_progress=False,
          unk_token='<unk>')),
      ('words', models.WordLevel(unk_token='<s>'), trainers.WordLevelTrainer(
          vocab_size=40, special_tokens=names, show_progress=False)),
      ('pieces', models.WordPiece(unk_token='<s>'), trainers.WordPieceTrainer(
          vocab_size=60, special_tokens=names, show_progress=False))):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = (pre_tokenizers.ByteLevel() if kind == 'bpe'
                               else pre_tokenizers.Metaspace())
    tokenizer.decoder = decoders.ByteLevel() if kind == 'bpe' else decoders.Metaspace()
    if kind != 'bpe':
      tokenizer.normalizer = normalizers.Sequence(
          [normalizers.NFKC(), normalizers.Replace('x', 'y')])
    tokenizer.train_from_iterator(['hello world, how are you? ' * 9, 'the cat sat'], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single='<s> $A', pair='<s> $A $B', special_tokens=[('<s>', tokenizer.token_to_id('<s>'))])
    made[kind] = json.loads(tokenizer.to_str())
  bpe = made['bpe']['model']
  layouts = {kind: {'tokenizer.json': json.dumps(own).encode(),
                    'tokenizer_config.json': b'{"bos_token": "<s>", "add_bos_token": true}',
                    'special_tokens_map.json': b'{"eos_token": {"content": "<|endoftext|>"}}',
                    'config.json': b'{"bos_token_id": 1}'} for kind, own in made.items()}
  layouts['old'] = {
      'vocab.json': json.dumps(bpe['vocab']).encode(),
      'merges.txt': '\n'.join(' '.join(m) for m in bpe['merges']).encode(),
      'tokenizer_config.json': b'{"bos_token": "<s>", "eos_token": null, "pad_token": 3}',
      'config.json': b'{"bos_token_id": 1}'}
  for base, files in layouts.items():
    input = Input('|0|1|2', base=base)
    input.write(folder, files)
    _run_text(None, input, folder)
    if base != 'old':
      _run(None, input, folder)
  return layouts


def _inputs(prepared):
  kinds = [kind for kind in prepared if kind != 'old']
  special = (st.sampled_from(['', '<s>', 'nothing', '\ud800', 'a', '\0'])
             | st.text(mutate.LETTERS, max_size=3))
  ids = st.sampled_from([0, 1, 2] * 9 + [299, 300, -1, 2**31, 2**32, 2**63, 10**30])
  valid = {kind: json.loads(prepared[kind]['tokenizer.json']) for kind in kinds}
  content = st.one_of([st.tuples(
      st.just(kind), mutate.changed_json([valid[kind]]) | mutate.changed_bytes(
          [prepared[kind]['tokenizer.json']])) for kind in kinds]
      + [st.tuples(st.just('bpe'), _extremes())])
  return st.builds(
      lambda file, *rest: Input('|'.join(map(str, rest)), {'tokenizer.json': File(file[1])},
                                base=file[0]), content, special, ids, ids, ids)


def _extremes():
  return st.sampled_from([
      b'', b'{}', b'[]', b'null', mutate.nested(), b'{"model":' * 1000, b'\xff\xfe', b'\0' * 100,
      b'{"model":{"type":"BPE","vocab":{},"merges":[]}}',
      b'{"model":{"type":"BPE","vocab":{"a":4294967295},"merges":[]}}',
      b'{"model":{"type":"BPE","vocab":{"a":18446744073709551615},"merges":[]}}',
      b'{"model":{"type":"Unigram","vocab":[],"unk_id":9}}',
      b'{"model":{"type":"Unigram","vocab":[["a",1e999]],"unk_id":0}}',
      b'{"model":{"type":"WordLevel","vocab":{"<s>":0},"unk_token":"?"}}'])


def _run(prepared, input, folder):
  from sink_jax.data.tokenizer import HuggingFace, load_encoder
  *special, eos, bos, pad = input.text.rsplit('|', 3)
  refused = None
  try:
    choice = HuggingFace(path=str(folder / 'tokenizer.json'), eos=special[0])
    encoder = choice.resolve(None, 0.05, folder)
    choice.fingerprint()
    _use(encoder, folder)
  except ValueError as error:
    refused = error
  _use(load_encoder(folder, int(eos), int(bos), int(pad)), folder)
  if refused:
    raise refused


def _use(encoder, folder):
  ids = encoder.encode(_TEXT)
  encoder.decode(ids)
  encoder.fingerprint()
  encoder.save(folder)


def _inputs_text(prepared):
  names = ['tokenizer_config.json', 'special_tokens_map.json', 'config.json', 'vocab.json',
           'tokenizer.json']
  settings = [{'bos_token': '<s>', 'add_bos_token': True, 'eos_token': {'content': '</s>'},
               'add_prefix_space': False, 'bos_token_id': 1}]

  def files(base):
    own = [n for n in [*names, 'merges.txt'] if n in prepared[base]]
    one = st.one_of([st.tuples(st.just(name), st.one_of(
        mutate.changed_bytes([prepared[base][name]]), mutate.changed_json(settings),
        *([mutate.changed_json([json.loads(prepared[base][name])])] * 2
          if name.endswith('json') else []), _extremes())) for name in own])
    return st.builds(
        lambda pairs, gone: Input('', {name: File(data) for name, data in pairs},
                                  (gone,) if gone else (), base),
        st.lists(one, min_size=1, max_size=3), st.sampled_from(['', '', '', *own]))

  return st.one_of([files(base) for base in sorted(prepared)])


def _run_text(prepared, input, folder):
  from sink_jax.data.tokenizer import TextTokenizer
  tokenizer = TextTokenizer.from_folder(folder)
  tokenizer.decode(tokenizer.encode(_TEXT, special=True))
  tokenizer.check_vocabulary(2**62)
  try:
    cut = TextTokenizer.from_folder(folder, tokenizer.vocab_size - 1)
  except ValueError:  # of a tokenizer that has nothing to be cut, too
    return
  assert cut.vocab_size < tokenizer.vocab_size and cut.encode(_TEXT).max() < cut.vocab_size


_bases = lambda prepared: prepared
KINDS = {
    'tokenizers': Kind(_prepare, _inputs, _run, share=8, bases=_bases),
    'text_tokenizers': Kind(_prepare, _inputs_text, _run_text, share=8, bases=_bases)}
