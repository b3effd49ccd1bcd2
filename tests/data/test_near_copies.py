"""Near copies among documents, and the overlap of two sets of texts."""

import numpy as np
import pytest

from sink_jax.data import near_copies


def _text(seed, length=4000):
  return np.random.default_rng(seed).integers(97, 123, length).astype(np.uint8).tobytes().decode()


def test_overlap_is_that_of_all_windows():
  held = [_text(0, 300) + 'é' + _text(1, 200), 'short', _text(2, 90)]
  training = [_text(3, 500) + held[0][100:250], held[2], held[0][400:450]]
  windows = [text[i:i + 64] for text in held for i in range(len(text) - 63)]
  expected = np.mean([any(window in text for text in training) for window in windows])
  assert 0.1 < expected < 0.5
  assert near_copies.overlap(held, training) == pytest.approx(expected)
  assert near_copies.overlap(['short'], training) is None and near_copies.overlap(held, []) == 0


def test_groups_are_linked_by_a_tenth_of_the_smaller_text():
  a, b = _text(0), _text(1)
  texts = {'a': a, 'b': b, 'part of a': _text(2, 1000) + a[1000:2000], 'indented': ' ' + b,
           'links': a[:2000] + b[:2000], 'alone': _text(3), 'quotes': _text(4) + a[:80],
           'empty': '', 'empty, too': ''}
  found = near_copies.groups(texts)
  linked = ('a', 'b', 'part of a', 'indented', 'links')
  assert {name: found[name] for name in linked} == dict.fromkeys(linked, 'a')
  assert all(found[name] == name for name in texts if name not in linked)
  tiny = near_copies.groups({'x': _text(5, 70), 'y': _text(5, 70)})
  assert tiny == {'x': 'x', 'y': 'x'}
