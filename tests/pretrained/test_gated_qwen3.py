"""The gated Qwen3 models of arXiv 2505.06708: queries and gates are rows of one matrix."""

import pytest
from numpy.testing import assert_array_equal

import sink_jax as sj
from sink_jax.attention.head import ElementGate, HeadGate
from tests.pretrained import tiny

HF = tiny.LLAMA | dict(
  model_type='qwen3',
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=2,
  use_qk_norm=True,
)


@pytest.mark.parametrize(
  'kind, head, queries, gates',
  [
    # For each key head, the rows of its two queries are followed by those of their gates.
    ('headwise', HeadGate(), [0, 1, 2, 3, 6, 7, 8, 9], [4, 5, 10, 11]),
    ('elementwise', ElementGate(), [*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]),
  ],
)
def test_rows_of_queries_and_of_gates(tmp_path, kind, head, queries, gates):
  arrays = tiny.write(tmp_path, HF | {f'{kind}_attn_output_gate': True})
  run = sj.load_pretrained(tmp_path)
  assert run.config.attention.head == head
  attention = run.params['blocks']['attention']
  for layer in range(3):
    rows = arrays[f'model.layers.{layer}.self_attn.q_proj.weight']
    assert len(rows) == len(queries + gates)
    assert_array_equal(attention['query']['kernel'][layer], rows[queries].T)
    assert_array_equal(attention['head_kernel'][layer], rows[gates].T)
