"""What a config, a cache, generation and a graft refuse: the message names the part and the remedy.

Each is raised before anything is compiled.
"""

import contextlib

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.models.config import Layer, Mamba
from sink_jax.models.decode import CachePolicy, check_policy
from sink_jax.models.generate import stream_texts
from tests.random_params import random_tokens, tiny, tiny_config

MAMBA = Layer(mamba=Mamba(8, 2, 2, 2))
HYBRID = dict(pattern=(Layer(), MAMBA))
CONTINUOUS = dict(vocab_size=0, input_features=2, output_features=2)


def attention(**components):
  return dict(attention=sj.AttentionSpec(**components))


def refused(words):
  """A context: with words a ValueError that has them, otherwise nothing."""
  return pytest.raises(ValueError, match=words) if words else contextlib.nullcontext()


PROTECTED = attention(qk_norm='QKNorm()') | dict(norm_location='protected')
CONFIGS = [
  (dict(ffn='swigloo'), 'model.ffn.*swiglu'),
  (dict(heads=3), 'must divide model.d_model'),
  (dict(kv_heads=3), 'must divide model.heads'),
  (dict(kv_heads=0), 'kv_heads'),
  (dict(layers=0), 'at least 1'),
  (dict(implementation='flash'), 'chunked'),
  (dict(remat='all'), "remat = 'all'; choices: none, save_matmuls, save_att"),
  (dict(unroll=True), 'unroll = True must be int'),
  (dict(sink_tokens=-1), 'sink_tokens must be at least 0'),
  (dict(vocab_size=0), 'vocab_size'),
  (dict(norm_location='sandwich', parallel_residual=True), "norm_location = 'pre'"),
  (dict(logit_cap=-30.0), 'model.logit_cap = -30.0 must be'),
  (dict(norm_eps=-1.0), 'norm_eps'),
  (CONTINUOUS | dict(logit_cap=30.0), 'need a vocabulary'),
  (dict(norm_location='protected'), r"qk_norm = 'QKNorm\(\)'"),
  (PROTECTED | dict(init='tinyllama'), 'torch_default'),
  (dict(tied=True, biases=('unembed',)), 'unembed'),
  (dict(biases=('x',)), 'choices: qkv'),
  (PROTECTED | HYBRID, 'without Mamba'),
  (dict(linear='sigma_reparam') | HYBRID, 'without Mamba'),
  (dict(layers=3, pattern=(Layer(), Layer())), 'a multiple of the 2 blocks'),
  (dict(layers=1, pattern=(MAMBA,)), 'no block with attention'),
  (
    dict(pattern=(Layer(position=sj.Alibi()), Layer())),
    'blocks differ in rotary',
  ),
  (attention(kv_bias='KBias()') | dict(sink_tokens=1), 'choose one'),
  (attention(mask='Prefix(length=3)') | dict(sink_tokens=4), 'shorter: give Prefix.length=4'),
  (attention(kv_bias='KBias(learnable_dims=9)'), 'exceeds'),
]


@pytest.mark.parametrize('options, words', CONFIGS)
def test_a_config_that_makes_no_sense(options, words):
  with refused(words):
    tiny_config(**options)


POLICIES = [
  dict(size=0),
  dict(size=4, sinks=4),
  dict(size=4, sinks=-1),
  dict(size=8, sinks=1.5),
  dict(size=4, positions='x'),
]


@pytest.mark.parametrize('options', POLICIES)
def test_a_cache_without_room(options):
  with refused('CachePolicy'):
    CachePolicy(**options)


LOG = attention(temperature='LogLength()')
LOG_OF_WINDOW = attention(temperature='LogLength()', mask='Window(size=5)')
PSEUDO = attention(kv_bias='PseudoMask(context=9)')
LEARNED = attention(position='Learned(max_length=8)')
LEARNED_AND_TOKEN = LEARNED | dict(sink_tokens=1)
TWO_TOKENS = dict(sink_tokens=2)
CACHES = [
  # What depends on the length of the text needs its positions.
  (LOG, CachePolicy(5, 2), 11, "positions='text', or a size of at least 11"),
  (LOG, CachePolicy(5, 2, 'text'), 11, None),
  (LOG, CachePolicy(11), 11, None),
  # If the cache holds the window, both have the same keys.
  (LOG_OF_WINDOW, CachePolicy(5, 2), 11, None),
  (PSEUDO, CachePolicy(8, 2), 11, "positions='text', or a size of at least 9"),
  (PSEUDO, CachePolicy(8, 2, 'text'), 11, None),
  (PSEUDO, CachePolicy(9, 2), 11, None),
  # A cache that counts its positions never runs out of them.
  (LEARNED, CachePolicy(8, 2), 24, None),
  (LEARNED, CachePolicy(9), 9, '8 learned positions'),
  (LEARNED_AND_TOKEN, CachePolicy(9, 2), 16, None),
  (LEARNED_AND_TOKEN, CachePolicy(9, 2, 'text'), 8, None),
  (LEARNED_AND_TOKEN, CachePolicy(9, 2, 'text'), 9, '8 learned positions'),
  (TWO_TOKENS, CachePolicy(6, 2), 13, None),
  (TWO_TOKENS, CachePolicy(6, 1), 13, 'give it sinks of at least 2'),
  (TWO_TOKENS, CachePolicy(6), 13, 'give it sinks of at least 2'),
]


