"""Numbers that are none, or are too large: in the weights of a model, and in attention maps."""

from __future__ import annotations

import json
import math
import struct

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from hypothesis import strategies as st

from tests.fuzz.child import ROOT
from tests.fuzz.inputs import File, Input, Kind

_CASES = ('gpt2', 'llama', 'opt', 'qwen3_window')
_FIXTURES = ROOT / 'tests' / 'pretrained' / 'fixtures'
_FLOATS = [math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, 1e20, 70000.0, 1e-45, -0.0, 0.0]
_DTYPES = ('float32', 'bfloat16')
_STORED = {'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16'}  # safetensors' names


def _prepare_models(folder):
  made = {}
  for case in _CASES:
    paths = [_FIXTURES / case / name for name in ('config.json', 'model.safetensors')]
    made[case] = {path.name: path.read_bytes() for path in paths}
    for dtype in _DTYPES:
      input = Input(dtype, base=case)
      input.write(folder / case, made[case])
      _run_model(None, input, folder / case)
  return made


def _models(prepared):
  """A few numbers of one tensor replaced; text is the dtype to load it in."""
  def of(case):
    data = prepared[case]['model.safetensors']
    start = 8 + struct.unpack('<Q', data[:8])[0]
    tensors = [(_STORED[entry['dtype']], entry['data_offsets'])
               for name, entry in json.loads(data[8:start]).items()
               if name != '__metadata__' and entry['dtype'] in _STORED]

    def changed(tensor, place, value, count, dtype):
      stored, (first, last) = tensor
      value = _bytes(value, stored)
      size = (last - first) // len(value)
      first += start + len(value) * (place % size)
      count = min(count, size - place % size)
      content = data[:first] + value * count + data[first + len(value) * count:]
      return Input(dtype, {'model.safetensors': File(content)}, (), case)

    return st.builds(changed, st.sampled_from(tensors), st.integers(0, 2**31),
                     st.sampled_from(_FLOATS), st.sampled_from([1, 1, 2, 64, 10_000]),
                     st.sampled_from(_DTYPES))
  return st.one_of([of(case) for case in sorted(prepared)])


def _bytes(value, dtype):
  with np.errstate(over='ignore'):
    return np.array(value).astype(dtype).tobytes()


def _run_model(prepared, input, folder):
  """The numbers of a probe are finite, or there are none."""
  from sink_jax.evaluate.probe import probe
  from sink_jax.pretrained.load import load_pretrained
  run = load_pretrained(folder, dtype=input.text)
  tokens = np.arange(16).reshape(2, 8) % run.config.vocab_size
  _assert_finite(probe(run, tokens, dtype=input.text).summary())


def _assert_finite(value):
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, list):
    for part in value:
      _assert_finite(part)
  assert not isinstance(value, float) or math.isfinite(value), value


def _prepare_maps(folder):
  _run_map(None, Input(json.dumps(['float32', [1, 1, 1, 2, 2], [1, 0, 0.5, 0.5], 0.3])), folder)


def _maps(prepared):
  """JSON: dtype, shape, numbers that are repeated to fill it, epsilon."""
  numbers = st.lists(st.sampled_from([*_FLOATS, -1.0, -1e-9, 0.25, 0.5, 1.0, 1.02, 1e6])
                     | st.floats(0, 0.1), min_size=1, max_size=6)
  shapes = st.tuples(*[st.integers(0, 3)] * 3, st.integers(0, 5), st.integers(0, 5)) | st.integers(
      1, 4).map(lambda length: (2, 1, 2, length, length))
  epsilons = st.sampled_from([0.3, 0.3, 0.0, 1.0, 30, -1, math.nan, math.inf])
  return st.builds(lambda *parts: Input(json.dumps(parts)), st.sampled_from(
      ['float16', 'bfloat16', 'float32', 'float64']), shapes, numbers, epsilons)


def _run_map(prepared, input, folder):
  """Importance and rates lie within their bounds, or there are none."""
  from sink_jax.evaluate.sinks import importance, sink_rate
  dtype, shape, numbers, epsilon = json.loads(input.text)
  with np.errstate(over='ignore'):
    attention = np.resize(np.array(numbers), shape).astype(dtype)
  alpha = importance(attention)
  rate = sink_rate(alpha, epsilon)
  length = shape[-1]
  assert alpha.dtype in (np.float32, np.float64) and alpha.shape == tuple(shape[:-1])
  assert (alpha >= 0).all() and (alpha <= 1.02 * length / (length - np.arange(length))).all()
  assert (0 <= rate).all() and (rate <= 1).all() and 0 < epsilon < 1


KINDS = {
    'nonfinite_models': Kind(_prepare_models, _models, _run_model, share=2, batch=400,
                             bases=lambda prepared: prepared),
    'attention_maps': Kind(_prepare_maps, _maps, _run_map, share=10)}
