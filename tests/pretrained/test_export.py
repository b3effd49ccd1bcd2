"""Training runs as checkpoints: an imported export is the same run; refusals state a reason."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal
import tokenizers

import sink_jax as sj
from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.mask import Causal, Window
from sink_jax.data.sources import TextFolder
from sink_jax.data.tokenizer import Bytes, TextTokenizer, TrainedBpe
from sink_jax.models.config import Layer
from sink_jax.pretrained.export import export_checkpoint, write_tokenizer
from sink_jax.pretrained.files import Checkpoint
from sink_jax.pretrained.load import names_in_transformers
from sink_jax.train.export import export_workdir
from sink_jax.train.loop import train
from tests.attention_specs import legal, slot_values
from tests.random_params import random_params
from tests.train import runs

FIXTURES = Path(__file__).parent / 'fixtures'
TINY = dict(
  layers=3,
  d_model=32,
  heads=4,
  kv_heads=2,
  ffn_hidden=40,
  vocab_size=64,
  norm_eps=0.003,
  dtype='float32',
)
TEXTS = ['Hello, world!\n\tdéjà vu 😀', 'def f(x):\n  return "<0x41>"', '']
TOKENS = np.random.default_rng(1).integers(64, size=(2, 14), dtype=np.int32)
NORM = 'QKNorm(eps=0.003)'
# Name: class, options of the model, components of its attention.
CASES = {
  'llama': ('llama', {}, {}),
  'tied': ('llama', dict(tied=True, head_dim=12, kv_heads=None), {}),
  'linear': ('llama', dict(biases=('qkv', 'out', 'ffn')), dict(position='Rope(factor=2.0)')),
  'window': ('mistral', {}, dict(mask='Window(size=4)', position='Rope(base=500.0)')),
  'qk_norm': ('qwen3', dict(head_dim=12), dict(qk_norm=NORM)),
  'qk_norm_windows': (
    'qwen3',
    dict(biases=('qkv', 'out'), pattern=(Layer(mask=Causal()), Layer(), Layer())),
    dict(qk_norm=NORM, mask='Window(size=4)'),
  ),
  'sink_logit': ('granite_swa', {}, dict(kv_bias='SinkLogit()', position='Rope(base=100.0)')),
  'sink_logit_pattern': (
    'granite_swa',
    dict(
      biases=('qkv', 'out', 'ffn'),
      tied=True,
      pattern=(Layer(), Layer(mask=Window(size=5)), Layer(position=sj.Rope(base=500.0))),
    ),
    dict(kv_bias='SinkLogit()', position='Nope()'),
  ),
}


def spec(**components):
  return dict(attention=sj.AttentionSpec(**components))


def run_of(case):
  """A run without zero parameters, so that leaving one out would show."""
  _, options, components = CASES[case]
  config = sj.ModelConfig(**TINY | options, attention=sj.AttentionSpec(**components))
  return sj.Run(config, random_params(config), 'case', 5)


@pytest.mark.parametrize('case', CASES)
def test_an_exported_run_comes_back(tmp_path, case):
  run = run_of(case)
  hf = export_checkpoint(run, tmp_path / 'out', context=32)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text()) == hf
  assert (hf['max_position_embeddings'], hf['model_type']) == (32, CASES[case][0])
  back = sj.load_pretrained(tmp_path / 'out')
  # The importer gives the model the components of the first block, and overrides them in others.
  assert back.config.attention_specs == run.config.attention_specs
  if len(run.config.pattern) == 1:
    assert back.config == run.config
  jax.tree.map(assert_array_equal, back.params, run.params)
  if case.startswith('sink_logit'):  # transformers' defaults are those of a published model
    assert hf['attention_multiplier'] == 1 / np.sqrt(8)
    ones = 'logits_scaling', 'embedding_multiplier', 'residual_multiplier'
    assert [hf[key] for key in ones] == [1, 1, 1]
    read = 'sliding_window', 'layer_types', 'layer_rope_theta', 'attention_bias', 'mlp_bias'
    assert set(read) < set(hf)


def test_modules_have_the_names_of_an_export():
  names = names_in_transformers(run_of('window'))
  assert names['blocks/attention/query/kernel', 1] == 'model.layers.1.self_attn.q_proj'
  assert names['blocks/ffn/w_out/kernel', 2] == 'model.layers.2.mlp.down_proj'
  config = sj.ModelConfig(**TINY, attention=sj.AttentionSpec(similarity='Sigmoid()'))
  assert not names_in_transformers(sj.Run(config, random_params(config)))


@pytest.mark.parametrize('family', ['llama', 'phi3', 'falcon', 'gpt_neox', 'gemma3_new', 'jamba'])
def test_modules_of_a_published_model_have_the_names_of_its_files(family):
  run = sj.load_pretrained(FIXTURES / family)
  stored = Checkpoint(FIXTURES / family).entries
  names = names_in_transformers(run)
  kernels = [name for (path, _), name in names.items() if path.endswith('kernel')]
  assert len(kernels) >= 12
  assert all(f'{name}.weight' in stored or name in stored for name in kernels)


def test_bfloat16(tmp_path):
  run = run_of('llama')
  assert export_checkpoint(run, tmp_path, dtype='bfloat16')['torch_dtype'] == 'bfloat16'
  assert {entry.dtype for entry in Checkpoint(tmp_path).entries.values()} == {'BF16'}
  found = sj.load_pretrained(tmp_path, dtype='bfloat16').params
  rounded = jax.tree.map(lambda x: np.asarray(x).astype('bfloat16'), run.params)
  jax.tree.map(assert_array_equal, found, rounded)
  with pytest.raises(ValueError, match='already holds files'):
    export_checkpoint(run, tmp_path)


def refused(tmp_path, words, options):
  """An export that names what has no counterpart, in one line, and writes nothing."""
  with pytest.raises(ValueError) as caught:
    export_checkpoint(sj.Run(sj.ModelConfig(**TINY | options), {}), tmp_path / 'out')
  assert words in str(caught.value)
  assert '\n' not in str(caught.value)
  assert not (tmp_path / 'out').exists()


def components_without_counterpart():
  """(slot, value) of every component but the defaults and those of CASES."""
  for slot, values in slot_values().items():
    for value in values:
      written = value == getattr(sj.AttentionSpec(), slot) or isinstance(value, Window | SinkLogit)
      if not written and legal({slot: value}):
        yield slot, value


@pytest.mark.parametrize('slot, value', [*components_without_counterpart()], ids=str)
def test_a_component_without_a_counterpart_is_named(tmp_path, slot, value):
  refused(tmp_path, f'attention.{slot} = {type(value).__name__}', spec(**{slot: value}))


@pytest.mark.parametrize(
  'options, words',
  [
    (spec(similarity='Sigmoid()', normalizer='Unnormalized()'), 'attention.similarity = Sigmoid'),
    (spec(kv_bias='SinkLogit()', position='Rope(factor=2.0)'), 'attention.position = Rope'),
    (spec(qk_norm='QKNorm(eps=0.5)'), 'attention.qk_norm = QKNorm'),
    (dict(ffn='gelu'), "model.ffn = 'gelu'"),
    (dict(norm='layernorm'), "model.norm = 'layernorm'"),
    (dict(logit_cap=30.0), 'model.logit_cap = 30.0'),
    (dict(sink_tokens=1), 'model.sink_tokens = 1'),
    (dict(combine_heads='add'), "model.combine_heads = 'add'"),
    (dict(biases=('qkv',)), 'model.biases'),
    (dict(biases=('ffn',)) | spec(mask='Window()'), 'mistral has no model.biases'),
    (dict(pattern=(Layer(mask=Window(size=2)), Layer(), Layer())), 'attention.mask'),
    (
      dict(pattern=(Layer(mask=Window(size=2)), Layer(mask=Window(size=3)), Layer()))
      | spec(qk_norm=NORM),
      'qwen3 has no attention.mask',
    ),
    (dict(pattern=(Layer(position=sj.Rope(base=5.0)), Layer(), Layer())), 'attention.position'),
    (dict(vocab_size=0, input_features=4, output_features=4), 'model.input_features'),
  ],
  ids=str,
)
def test_what_has_no_counterpart_is_named_and_nothing_is_written(tmp_path, options, words):
  refused(tmp_path, words, options)


def test_a_class_may_be_named(tmp_path):
  run = run_of('llama')
  for case, target, words in (
    ('qk_norm', 'llama', r'llama has no attention.qk_norm = QKNorm\(eps=0.003\)'),
    ('llama', 'bert', '--as=bert: no such class; choices: llama, mistral, qwen3'),
  ):
    with pytest.raises(ValueError, match=words):
      export_checkpoint(run_of(case), tmp_path / 'out', target=target)
  hf = export_checkpoint(run, tmp_path / 'out', target='mistral')
  assert hf['model_type'] == 'mistral'
  assert sj.load_pretrained(tmp_path / 'out').config == run.config


def test_bytes_keep_their_ids(tmp_path):
  tokenizer = Bytes().open()
  ids = write_tokenizer(tokenizer, tmp_path, context=32)
  assert ids == dict(bos_token_id=0, eos_token_id=0, pad_token_id=1)
  written = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  got = [e.ids for e in written.encode_batch(TEXTS, add_special_tokens=False)]
  assert got == tokenizer.encode_batch(TEXTS)
  assert [written.decode(row) for row in got] == TEXTS
  assert written.encode('<|endoftext|>').ids == [0]
  about = json.loads((tmp_path / 'tokenizer_config.json').read_text())
  assert (about['eos_token'], about['model_max_length']) == ('<|endoftext|>', 32)


@pytest.fixture(scope='module')
def trained_bpe(tmp_path_factory):
  folder = tmp_path_factory.mktemp('corpus')
  (folder / 'a.txt').write_text('the quick brown fox: jumps $A over & the lazy dog ' * 5)
  return TrainedBpe(vocab_size=290).open(TextFolder(path=str(folder)), 0.5)


@pytest.mark.parametrize('word', ['<|padding|>', 'the', '$'])
@pytest.mark.parametrize('kind', ['bytes', 'bpe'])
def test_a_first_token_is_put_before_texts_which_encode_as_before(
  tmp_path, trained_bpe, kind, word
):
  plain = Bytes().open() if kind == 'bytes' else trained_bpe
  first = 1 if word == '<|padding|>' else plain.encode(word)[0]
  begun = plain.beginning_with(first)
  ids = write_tokenizer(begun, tmp_path, context=32)
  assert ids['bos_token_id'] == first
  assert ids['pad_token_id'] != first
  about = json.loads((tmp_path / 'tokenizer_config.json').read_text())
  # transformers removes special tokens from texts, so an ordinary token is not declared special.
  assert about.get('bos_token') == (word if first == 1 else None)
  written = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  bare = lambda text: written.encode(text, add_special_tokens=False).ids
  back = TextTokenizer.from_path(tmp_path)
  assert (back.bos_id, back.prefix, back.bos_in_texts) == (first, (first,), first != 1)
  texts = ['a quick: $A & fox <0x26>, other the', '']
  for text in texts:
    assert bare(text) == plain.encode(text)
    assert written.encode(text).ids == [first, *bare(text)]
    assert written.encode(text, text).ids == [first, *bare(text), *bare(text)]
  for text in (*texts, word + ' first', 'a<|padding|>'):
    ids = plain.encode(text)
    expected = ids if ids[:1] == [first] else [first, *ids]
    assert [back.tokens(text)[0].tolist(), begun.tokens(text)[0].tolist()] == [expected] * 2


def test_a_workdir_is_exported_with_its_tokenizer_and_first_token(tmp_path):
  train(
    runs.config(
      steps=1,
      checkpoint_every=0,
      data__context=16,
      data__tokenizer='Bytes()',
      data__source='Stdlib(max_files=6)',
      data__interventions='FixedToken(position=1, token=70)',
    ),
    tmp_path / 'run',
    show_progress=False,
  )
  lines = export_workdir(tmp_path / 'run', tmp_path / 'out')
  assert lines == [
    f'{tmp_path / "out" / "config.json"}: LlamaForCausalLM, step 1, float32',
    f'{tmp_path / "out" / "tokenizer.json"}: 258 tokens',
  ]
  run, back = sj.load_run(tmp_path / 'run'), sj.load_pretrained(tmp_path / 'out')
  hf = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert hf['bos_token_id'] == 70
  assert hf['eos_token_id'] == 0
  assert back.bos == 'tokenizer'
  tokens = sj.tokenize(back, ['def f(x):', 'return x + 1'], length=9)
  assert_array_equal(tokens, sj.tokenize(run, ['def f(x):', 'return x + 1'], length=9))
  assert (tokens[:, 0] == 70).all()
  assert_array_equal(back.logits(tokens), run.logits(tokens))
  shutil.rmtree(tmp_path / 'run' / 'tokenizer')
  assert 'No tokenizer written' in export_workdir(tmp_path / 'run', tmp_path / 'bare')[1]