@pytest.mark.parametrize('options, policy, length, words', CACHES, ids=str)
def test_a_cache_that_cannot_read_the_text(options, policy, length, words):
  config = tiny_config(**options)
  with refused(words):
    check_policy(config, policy, length)


PROMPT = random_tokens(2, 4)
MASK = 'shape of the tokens, .2, 4., and in every row 1'
GENERATION = [
  (dict(length=0), 'length'),
  (dict(chunk=0), 'chunk'),
  (dict(temperature=-1.0), 'temperature'),
  (dict(temperature=float('nan')), 'temperature'),
  (dict(temperature=float('inf')), 'temperature'),
  (dict(top_k=0), 'top_k'),
  (dict(top_k=33), 'top_k'),
  (dict(top_p=0.0), 'top_p'),
  (dict(top_p=1.1), 'top_p'),
  (dict(seed=-1), 'seed'),
  (dict(seed=2**40), 'seed'),
  (dict(eos_token_id=32), 'eos_token_id'),
  (dict(mask=[[1, 0, 1, 1], [1] * 4]), MASK),
  (dict(mask=[[1] * 4, [0] * 4]), MASK),
  (dict(mask=[[1] * 3] * 2), MASK),
  (dict(mask=[[2] * 4] * 2), MASK),
  (dict(tokens=PROMPT + 31), 'vocabulary has 32'),
  (dict(tokens=PROMPT[0]), r'shape \(S, T\)'),
  (dict(tokens=PROMPT[:, :0]), 'T at least 1'),
  (dict(tokens=np.ma.masked_less(PROMPT, 99)), 'masked'),
]


@pytest.mark.parametrize('options, words', GENERATION, ids=str)
def test_what_cannot_be_generated(options, words):
  run, given = sj.Run(tiny_config(), {}), dict(tokens=PROMPT, length=2)
  with refused(words):
    run.generate(**given | options)


@pytest.mark.parametrize('length, words', [(4, None), (5, '8 learned positions')])
def test_a_cache_of_everything_needs_a_position_for_every_token(length, words):
  config = tiny_config(**LEARNED_AND_TOKEN)
  with refused(words):
    stream_texts(config, {}, PROMPT, length)


def test_a_model_without_tokens_generates_none():
  run = sj.Run(tiny_config(**CONTINUOUS), {})
  with refused('no tokens'):
    run.generate(np.zeros((2, 4, 2)), 2)


TOKEN = dict(sink_tokens=1)
GRAFTS = [
  ({}, {}, 'changes nothing.*HeadGate'),
  ({}, dict(attention={'head': 'PlainOutput()'}, norm='rmsnorm'), 'changes nothing'),
  ({}, dict(attention={'gate': 'HeadGate()'}), "no component 'gate'.*head"),
  ({}, dict(attention='HeadGate(scale=2)'), 'component'),
  ({}, dict(attention={'head': 'HeadGat()'}), 'Did you mean HeadGate'),
  (
    dict(pattern=(Layer(mask=sj.Window(4)), Layer())),
    dict(attention={'mask': 'Prefix()'}),
    'a mask of their own',
  ),
  ({}, TOKEN | dict(start='zero'), "start 'zero'. Choices: identity, random"),
  ({}, TOKEN | dict(tokens=None), 'no probe inputs.*tokens='),
  (CONTINUOUS, TOKEN, 'continuous inputs'),
  ({}, TOKEN | dict(tokens=PROMPT[0]), r'shape \(S, T\)'),
  ({}, TOKEN | dict(tokens=PROMPT + 31), 'vocabulary has 32'),
]


@pytest.mark.parametrize('options, changes, words', GRAFTS, ids=str)
def test_a_graft_without_meaning(options, changes, words):
  run = sj.Run(tiny_config(**options), {})
  with refused(words):
    sj.graft(run, **dict(tokens=PROMPT) | changes)


@pytest.mark.parametrize(
  'options, inputs, words',
  [
    ({}, PROMPT + 31, 'vocabulary has 32'),
    ({}, PROMPT - 32, r'-\d'),
    ({}, [[1, 2], [3]], 'tokens is a list'),
    ({}, PROMPT * 1.0, 'integers'),
    (CONTINUOUS, np.zeros((1, 4, 5)), r'\(S, T, 2\)'),
  ],
)
def test_what_a_model_cannot_read(options, inputs, words):
  run = sj.Run(tiny_config(**options), {})
  for read in (run.logits, run.record):
    with refused(words):
      read(inputs)


def test_shapes_are_checked_without_values():
  shape = jax.eval_shape(tiny().logits, jax.ShapeDtypeStruct((2, 6), 'int32')).shape
  assert shape == (2, 6, 32)
