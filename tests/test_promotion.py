"""Public functions in a program that forbids JAX to promote ranks and dtypes."""

import contextlib
import dataclasses
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.models.transformer import init_params
from sink_jax.train.loop import train
from tests.analyses.small import small_run
from tests.train import runs


@contextlib.contextmanager
def strict():
  with jax.numpy_rank_promotion('raise'), jax.numpy_dtype_promotion('strict'):
    yield


RNG = np.random.default_rng(0)
MAPS = np.tril(RNG.random((2, 3, 4, 6, 6), np.float32))  # (N, S, H, T, T)
MAPS /= MAPS.sum(-1, keepdims=True)
Q, K, V = (RNG.standard_normal((2, 70, heads, 16), np.float32) for heads in (4, 2, 2))
TOKENS = RNG.integers(0, 16, (3, 12))
MASK = np.arange(6) < np.array([[6], [3], [5]])
CONFIG = sj.sized('tiny', vocab_size=16, dtype='bfloat16', d_model=32, ffn_hidden=32)
PUBLISHED = Path(__file__).parent / 'pretrained' / 'fixtures' / 'gpt_oss'
RUN = sj.Run(CONFIG, init_params(CONFIG, 0))
SPECS = [
  sj.AttentionSpec(),
  sj.AttentionSpec('Sigmoid()', 'RowSum(eps=1e-8)', position='Alibi()', mask=sj.Window(9)),
  sj.AttentionSpec(
    position='Relative()',
    kv_bias='KVBias()',
    qk_norm='QKNorm()',
    temperature='LogLength()',
    value='ValueScale()',
    head='HeadNorm()',
    mask=sj.Prefix(3),
  ),
]
SINKS = sj.AttentionSpec(position=sj.Nope(), kv_bias=sj.SinkLogit())


def of_attend(spec, implementation, dtype='float32'):
  """The output and the gradients."""
  q, k, v = (jnp.asarray(x, dtype) for x in (Q, K, V))
  params = {
    component: {name: jnp.full(param.shape, 0.5) for name, param in named.items()}
    for component, named in spec.params(sj.Dims(4, 2, 16)).items()
  }

  def loss(*inputs):
    out = sj.attend(spec, *inputs, implementation=implementation)
    return jnp.sum(out.astype(jnp.float32) ** 2), out

  return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, params)


def of_run(run):
  mask = np.arange(12) < [[12], [7], [9]]
  sampled = run.generate(TOKENS, 5, temperature=1.0, top_k=3, mask=mask)
  return run.logits(TOKENS), run.record(TOKENS), run.generate(TOKENS, 5), sampled


def of_probe(**options):
  report = sj.probe(RUN, TOKENS, **options)
  return report.importance, report.entropy, report.norms, report.activations, repr(report)


def rows_of(*results):
  return [repr(row) for result in results for row in result.rows]


CALLS = {
  'importance': lambda _: (
    sj.importance(jnp.asarray(MAPS)),
    sj.importance(jnp.asarray(MAPS[0]).astype(jnp.bfloat16), mask=MASK),
  ),
  'sink_rate': lambda _: sj.sink_rate(jnp.asarray(sj.importance(MAPS))),
  'emergence_step': lambda _: sj.emergence_step(jnp.arange(3), jnp.asarray([0.0, 0.2, 0.3])),
  'SinkReport': lambda _: repr(sj.SinkReport.from_attentions(jnp.asarray(MAPS), mask=MASK)),
  'streaming_importance': lambda _: (
    sj.streaming_importance(SPECS[0], Q, K, entropy=True),
    sj.streaming_importance(SPECS[1], Q, K, entropy=True, mask=np.arange(70) < [[40], [70]]),
    jax.grad(lambda q: sj.streaming_importance(SPECS[0], q, K).normalized[..., 0].sum())(
      jnp.asarray(Q)
    ),
  ),
  'attention_map': lambda _: [sj.attention_map(spec, Q, K) for spec in SPECS[:2]],
  'attend': lambda _: [
    of_attend(SPECS[2], None, 'bfloat16'),
    *(of_attend(*pair) for pair in zip(SPECS, ('chunked', 'reference', 'pallas'))),
  ],
  'check_sink_gradients': lambda _: str(
    sj.check_sink_gradients(
      lambda q, k, v, sinks: sj.attend(SINKS, q, k, v, {'kv_bias': {'logit': sinks}}),
      length=32,
      dtype='float32',
    )
  ),
  'maps': lambda _: RUN.record(TOKENS, sj.RecordOptions(attention=sj.maps)),
  'record_attention': lambda _: (sj.record_attention(Q, K), jax.jit(sj.record_attention)(Q, K)),
  'record_hidden': lambda _: (sj.record_hidden(Q[:, :, 0]), jax.jit(sj.record_hidden)(Q[:, :, 0])),
  'Run': lambda _: of_run(RUN),
  'probe': lambda _: (
    of_probe(),
    of_probe(mask=np.arange(12) < [[12], [7], [12]], dtype='bfloat16'),
  ),
  'graft': lambda _: sj.graft(RUN, attention={'head': 'HeadGate(scale=2)'}, tokens=TOKENS).params,
  'parameter_count': lambda _: sj.parameter_count(dataclasses.replace(CONFIG, d_model=48)),
  'card_of': lambda _: rows_of(
    *sj.card_of(attentions=MAPS, hidden=Q[[0, 1, 1], None, :6, 0], mask=MASK).results.values()
  ),
  'card': lambda _: str(sj.card(small_run(), say=lambda line: None, sequences=4, length=72)),
  'analyse': lambda _: rows_of(
    *(sj.analyse(name, RUN, TOKENS) for name in ('angles', 'last_query'))
  ),
  'load_run': lambda folder: sj.load_run(folder).logits(TOKENS),
  'load_pretrained': lambda _: of_run(sj.load_pretrained(PUBLISHED)),
}
WITHOUT_JAX = {'from_string', 'sized', 'tokenize', 'read_runs'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A run that is trained in such a program."""
  folder = tmp_path_factory.mktemp('runs') / 'run'
  with strict():
    train(runs.config(steps=2), folder, show_progress=False)
  return folder


def test_every_public_function_that_computes_is_here():
  functions = {name for name in sj.__all__ if inspect.isfunction(getattr(sj, name))}
  assert functions - WITHOUT_JAX == CALLS.keys() - {'Run', 'SinkReport'}


@pytest.mark.parametrize('name', CALLS)
def test_a_strict_program_may_call_it(name, folder):
  with strict():  # such a program gets errors, never other numbers
    CALLS[name](folder)


@pytest.mark.parametrize('rule', ['Muon()', 'OrthoAdam(longest=16)'])
def test_a_strict_program_trains_by_every_rule(rule, tmp_path):  # `folder` has AdamW
  config = runs.config(steps=2, optimizer__rule=rule, microbatches=2, probe__every=0)
  with strict():
    train(config, tmp_path, show_progress=False)
