"""Tokenizers of GGUF files: their ids follow the rules of llama.cpp."""

import heapq
import json

import numpy as np
import pytest
import tokenizers

from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.gguf import GgufFile
from tests.pretrained import gguf_files

TEXTS = ['The 1st of 1984 years: 12345.678!', 'a  b   c\n\n\t tabs  ', 'naïve café 中文 😀👩‍👧 ok',
         "def f(x):\n    return x**2  # don't", '', ' ', '\n', 'aaaaaaaaaaaaaaaaaaaaa']


@pytest.mark.parametrize('pre, words', [
    ('gpt-2', lambda p: [p.ByteLevel(add_prefix_space=False)]),
    ('smollm', lambda p: [p.Digits(individual_digits=True), p.ByteLevel(add_prefix_space=False)]),
    # The regex of tokenizer.json of Qwen2.5-0.5B.
    ('qwen2', lambda p: [
        p.Split(tokenizers.Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), 'isolated'),
        p.ByteLevel(add_prefix_space=False, use_regex=False)])])
def test_byte_level_tokenizers_keep_their_ids(tmp_path, pre, words):
  whole = tokenizers.Tokenizer(tokenizers.models.BPE())
  whole.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(words(tokenizers.pre_tokenizers))
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=400, special_tokens=['<s>', '</s>'], show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
  whole.train_from_iterator(TEXTS * 3, trainer)
  model = json.loads(whole.to_str())['model']
  tokens = sorted(model['vocab'], key=model['vocab'].get)
  values = {'general.architecture': 'llama', 'tokenizer.ggml.model': 'gpt2',
            'tokenizer.ggml.pre': pre, 'tokenizer.ggml.tokens': tokens,
            'tokenizer.ggml.token_type': [3, 3] + [1] * (len(tokens) - 2),
            'tokenizer.ggml.merges': [' '.join(merge) for merge in model['merges']],
            'tokenizer.ggml.bos_token_id': 0, 'tokenizer.ggml.eos_token_id': 1,
            'tokenizer.ggml.add_bos_token': True}
  made = TextTokenizer.from_path(gguf_files.write(tmp_path / 'x.gguf', values, {}))
  assert made.bos_id == 0 and made.prefix == (0,) and made.eos_ids == (1,)
  for text in TEXTS:
    ids = made.encode(text)
    assert ids == whole.encode(text).ids
    assert made.decode(ids) == text


@pytest.mark.parametrize('pre, ids', [
    ('gpt-2', [16]), ('llama-bpe', [16]), ('smollm', [11, 12]), ('qwen2', [11, 12]),
    ('deepseek-r1-qwen', [11, 12])])
def test_digits_are_merged_only_within_a_word(tmp_path, pre, ids):
  values = {'general.architecture': 'llama', **gguf_files.TOKENIZER, 'tokenizer.ggml.pre': pre}
  for key, more in (('tokens', ['01']), ('token_type', [1]), ('merges', ['0 1'])):
    values[f'tokenizer.ggml.{key}'] = values[f'tokenizer.ggml.{key}'] + more
  made = TextTokenizer.from_path(gguf_files.write(tmp_path / 'x.gguf', values, {}))
  assert made.encode('01') == ids


def by_score(text, tokens, scores, prefix):
  """llama.cpp's rule for sentencepiece: merge the pair whose token has the highest score, leftmost first."""
  ids = {token: i for i, token in enumerate(tokens)}
  parts = list(('▁' * prefix + text).replace(' ', '▁')) if text else []
  while True:
    pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(zip(parts, parts[1:]))
             if a + b in ids]
    if not pairs:
      break
    _, i = heapq.nsmallest(1, pairs)[0]
    parts[i:i + 2] = [parts[i] + parts[i + 1]]
  out = []
  for part in parts:
    out += [ids[part]] if part in ids else [ids[f'<0x{b:02X}>'] for b in part.encode()]
  return out


