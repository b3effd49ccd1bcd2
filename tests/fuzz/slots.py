"""Config strings of every slot family, and of budgets, weights and interventions."""

from __future__ import annotations

import dataclasses
import functools
import typing

from hypothesis import strategies as st

from tests.fuzz import mutate
from tests.fuzz.inputs import Input, Kind


def _prepare(folder):
  from sink_jax.attention.spec import AttentionSpec
  from sink_jax.component import from_string, registry
  from sink_jax.data.sources import Source
  from sink_jax.data.token_edits import TokenEdit
  from sink_jax.data.tokenizer import Tokenizer
  from sink_jax.train.optimizer import UpdateRule
  bases = [*typing.get_type_hints(AttentionSpec).values(), Source, Tokenizer, TokenEdit, UpdateRule]
  families = {base.__name__: base for base in bases}
  for base in families.values():
    for cls in registry(base).values():
      from_string(base, repr(cls()))
  return families


def _literals():
  odd = st.sampled_from([repr(x) for x in mutate.NUMBERS] + mutate.CODE)
  plain = st.recursive(
      st.integers() | st.floats() | st.booleans() | st.none() | st.binary(max_size=4)
      | st.sampled_from(mutate.STRINGS) | st.text(mutate.LETTERS, max_size=8)
      | st.complex_numbers(),
      lambda x: st.lists(x, max_size=3) | st.tuples(x, x) | st.dictionaries(
          st.text(mutate.LETTERS, max_size=3), x, max_size=2), max_leaves=4).map(repr)
  return odd | plain


@functools.cache
def _monsters():
  """Texts that are long or deep in every way the grammar knows."""
  n = 10**6
  around = ['{}', 'Window(size={})', 'Jsonl(path={})', 'Window({})', 'PNorm(p={})']
  inner = ['*' * n, '(' * n, '[' * n, '(' * n + '1' + ')' * n, '[' * n + ']' * n, '-' * n + '1',
           '{1:' * n, 'not ' * n, '1' * n, '1+' * n + '1', '1if 1else ' * n + '1', 'a.' * n + 'a',
           'a' * n, "'" + 'a' * n + "'", '9**9**9', '**'.join('9' * 1000), 'f(' * n + ')' * n,
           '0x' + 'f' * n, '1j*' * n + '1', 'lambda:' * n + '1', "f'{" * 200, '\\' * n, '\n' * n,
           '1,' * n, 'a[' * n, 'await ' * n + 'a', '~' * n + '1', '-' * 5000 + '1', '"' * n,
           '(' * 90 + '1' + ')' * 90, '1+' * 900 + '1', '-' * 990 + '1', '\t' * n + '1']
  return [form.format(x) for x in inner for form in around]


def _texts(prepared):
  from sink_jax.component import registry
  classes = [cls for base in prepared.values() for cls in registry(base).values()]
  valid = [repr(cls()) for cls in classes]
  arguments = [(cls.__name__, f.name) for cls in classes for f in dataclasses.fields(cls)]
  arguments = arguments or [(classes[0].__name__, 'none')]
  with_value = st.builds(lambda place, value: f'{place[0]}({place[1]}={value})',
                         st.sampled_from(arguments), _literals())
  several = st.builds(lambda name, pairs: f'{name}({", ".join(f"{k}={v}" for k, v in pairs)})',
                      st.sampled_from([cls.__name__ for cls in classes]),
                      st.lists(st.tuples(st.sampled_from([k for _, k in arguments]), _literals()),
                               max_size=4))
  edited = mutate.changed_bytes([text.encode() for text in valid]).map(
      lambda data: data.decode('utf-8', 'surrogateescape'))
  monsters, odd = st.sampled_from(_monsters()), st.sampled_from(mutate.STRINGS)
  return st.one_of(with_value, with_value, several, edited, st.sampled_from(mutate.CODE),
                   st.text(mutate.LETTERS, max_size=40), st.sampled_from(valid),
                   st.integers(0, 99).flatmap(lambda i: odd if i else monsters))


def _inputs(prepared):
  own = [_texts({name: base}).map(lambda text, name=name: Input(f'{name}|{text}'))
         for name, base in sorted(prepared.items())]
  mixed = st.builds(lambda base, text: Input(f'{base}|{text}'), st.sampled_from(sorted(prepared)),
                    _texts(prepared))
  return st.one_of(*own, mixed, mixed)


def _run(prepared, input, folder):
  from sink_jax.component import from_string
  base, _, text = input.text.partition('|')
  slot = from_string(prepared[base], text)
  if from_string(prepared[base], repr(slot)) != slot:
    raise AssertionError(f'{slot!r} does not read as itself')


KINDS = {'slots': Kind(_prepare, _inputs, _run, share=30)}
