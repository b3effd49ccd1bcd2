"""Writes conversations about the Python standard library, which configs/sft.py trains on.

    python -m configs.make_stdlib_chat data/stdlib_chat

Writes train.jsonl and valid.jsonl, which `ChatJsonl` reads. Each definition with a docstring becomes
one conversation of one to three questions, with answers from the library's own text. Which ones, in
which words, and whether a system message comes first, follows from a hash of its name: the same
library gives the same files. A package is held out as a whole, as `Stdlib` does.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from sink_jax.data.stdlib import Stdlib, modules

_HELD_OUT = 0.05
_LONGEST_SOURCE = 1500  # characters of a definition that is shown as a whole
_MOST_LISTED = 12  # names in an answer

_SYSTEM = ('You are a helpful assistant who knows the Python standard library.',
           'Answer in a few words, from the documentation of the Python standard library.',
           'You explain Python to somebody who knows another language.')

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def main(folder: str) -> None:
  """Writes both files."""
  Path(folder).mkdir(parents=True, exist_ok=True)
  with open(Path(folder, 'train.jsonl'), 'w') as train, open(Path(folder, 'valid.jsonl'), 'w') as valid:
    for name, text in modules():
      held = Stdlib().held_out(name.split('/')[0].removesuffix('.py'), _HELD_OUT)
      for messages in conversations(name, text):
        print(json.dumps({'messages': messages}), file=valid if held else train)


def _message(role: str, content: str) -> dict[str, str]:
  return {'role': role, 'content': content}


def conversations(name: str, source: str) -> Iterator[list[dict[str, str]]]:
  """The conversations about a module, in the order of its text.

  Args:
    name: of its file, such as 'json/decoder.py'.
  """
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', SyntaxWarning)  # of the library's own invalid escapes
    tree = ast.parse(source)
  module = name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')
  pairs = list(_about_module(tree, module))
  if pairs:
    yield _conversation(module, pairs)
  for node, path in _definitions(tree, ''):
    pairs = list(_about_definition(node, path, module, source))
    if pairs:
      yield _conversation(f'{module}.{path}', pairs)


def _definitions(parent: ast.Module | ast.ClassDef,
                 prefix: str) -> Iterator[tuple[Definition, str]]:
  """Public definitions with a docstring and their dotted names, those of classes included."""
  for node in parent.body:
    if isinstance(node, _DEFINITIONS) and not node.name.startswith('_'):
      if ast.get_docstring(node):
        yield node, prefix + node.name
      if isinstance(node, ast.ClassDef):
        yield from _definitions(node, f'{prefix}{node.name}.')


def _conversation(name: str, pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
  """Some of the questions, in their order; one in three conversations has a system message."""
  count = 1 + _hash(f'{name} length') % min(3, len(pairs))
  # The first ones of a shuffled order, which is the order of hashes, asked in their own order.
  shuffled = sorted(range(len(pairs)), key=lambda i: _hash(f'{name} {i}'))
  messages = [_message('system', _SYSTEM[_hash(f'{name} words') % len(_SYSTEM)])
              ] if not _hash(f'{name} system') % 3 else []
  for question, answer in (pairs[i] for i in sorted(shuffled[:count])):
    messages += [_message('user', question), _message('assistant', answer)]
  return messages


def _about_module(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
  if text := _first_paragraph(tree):
    yield _worded(f'{module} purpose', 'What is the module {} for?',
                  'What does Python have the module {} for?', module), text
  for kind, types in (('classes', ast.ClassDef), ('functions', _DEFINITIONS[:2])):
    names = [node.name for node in tree.body
             if isinstance(node, types) and not node.name.startswith('_')]
    if names:
      yield (_worded(f'{module} {kind}', f'Which {kind} does {{}} define?',
                     f'Name the {kind} of the module {{}}.', module), _listed(names))


def _about_definition(node: Definition, path: str, module: str,
                      source: str) -> Iterator[tuple[str, str]]:
  kind = 'class' if isinstance(node, ast.ClassDef) else 'method' if '.' in path else 'function'
  name = f'{module}.{path}'
  text = _first_paragraph(node)
  if not text:  # a docstring of white space
    return
  verb = 'is' if kind == 'class' else 'does'
  yield _worded(f'{name} purpose', f'What {verb} the {kind} {{}}{"" if verb == "is" else " do"}?',
                f'Explain the {kind} {{}}.', name), text
  yield _worded(f'{name} search', f'Which {kind} of {module} is documented like this: {{}}',
                f'I look for a {kind} in {module}. Its documentation says: {{}}',
                text), f'{path}'
  if not isinstance(node, ast.ClassDef):
    yield _worded(f'{name} arguments', 'Which arguments does {} take?',
                  'What can I give to {}?', name), ast.unparse(node.args) or 'It takes no arguments.'
  # The lines of the text itself: what `ast.unparse` writes differs between versions of Python.
  lines = source.split('\n')[node.lineno - 1:node.end_lineno]
  shown = '\n'.join(line if line[:node.col_offset].strip() else line[node.col_offset:]
                    for line in lines)
  if len(shown) <= _LONGEST_SOURCE:
    yield _worded(f'{name} source', f'Show me the source of the {kind} {{}}.',
                  'How is {} written?', name), shown


def _listed(names: Sequence[str]) -> str:
  names = list(dict.fromkeys(names))  # such as the getter and the setter of a property
  rest = len(names) - _MOST_LISTED
  return ', '.join(names[:_MOST_LISTED]) + (f' and {rest} more' if rest > 0 else '')


def _first_paragraph(node: Definition | ast.Module) -> str:
  return (ast.get_docstring(node) or '').strip().split('\n\n')[0].strip()


def _worded(key: str, first: str, second: str, about: str) -> str:
  return (first, second)[_hash(key) % 2].format(about)


def _hash(key: str) -> int:
  return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), 'big')


if __name__ == '__main__':
  if len(sys.argv) != 2:
    sys.exit('usage: python -m configs.make_stdlib_chat FOLDER')
  main(sys.argv[1])
