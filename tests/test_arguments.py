"""Unexpected keyword arguments of public functions and classes name the nearest right one."""

import inspect

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.mask import Window
from sink_jax.kernels import dispatch


@pytest.mark.parametrize('name', sj.__all__)
def test_a_misspelt_argument_of_every_public_name(name):
  target = getattr(sj, name)
  takes = [p for p in inspect.signature(target).parameters.values() if p.kind is not p.VAR_KEYWORD]
  wrong = takes[-1].name + 's' if takes else 'eps'
  # What comes first may be missing: the argument that does not exist is what is spoken of.
  given = {p.name: 'maps' if p.name == 'name' else 'tiny' for p in takes if p.default is p.empty}
  with pytest.raises(TypeError) as error:
    target(**given, **{wrong: 1})
  told = str(error.value)
  assert repr(wrong) in told and 'takes' in told, told
  if takes and name != 'analyse':  # whose arguments are those of the analysis
    assert f'{name}() has no argument' in told or 'ModelConfig()' in told


def test_the_nearest_is_named():
  x = np.ones((1, 2, 1, 4), np.float32)
  report = sj.SinkReport(*[np.full((1, 1, 1, 2), 0.5)] * 2, None, None, {}, None, {})
  for call, named in (
      (lambda: sj.attend(sj.AttentionSpec(), x, x, x, impl='chunked'), 'implementation'),
      (lambda: sj.sized('tiny', vocab_size=4, kv_head=2), 'kv_heads'), (lambda: sj.Window(siz=3), 'size'),
      (lambda: sj.Causal(zzz=3), 'zzz'), (lambda: report.sink_rate(eps=0.2), 'epsilon'),
      (lambda: sj.Run(None, {}).generate(x, 3, temp=1.0), 'temperature')):
    with pytest.raises(TypeError, match=f"'{named}'"):
      call()


def test_public_names_are_the_things_themselves():
  assert sj.attend is dispatch.attend and sj.Window is Window
  assert isinstance(Window(3), sj.Window) and repr(sj.Window(size=3)) == 'Window(size=3)'
  assert list(inspect.signature(sj.Window).parameters) == ['size']
  assert list(inspect.signature(sj.attend).parameters)[-1] == 'implementation'
  x = np.ones((1, 2, 1, 4), np.float32)
  attend = jax.jit(sj.attend, static_argnums=0, static_argnames='implementation')
  assert attend(sj.AttentionSpec(), x, x, x, implementation='chunked').shape == x.shape
