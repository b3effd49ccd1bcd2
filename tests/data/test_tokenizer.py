"""Tokenizers: ids, special tokens, errors."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from sink_jax.component import from_string, registry
from sink_jax.data.sources import TextFolder, held_out
from sink_jax.data.tokenizer import Bytes, HuggingFace, Tokenizer, TrainedBpe, load_encoder

_TRICKY = 'a<|endoftext|>b</s> <s> <|padding|> é\n'


def _resolve(tokenizer, tmp_path, source=None):
  return tokenizer.resolve(source, 0.1, tmp_path)


def test_every_tokenizer_is_its_own_config_string():
  for cls in registry(Tokenizer).values():
    assert from_string(Tokenizer, repr(cls())) == cls()


def test_bytes(tmp_path):
  encoder = _resolve(Bytes(), tmp_path)
  ids = encoder.encode('é<|endoftext|>')
  assert ids.dtype == np.int32 and ids[:2].tolist() == [0xC3 + 2, 0xA9 + 2] and ids.min() >= 2
  assert (encoder.vocab_size, encoder.eos_id, encoder.bos_id, encoder.pad_id) == (258, 0, 0, 1)
  assert encoder.decode(encoder.encode(_TRICKY)) == _TRICKY
  assert encoder.encode(''.join(map(chr, range(256)))).max() < 258
  assert encoder.decode([0, 67, 1, 300]) == '<|endoftext|>A<|padding|>\N{REPLACEMENT CHARACTER}'


def _word_level(tmp_path, special):
  words = {w: i for i, w in enumerate([*special, 'hello', 'world', '[UNK]'])}
  tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token='[UNK]'))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(special)
  tokenizer.enable_truncation(2)
  tokenizer.enable_padding(length=9)
  path = tmp_path / 'tokenizer.json'
  tokenizer.save(str(path))
  return path


def test_hugging_face_finds_special_tokens_and_never_parses_them(tmp_path):
  path = _word_level(tmp_path, ['<pad>', '<s>', '</s>'])
  encoder = _resolve(HuggingFace(path=str(path)), tmp_path)
  assert (encoder.eos_id, encoder.bos_id, encoder.pad_id, encoder.vocab_size) == (2, 1, 0, 6)
  # Neither truncated nor padded, and '</s>' in the text is no word that it knows.
  assert encoder.encode('hello world </s> hello').tolist() == [3, 4, 5, 5, 3]
  assert not set(encoder.encode('hello </s> <s> <pad>').tolist()) & {0, 1, 2}
  assert [len(e) for e in encoder.encode_batch(['hello', 'world hello hello'])] == [1, 3]
  assert 'hello' in encoder.decode([3, 2]) and '</s>' in encoder.decode([3, 2])
  folder = _resolve(HuggingFace(path=str(tmp_path), eos='world', bos='hello'), tmp_path)
  assert (folder.eos_id, folder.bos_id) == (4, 3)
  assert folder.fingerprint() != encoder.fingerprint()


def test_no_special_token_is_read_from_text_whatever_its_role(tmp_path, corpus):
  _resolve(TrainedBpe(vocab_size=280), tmp_path, corpus).save(tmp_path)
  model = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  model.add_special_tokens(['<mask>'])
  model.save(str(tmp_path / 'tokenizer.json'))
  encoder = _resolve(HuggingFace(path=str(tmp_path)), tmp_path)
  assert encoder.vocab_size == 281 and len(encoder.encode('a<mask>b')) >= 8
  assert encoder.decode(encoder.encode('a<mask>b')) == 'a<mask>b'


def test_bos_and_padding_fall_back_to_eos(tmp_path):
  encoder = _resolve(HuggingFace(path=str(_word_level(tmp_path, ['x', '<|endoftext|>']))), tmp_path)
  assert (encoder.eos_id, encoder.bos_id, encoder.pad_id) == (1, 1, 1)


def test_hugging_face_errors(tmp_path):
  with pytest.raises(ValueError, match='needs the path'):
    HuggingFace().fingerprint()
  with pytest.raises(ValueError, match='nope.*does not exist'):
    HuggingFace(path=str(tmp_path / 'nope')).fingerprint()
  (tmp_path / 'bad.json').write_text('{}')
  with pytest.raises(ValueError, match=r'bad\.json: not a tokenizer\.json'):
    _resolve(HuggingFace(path=str(tmp_path / 'bad.json')), tmp_path)
  path = str(_word_level(tmp_path, ['<start>', '<stop>']))
  with pytest.raises(ValueError, match=r'no EOS token found.*eos=.*<start>, <stop>'):
    _resolve(HuggingFace(path=path), tmp_path)
  with pytest.raises(ValueError, match="no token '<stopp>'"):
    _resolve(HuggingFace(path=path, eos='<stopp>'), tmp_path)


def test_trained_bpe_is_deterministic_cached_and_reversible(tmp_path, corpus):
  first = _resolve(TrainedBpe(vocab_size=300), tmp_path / 'a', corpus)
  second = _resolve(TrainedBpe(vocab_size=300), tmp_path / 'b', corpus)
  assert first.fingerprint() == second.fingerprint() and first.vocab_size == 300
  assert first.decode(first.encode(_TRICKY)) == _TRICKY
  assert first.encode(_TRICKY).min() >= 2  # neither EOS (0) nor padding (1)
  assert first.decode([0, 1]) == '<|endoftext|><|padding|>'
  text = next(corpus.documents()).text
  assert len(first.encode(text)) < len(text)
  saved, digest = sorted((tmp_path / 'a' / 'tokenizers').iterdir())
  assert digest.name == f'{saved.stem}.sha256' and saved.name in digest.read_text()
  stamp = saved.stat().st_mtime_ns
  _resolve(TrainedBpe(vocab_size=300), tmp_path / 'a', corpus)
  assert saved.stat().st_mtime_ns == stamp


@pytest.mark.parametrize('damage', ['', 'cut', 'flip', 'no digest'])
def test_a_damaged_trained_tokenizer_is_trained_again(tmp_path, corpus, caplog, damage):
  first = _resolve(TrainedBpe(vocab_size=270), tmp_path, corpus)
  saved, digest = sorted((tmp_path / 'tokenizers').iterdir())
  text = saved.read_text()
  if damage == 'no digest':  # as older programs left it
    digest.unlink()
  saved.write_text({'': '', 'cut': text[:-9], 'flip': text.replace(':3,', ':4,', 1),
                    'no digest': text}[damage])
  again = _resolve(TrainedBpe(vocab_size=270), tmp_path, corpus)
  assert again.fingerprint() == first.fingerprint() and saved.read_text() == text
  assert digest.exists() and ('damaged' in caplog.text) == (damage != 'no digest')


def test_trained_bpe_reads_training_documents_only(tmp_path, corpus):
  names = {d.text: d.name for d in corpus.documents()}
  read = list(TrainedBpe()._texts(corpus, 0.3))
  assert 0 < len(read) < len(names)
  assert all(not held_out(names[text], 0.3) for text in read)
  assert sum(map(len, TrainedBpe(characters=500)._texts(corpus, 0.3))) == 500


def test_trained_bpe_of_one_held_out_document(tmp_path):
  folder = tmp_path / 'one'
  folder.mkdir()
  name = next(f'{i}.txt' for i in range(99) if held_out(f'{i}.txt', 0.1))
  (folder / name).write_text('low lower lowest ' * 20)
  encoder = _resolve(TrainedBpe(vocab_size=265), tmp_path, TextFolder(path=str(folder)))
  assert encoder.vocab_size == 265
  # Where there is nothing but held-out text, the limit is that of each document.
  others = [f'{i}.txt' for i in range(99) if held_out(f'{i}.txt', 0.1)][1:3]
  for other in others:
    (folder / other).write_text('newer newest ' * 20)
  read = TrainedBpe(characters=50)._texts(TextFolder(path=str(folder)), 0.1)
  assert [len(text) for text in read] == [50] * 3


@pytest.mark.parametrize('options', [{'vocab_size': 257}, {'characters': 0}])
def test_trained_bpe_options(options):
  with pytest.raises(ValueError, match=next(iter(options))):
    TrainedBpe(**options)


def test_encoders_survive_saving(tmp_path, corpus):
  for tokenizer in (Bytes(), TrainedBpe(vocab_size=280)):
    encoder = _resolve(tokenizer, tmp_path, corpus)
    encoder.save(tmp_path)
    loaded = load_encoder(tmp_path, encoder.eos_id, encoder.bos_id, encoder.pad_id)
    assert loaded.fingerprint() == encoder.fingerprint()
    np.testing.assert_array_equal(loaded.encode(_TRICKY), encoder.encode(_TRICKY))