@pytest.mark.parametrize('prefix', [True, False])
def test_sentencepiece_merges_by_score(tmp_path, prefix):
  rng = np.random.default_rng(0)
  words = sorted({text[i:i + n].replace(' ', '▁') for text in TEXTS[:4] for n in (2, 3, 4)
                  for i in range(len(text) - n + 1)})
  words = [word for word in words if not set(word) & set('中😀')]  # these two are stored as bytes
  letters = sorted(set(''.join(TEXTS).replace(' ', '▁')) - set('中😀'))
  tokens = ['<unk>', '<s>', '</s>', *(f'<0x{i:02X}>' for i in range(256)), *words, *letters]
  types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
  # Longer tokens consist of shorter ones that training merged earlier, so they have lower scores.
  scores = np.zeros(len(tokens))
  scores[259:259 + len(words)] = [-len(word) * 1000 - rng.integers(1000) - i / len(words)
                                  for i, word in enumerate(words)]
  scores[259 + len(words):] = -1e4
  values = {'general.architecture': 'llama', 'tokenizer.ggml.model': 'llama',
            'tokenizer.ggml.tokens': tokens, 'tokenizer.ggml.token_type': types,
            'tokenizer.ggml.scores': scores.astype('f4').tolist(),
            'tokenizer.ggml.bos_token_id': 1, 'tokenizer.ggml.eos_token_id': 2,
            'tokenizer.ggml.unknown_token_id': 0, 'tokenizer.ggml.add_space_prefix': prefix}
  file = GgufFile(gguf_files.write(tmp_path / 'x.gguf', values, {}))
  made = TextTokenizer.from_path(file.path)
  assert made.prefix == (1,)  # the default if the file does not say
  for text in TEXTS:
    ids = made.encode(text)
    assert ids == by_score(text, tokens, file.metadata['tokenizer.ggml.scores'], prefix), text
    assert made.decode(ids) == text


@pytest.mark.parametrize('values', [
    {f'fim_{part}_token_id': 3 for part in ('pre', 'suf', 'mid', 'pad', 'rep', 'sep')},
    {f'{part}_token_id': 99 for part in ('prefix', 'suffix', 'middle', 'image', 'eom')},
    dict(remove_extra_whitespaces=False, add_eos_token=False, add_sep_token=False),
    {f'{part}_token_id': 2**32 - 1 for part in ('bos', 'eot', 'unknown', 'padding', 'fim_pre')}])
def test_keys_that_change_no_ids_are_ignored(tmp_path, values):
  plain = {'general.architecture': 'llama', **gguf_files.TOKENIZER}
  more = {f'tokenizer.ggml.{key}': value for key, value in values.items()}
  expected, made = (TextTokenizer.from_path(gguf_files.write(tmp_path / name, metadata, {}))
                    for name, metadata in (('x.gguf', plain), ('y.gguf', plain | more)))
  assert made.encode('abc 01ab') == expected.encode('abc 01ab') == [14, 15, 11, 12, 13]
  assert made.prefix == expected.prefix == () and made.eos_ids == expected.eos_ids
  assert made.bos_id == (None if values.get('bos_token_id') else expected.bos_id)


@pytest.mark.parametrize('values, said', [
    (dict(model='t5'), 'model'), (dict(pre='tekken'), 'pre'), (dict(tokens=['a', 'a']), 'tokens'),
    (dict(pre=None), 'tokenizer.ggml.pre'), (dict(tokens=None), 'tokenizer.ggml.tokens'),
    (dict(merges=None), 'tokenizer.ggml.merges'), (dict(merges=['a q']), 'tokenizer'),
    (dict(bos_token_id=99), 'bos_token_id'),
    (dict(bos_token_id=2**32 - 1, add_bos_token=True), 'bos_token_id'),
    (dict(remove_extra_whitespaces=True), 'remove_extra_whitespaces'),
    (dict(precompiled_charsmap='x'), 'precompiled_charsmap'), (dict(a_new_key=1), 'a_new_key')])
def test_tokenizers_that_are_not_defined_are_refused(tmp_path, values, said):
  values = {'general.architecture': 'llama', **gguf_files.TOKENIZER,
            **{f'tokenizer.ggml.{key}': value for key, value in values.items()}}
  values = {key: value for key, value in values.items() if value is not None}
  path = gguf_files.write(tmp_path / 'x.gguf', values, {})
  with pytest.raises(ValueError, match=said) as error:
    TextTokenizer.from_path(path)
  assert str(path) in str(error.value)
