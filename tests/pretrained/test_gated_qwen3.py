"""The gated Qwen3 models of arXiv 2505.06708, against the formula of their published code."""

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.head import ElementGate, HeadGate
from tests.pretrained import tiny

HEADS, KEYS, CHANNELS = 4, 2, 6
HF = tiny.LLAMA | dict(
  model_type='qwen3',
  num_hidden_layers=2,
  num_attention_heads=HEADS,
  num_key_value_heads=KEYS,
  head_dim=CHANNELS,
  rms_norm_eps=0.003,
  rope_theta=100.0,
  use_qk_norm=True,
)


def norm(x, gain):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.003) * gain


def rotated(x_TxHxDh):
  half = CHANNELS // 2
  angle = np.arange(len(x_TxHxDh))[:, None] * 100.0 ** (-np.arange(half) / half)
  turn = np.exp(1j * angle)[:, None] * (x_TxHxDh[..., :half] + 1j * x_TxHxDh[..., half:])
  return np.concatenate([turn.real, turn.imag], -1)


def attention(x, w, kind):
  """One layer for one text (T, D), by a loop over heads. It selects the rows of each head."""
  length, group = len(x), HEADS // KEYS
  k = rotated(norm((x @ w['k_proj'].T).reshape(length, KEYS, CHANNELS), w['k_norm']))
  v = (x @ w['v_proj'].T).reshape(length, KEYS, CHANNELS)
  gates = 1 if kind == 'headwise' else CHANNELS  # per head
  whole = (x @ w['q_proj'].T).reshape(length, KEYS, group * (CHANNELS + gates))
  out = []
  for head in range(HEADS):
    shared, own = divmod(head, group)
    q = whole[:, shared, own * CHANNELS : (own + 1) * CHANNELS]
    first = group * CHANNELS + own * gates
    gate = whole[:, shared, first : first + gates]
    q = rotated(norm(q[:, None], w['q_norm']))[:, 0]
    scores = np.where(np.tri(length, dtype=bool), q @ k[:, shared].T / np.sqrt(CHANNELS), -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    mixed = weights / weights.sum(1, keepdims=True) @ v[:, shared]
    out.append(mixed / (1 + np.exp(-gate)))
  return np.concatenate(out, 1) @ w['o_proj'].T


def logits(arrays, tokens, kind):
  x = arrays['model.embed_tokens.weight'][tokens]
  for layer in range(2):
    start = f'model.layers.{layer}.'
    w = {
      name.removeprefix(start).removesuffix('.weight').rpartition('.')[2]: array
      for name, array in arrays.items()
      if name.startswith(start)
    }
    x = x + attention(norm(x, w['input_layernorm']), w, kind)
    y = norm(x, w['post_attention_layernorm'])
    gate = y @ w['gate_proj'].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ w['up_proj'].T)) @ w['down_proj'].T
  return norm(x, arrays['model.norm.weight']) @ arrays['lm_head.weight'].T


@pytest.mark.parametrize(
  'kind, head, rows',
  [
    ('headwise', HeadGate(), HEADS * (CHANNELS + 1)),
    ('elementwise', ElementGate(), 2 * HEADS * CHANNELS),
  ],
)
def test_logits(tmp_path, kind, head, rows):
  hf = HF | {f'{kind}_attn_output_gate': True}
  arrays = {
    name: x / np.sqrt(x.shape[-1]).astype(np.float32) if x.ndim == 2 else x
    for name, x in tiny.tensors(hf).items()
  }
  assert arrays['model.layers.1.self_attn.q_proj.weight'].shape == (rows, 8)
  tiny.write(tmp_path, hf, arrays)
  run = sj.load_pretrained(tmp_path)
  assert run.config.attention.head == head
  tokens = np.random.default_rng(1).integers(16, size=9, dtype=np.int32)
  expected = logits({name: x.astype(np.float64) for name, x in arrays.items()}, tokens, kind)
  np.testing.assert_allclose(
    run.logits(tokens[None])[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max()
  )
