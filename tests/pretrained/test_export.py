"""Training runs as checkpoints: the way back gives the same run, and refusals say why."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers

import sink_jax as sj
from sink_jax.attention.mask import Causal, Window
from sink_jax.data.sources import TextFolder
from sink_jax.data.tokenizer import Bytes, TextTokenizer, TrainedBpe
from sink_jax.models.config import Layer
from sink_jax.pretrained.export import export_checkpoint, write_tokenizer
from sink_jax.pretrained.files import INDEX, Checkpoint
from sink_jax.pretrained.target import masks_of, positions_of
from sink_jax.train.loop import train
from tests.random_params import random_params
from tests.train import runs

TINY = dict(layers=3, d_model=16, heads=4, ffn_hidden=24, vocab_size=11, dtype='float32')
TEXTS = ['Hello, world!\n\tdéjà vu 😀', 'def f(x):\n  return "<0x41>"', '']


def run_of(**options):
  config = sj.ModelConfig(**TINY | options)
  return sj.Run(config, random_params(config), 'ours', 5)


@pytest.mark.parametrize('options', [
    {}, dict(kv_heads=2, norm_eps=1e-6), dict(tied=True, head_dim=6),
    dict(attention=sj.AttentionSpec(mask='Window(size=4)', position='Rope(base=500.0)')),
    dict(attention=sj.AttentionSpec(position='Rope(factor=2.0)')),
    dict(biases=('qkv', 'out', 'ffn')),
    dict(biases=('qkv', 'out'), attention=sj.AttentionSpec(qk_norm='QKNorm(eps=1e-5)')),
    dict(attention=sj.AttentionSpec(qk_norm='QKNorm(eps=1e-5)', mask='Window(size=4)'),
         pattern=(Layer(mask=Causal()), Layer(), Layer())),
    dict(biases=('qkv', 'out', 'ffn'), tied=True, attention=sj.AttentionSpec(
        kv_bias='SinkLogit()', position='Nope()'), pattern=(
            Layer(), Layer(mask=Window(size=4)), Layer(position=sj.Rope(base=500.0))))],
    ids=['llama', 'grouped', 'tied', 'mistral', 'linear', 'biases', 'qwen3', 'qwen3_window',
         'granite_swa'])
def test_an_exported_run_comes_back(tmp_path, options):
  run = run_of(**options)
  hf = export_checkpoint(run, tmp_path / 'out', context=32).hf
  assert json.loads((tmp_path / 'out' / 'config.json').read_text()) == hf
  assert hf['max_position_embeddings'] == 32
  back = sj.load_pretrained(tmp_path / 'out')
  # The importer gives a pattern what its first block has, and overrides it in the others.
  assert masks_of(back.config) == masks_of(run.config)
  assert positions_of(back.config) == positions_of(run.config)
  if len(run.config.pattern) == 1:
    assert back.config == run.config
  jax.tree.map(np.testing.assert_array_equal, back.params, run.params)


def test_bfloat16(tmp_path):
  run = run_of()
  assert export_checkpoint(run, tmp_path, dtype='bfloat16').hf['torch_dtype'] == 'bfloat16'
  assert {entry.dtype for entry in Checkpoint(tmp_path).entries.values()} == {'BF16'}
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.asarray(y).astype('bfloat16')),
               sj.load_pretrained(tmp_path, dtype='bfloat16').params, run.params)
  with pytest.raises(ValueError, match="'float16'; choices: float32, bfloat16"):
    export_checkpoint(run, tmp_path / 'other', dtype='float16')


def test_several_files(tmp_path):
  run, limit = run_of(), 4000
  export_checkpoint(run, tmp_path, shard_bytes=limit)
  index = json.loads((tmp_path / INDEX).read_text())
  assert index['metadata']['total_size'] == 4 * sum(x.size for x in jax.tree.leaves(run.params))
  files = sorted(set(index['weight_map'].values()))
  assert len(files) > 2 and files[0] == f'model-00001-of-{len(files):05}.safetensors'
  for file in files:
    assert sum(4 * np.prod(entry.shape) for entry in Checkpoint(tmp_path).entries.values()
               if entry.file == file) <= limit
  jax.tree.map(np.testing.assert_array_equal, sj.load_pretrained(tmp_path).params, run.params)


def test_nothing_is_overwritten(tmp_path):
  export_checkpoint(run_of(), tmp_path)
  with pytest.raises(ValueError, match='already holds config.json'):
    export_checkpoint(run_of(), tmp_path)
  (tmp_path / 'config.json').unlink()
  with pytest.raises(ValueError, match='already holds model.safetensors'):
    export_checkpoint(run_of(), tmp_path)


def spec(**components):
  return dict(attention=sj.AttentionSpec(**components))


@pytest.mark.parametrize('options, part', [
    (spec(similarity='Sigmoid()', normalizer='Unnormalized()'), 'similarity = Sigmoid'),
    (spec(position='Alibi()'), 'position = Alibi'),
    (spec(position='Rope(fraction=0.5)'), 'position = Rope'),
    (spec(position='Llama3Rope()'), 'position = Llama3Rope'),
    (spec(mask='Prefix()'), 'mask = Prefix'), (spec(kv_bias='KBias()'), 'kv_bias = KBias'),
    (spec(temperature='LogLength()'), 'temperature = LogLength'),
    (spec(value='ValueResidual()'), 'value = ValueResidual'),
    (spec(head='ElementGate()'), 'head = ElementGate'),
    (spec(qk_norm='QKNorm(eps=0.0)'), 'qk_norm = QKNorm'), (dict(ffn='gelu'), "ffn = 'gelu'"),
    (dict(norm='layernorm'), "norm = 'layernorm'"), (dict(norm='single'), "norm = 'single'"),
    (dict(norm_location='post'), "norm_location = 'post'"),
    (dict(logit_cap=30.0), 'logit_cap = 30.0'), (spec(similarity='CappedExp()'), 'similarity = CappedExp'),
    (dict(combine_heads='add'), "combine_heads = 'add'"), (dict(sink_tokens=1), 'sink_tokens = 1'),
    (dict(biases=('qkv',)), 'biases'), (dict(biases=('unembed',)), 'biases'),
    (dict(biases=('ffn',)) | spec(mask='Window()'), 'mistral has no model.biases'),
    (dict(pattern=(Layer(mask=Window(size=2)), Layer(), Layer())), 'pattern'),
    (dict(pattern=(Layer(position=sj.Rope(base=5.0)), Layer(), Layer())), 'pattern'),
    (dict(embedding_dim=8), 'embedding_dim = 8'),
    (dict(parallel_residual=True), 'parallel_residual'),
    (dict(vocab_size=0, input_features=4, output_features=4), 'input_features = 4')])
def test_what_has_no_counterpart_is_named_and_nothing_is_written(tmp_path, options, part):
  config = sj.ModelConfig(**TINY | options)
  with pytest.raises(ValueError, match=f'{part}.*no counterpart|no counterpart.*{part}'):
    export_checkpoint(sj.Run(config, {}), tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def read_back(folder, texts):
  import tokenizers
  whole = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  ids = [e.ids for e in whole.encode_batch(texts, add_special_tokens=False)]
  assert [whole.decode(own) for own in ids] == texts
  return whole, ids


def test_bytes_keep_their_ids(tmp_path):
  ids = write_tokenizer(Bytes().open(), tmp_path, context=32)
  assert ids == dict(bos_token_id=0, eos_token_id=0, pad_token_id=1)
  whole, got = read_back(tmp_path, TEXTS)
  assert got == Bytes().open().encode_batch(TEXTS)
  assert whole.get_vocab_size() == 258 and whole.encode('<|endoftext|>').ids == [0]
  about = json.loads((tmp_path / 'tokenizer_config.json').read_text())
  assert about['eos_token'] == '<|endoftext|>' and about['model_max_length'] == 32


@pytest.mark.full  # the README's example is run by its own test
def test_the_command(tmp_path):
  train(runs.config(steps=1, checkpoint_every=0), tmp_path / 'run', show_progress=False)
  command = [sys.executable, '-m', 'sink_jax.export', f'--workdir={tmp_path / "run"}']
  start = lambda out: subprocess.run(
      [*command, f'--out={tmp_path / out}'], capture_output=True, text=True, cwd=runs.ROOT,
      env=os.environ | {'PYTHONPATH': str(runs.ROOT)})
  failed, done = start('run'), start('out')
  assert failed.returncode == 1 and failed.stderr.startswith('error: '), failed.stderr
  assert 'already holds config.json' in failed.stderr
  assert done.returncode == 0, done.stderr
  assert 'No tokenizer written: BigramBackcopy' in done.stdout
  jax.tree.map(np.testing.assert_array_equal, sj.load_pretrained(tmp_path / 'out').params,
               sj.load_run(tmp_path / 'run').params)


@pytest.fixture(scope='module')
def trained_bpe(tmp_path_factory):
  folder = tmp_path_factory.mktemp('corpus')
  (folder / 'a.txt').write_text('the quick brown fox: jumps $A over & the lazy dog ' * 5)
  return TrainedBpe(vocab_size=290).open(TextFolder(path=str(folder)), 0.5)


@pytest.mark.parametrize('word', ['<|padding|>', 'the', ':', '$', '&'])
@pytest.mark.parametrize('kind', ['bytes', 'bpe'])
def test_a_first_token_is_put_before_texts_which_encode_as_before(tmp_path, trained_bpe, kind, word):
  plain = Bytes().open() if kind == 'bytes' else trained_bpe
  first = 1 if word == '<|padding|>' else plain.encode(word)[0]
  files = {}
  for name, tokenizer in (('plain', plain), ('begun', plain.beginning_with(first))):
    ids = write_tokenizer(tokenizer, tmp_path, context=32)
    files[name] = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  texts = ['a quick: $A & fox <|padding|> <0x26>, other the', '']
  for text in texts:
    assert files['begun'].encode(text).ids == [first, *files['plain'].encode(text).ids]
    assert files['begun'].encode(text, text).ids == [first, *files['plain'].encode(text, text).ids]
  assert ids['bos_token_id'] == first and ids['pad_token_id'] != first
  about = json.loads((tmp_path / 'tokenizer_config.json').read_text())
  # transformers cuts special tokens out of texts, so an ordinary one is not named as one.
  assert about.get('bos_token') == (word if first == 1 else None)
  back = TextTokenizer.from_path(tmp_path)
  assert (back.bos_id, back.prefix, back.bos_in_texts) == (first, (first,), first != 1)
  for text in (*texts, word + ' first', 'a'):
    bare = plain.encode(text)
    expected = bare if bare[:1] == [first] else [first, *bare]
    assert [back.tokens(text)[0].tolist(), tokenizer.tokens(text)[0].tolist()] == [expected] * 2


def test_a_first_token_is_the_bos_of_an_exported_run(tmp_path):
  run = dataclasses.replace(run_of(), first_token=3)
  assert export_checkpoint(run, tmp_path).hf['bos_token_id'] == 3
