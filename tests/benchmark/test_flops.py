"""FLOPs and peaks against numbers worked out by hand."""

import pytest

import sink_jax as sj
from sink_jax.benchmark.flops import (
    attention_flops,
    datasheet_peak,
    importance_flops,
    loss_flops,
    scores,
)


@pytest.mark.parametrize('shape, forward, backward', [  # GFLOP, causal
    ((8, 8, 2048, 64), 34, 86),
    ((8, 8, 2048, 96), 52, 129),
    ((8, 8, 2048, 128), 69, 172),
    ((8, 16, 2048, 64), 69, 172),
    ((8, 16, 2048, 96), 103, 258),
    ((8, 16, 2048, 128), 137, 344),
])
def test_attention(shape, forward, backward):
  one, both = attention_flops(shape, sj.Causal())
  assert round(one / 1e9) == forward
  assert round((both - one) / 1e9) == backward


def test_a_window_counts_what_it_leaves():
  assert scores(2048, sj.Window(size=256)) == 256 * 2048 - 256**2 / 2
  assert scores(2048, sj.Window(size=4096)) == scores(2048, sj.Causal()) == 2048**2 / 2


def test_importance():
  one_head = (1, 1, 131072, 128)
  both = importance_flops(one_head, sj.Causal())
  assert both / 2 == pytest.approx(2.2e12, rel=0.01)  # per pass
  assert importance_flops(one_head, sj.Causal(), keys=4) == both / 2 + 2 * 128 * 131072 * 4


def test_loss():
  # 16,384 tokens of the 60M model: the head is 38.7M parameters, 2 FLOPs each, 3 products.
  assert loss_flops(16384, 768, 50432) == pytest.approx(6 * 38.7e6 * 16384, rel=0.001)


@pytest.mark.parametrize('kind, tera', [
    ('NVIDIA H100 80GB HBM3', 989), ('NVIDIA H200', 989), ('NVIDIA A100-SXM4-80GB', 312),
    ('TPU v5 lite', 197), ('TPU v5p', 459), ('TPU v6 lite', 918), ('TPU7x', 1153.5),
    ('NVIDIA H100 PCIe', None), ('cpu', None), ('NVIDIA L4', None),
])
def test_datasheet_peaks(kind, tera):
  peak = datasheet_peak(kind)
  assert peak == (tera and tera * 1e12)
