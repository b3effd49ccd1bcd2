"""Writes conversations about the Python standard library, which configs/sft.py trains on.

    python -m configs.make_stdlib_chat data/stdlib_chat

Writes train.jsonl and valid.jsonl, which `ChatJsonl` reads. Each definition with a docstring
becomes one conversation of one to four questions, with answers from the text of the library. The
same library gives the same files. All of a package is held out together, as `Stdlib` does.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from sink_jax.data.stdlib import Stdlib, modules

_HELD_OUT = 0.05
_LONGEST_SOURCE = 1500  # characters of a definition that is shown completely
_SYSTEM = (
  'You are a helpful assistant who knows the Python standard library.',
  'Answer in a few words, from the documentation of the Python standard library.',
  'You explain Python to somebody who knows another language.',
)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def main(folder: str) -> None:
  """Writes both files."""
  Path(folder).mkdir(parents=True, exist_ok=True)
  with (
    open(Path(folder, 'train.jsonl'), 'w') as train,
    open(Path(folder, 'valid.jsonl'), 'w') as valid,
  ):
    for name, text in modules():
      held = Stdlib().held_out(name.split('/')[0].removesuffix('.py'), _HELD_OUT)
      for messages in conversations(name, text):
        print(json.dumps({'messages': messages}), file=valid if held else train)


def conversations(name: str, source: str) -> Iterator[list[dict[str, str]]]:
  """The conversations about a module in the order of its text; name: its file, json/decoder.py."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', SyntaxWarning)  # invalid escapes in the library
    tree = ast.parse(source)
  module = name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')
  for node, path in _definitions(tree, module):
    pairs, chance = list(_questions(node, path, source)), random.Random(path)
    chosen = sorted(chance.sample(range(len(pairs)), chance.randint(1, len(pairs))))
    messages = [('system', chance.choice(_SYSTEM))] if chance.random() < 1 / 3 else []
    for question, answer in (pairs[i] for i in chosen):
      messages += [('user', question), ('assistant', answer)]
    yield [{'role': role, 'content': content} for role, content in messages]


def _definitions(parent: ast.Module | ast.ClassDef, path: str) -> Iterator[tuple[Definition, str]]:
  """Public definitions with a docstring, also inside classes, and their dotted names."""
  for node in parent.body:
    if isinstance(node, Definition) and not node.name.startswith('_'):
      name = f'{path}.{node.name}'
      if (ast.get_docstring(node) or '').strip():
        yield node, name
      if isinstance(node, ast.ClassDef):
        yield from _definitions(node, name)


def _questions(node: Definition, path: str, source: str) -> Iterator[tuple[str, str]]:
  text = (ast.get_docstring(node) or '').strip().split('\n\n')[0].strip()
  yield f'Explain {path}.', text
  yield f'What is documented like this: {text}', path
  if not isinstance(node, ast.ClassDef):
    yield f'Which arguments does {path} take?', ast.unparse(node.args) or 'It takes no arguments.'
  # The lines of the text itself, since the output of `ast.unparse` differs between versions of
  # Python.
  lines = source.split('\n')[node.lineno - 1 : node.end_lineno]
  indent = node.col_offset
  shown = '\n'.join(line if line[:indent].strip() else line[indent:] for line in lines)
  if len(shown) <= _LONGEST_SOURCE:
    yield f'Show me the source of {path}.', shown


if __name__ == '__main__':
  if len(sys.argv) != 2:
    sys.exit('usage: python -m configs.make_stdlib_chat FOLDER')
  main(sys.argv[1])
