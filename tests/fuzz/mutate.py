"""Changes of valid data: bytes are flipped, cut and repeated, JSON values are replaced."""

from __future__ import annotations

import functools
import json
import random
import re

from hypothesis import strategies as st

DEEP = 100_000
_DEEP, _TWICE = '@@deep@@', '@@twice@@'
PATHS = ['../outside', '../../../etc/passwd', '/etc/passwd', '/dev/zero', '~nobody-of-this-name/x',
         '.', '..', '', 'a\0b', 'x' * 5000, 'a/../../b', '\udcff', 'con\n', '/proc/self/environ']
NUMBERS = [0, -1, 1, 2, 3, 255, 256, 2**15, 2**16, 2**27, 2**31 - 1, 2**31, 2**32, 2**53 + 1,
           2**63 - 1, 2**63, 2**64, 10**30, 10**400, -2**63, 0.5, -0.0, 1e-320, 1e30, 1e308,
           float('inf'), float('-inf'), float('nan')]
# Few, so that no table of all characters has to be made: odd ones, and halves of pairs.
LETTERS = ('aZ09 _.,:;=()[]{}\'"\\/-+*#%$\n\t\0\x7f\xa0éſßİ中\u200b\u202e\ufffe'
           '\ud800\udcff\udfff\U0001f600')
CODE = ["__import__('os').system('touch fuzzed')", "open('/fuzzed','w')", '().__class__.__bases__',
        "exec('import fuzzed_module')", '[x for x in ().__class__.__base__.__subclasses__()]',
        'lambda: 0', '9**9**9', "'%s' % ()", 'f"{open}"', 'fuzzed_module.attribute()', '{{7*7}}',
        '!!python/object/apply:os.system ["touch fuzzed"]', '$(touch fuzzed)', 'a if b else c',
        'True.__class__', '(yield)', 'await x', '*a', '**{}', '(a := 1)', '...', "b'x'"]
STRINGS = [*PATHS, *CODE, '\ud800', '\udfff\ud800', 'é' * 1000, '\u202e', 'x' * 100_000, 'NaN',
           'null', '-1', '1e999', '9' * 5000, '<s>', '\n', '\0', '${HOME}', '%s%n', 'ſ', 'İ']
_TOKENS = [b'\0', b'\xff', b'\xed\xa0\x80', b'"', b'{', b'}', b'[', b']', b',', b':', b'\n',
           b'NaN', b'Infinity', b'-', b'1e999', b'9' * 400, b'9' * 5000, b'\\ud800', b'\\u0000',
           b'null', b'../', b'\xf0\x9f\x98\x80', b'[' * DEEP, b'{"a":' * 5000, b'A' * 100_000]


@functools.cache
def hostile_values():
  """JSON values that nobody expects."""
  leaves = (st.sampled_from(NUMBERS) | st.sampled_from(STRINGS) | st.none() | st.booleans()
            | st.integers() | st.floats() | st.text(LETTERS, max_size=20)
            | st.just(_DEEP) | st.just(_TWICE))
  return st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
      st.text(LETTERS, max_size=8), inner, max_size=4), max_leaves=6)


def changed_bytes(valid: list[bytes]):
  """Strategy of valid data with one to four changes."""
  return st.builds(_changed, st.sampled_from(valid), st.integers(0, 2**62), st.integers(1, 4))


def changed_json(valid: list):
  """Strategy of JSON texts, as bytes: valid objects with one to three values replaced."""
  values = st.lists(hostile_values(), min_size=1, max_size=3)
  return (st.builds(_changed_json, st.sampled_from(valid), st.integers(0, 2**62), values)
          | changed_bytes([json.dumps(x).encode() for x in valid]))


def changed_objects(valid: list):
  """Strategy of the objects themselves."""
  values = st.lists(hostile_values(), min_size=1, max_size=3)
  return st.builds(_replaced, st.sampled_from(valid), st.integers(0, 2**62), values)


def nested(depth=DEEP):
  """A JSON text that is nothing but brackets."""
  return b'[' * depth + b']' * depth


def _changed(data, seed, times):
  rng = random.Random(seed)
  for _ in range(times):
    data = rng.choice(_CHANGES)(rng, data)
  return data[:4_000_000]


def _at(rng, data):
  return rng.randint(0, len(data))


def _span(rng, data):
  a = _at(rng, data)
  return a, min(len(data), a + int(rng.expovariate(1 / 20)) + 1)


def _flip(rng, data):
  if not data:
    return data
  out, i = bytearray(data), rng.randrange(len(data))
  out[i] ^= 1 << rng.randrange(8)
  return bytes(out)


def _cut(rng, data):
  return data[:_at(rng, data)]


def _drop(rng, data):
  a, b = _span(rng, data)
  return data[:a] + data[b:]


def _insert(rng, data):
  i = _at(rng, data)
  return data[:i] + rng.choice(_TOKENS) + data[i:]


def _repeat(rng, data):
  a, b = _span(rng, data)
  return data[:b] + data[a:b] * rng.choice([1, 2, 10, 1000]) + data[b:]


def _swap(rng, data):
  a, b = sorted((_at(rng, data), _at(rng, data)))
  return data[b:] + data[a:b] + data[:a]


def _number(rng, data):
  found = list(re.finditer(rb'-?\d+(\.\d+)?', data))
  if not found:
    return data
  match, value = rng.choice(found), rng.choice(NUMBERS)
  return data[:match.start()] + json.dumps(value).encode() + data[match.end():]


def _zero(rng, data):
  a, b = _span(rng, data)
  return data[:a] + bytes(b - a) + data[b:]


_CHANGES = [_flip, _flip, _cut, _drop, _insert, _repeat, _swap, _number, _number, _zero]


def _replaced(value, seed, values):
  rng, value = random.Random(seed), json.loads(json.dumps(value))
  for new in values:
    places = list(_places(value))
    if not places:
      return new
    owner, key = rng.choice(places)
    action = rng.random()
    if action < 0.1 and isinstance(owner, dict):
      del owner[key]
    elif action < 0.2 and isinstance(owner, dict):
      owner[str(key) + 'x'] = owner.pop(key)
    elif action < 0.3:
      owner[key] = [owner[key]]
    elif action < 0.35:
      other, name = rng.choice(places)
      if name in other if isinstance(other, dict) else name < len(other):
        owner[key] = json.loads(json.dumps(other[name]))
    else:
      owner[key] = new
  return value


def _places(value):
  if isinstance(value, (dict, list)):
    for key in list(value) if isinstance(value, dict) else range(len(value)):
      yield value, key
      yield from _places(value[key])


def _changed_json(value, seed, values):
  text = json.dumps(_replaced(value, seed, values))
  text = text.replace(f'"{_DEEP}"', _brackets())
  # A key of the object a second time, with another value.
  return text.replace(f'"{_TWICE}"', '0, "model_type": 1, "format": "x", "kind": []').encode()


@functools.cache
def _brackets():
  return nested().decode()
