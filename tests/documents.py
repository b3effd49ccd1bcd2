"""The documents that a user reads: README.md, then the pages of docs/ in the order of the menu."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Paths of all documents, relative to the repository, in reading order: the examples of one document
# may need the results of an earlier one.
DOCUMENTS = [
  'README.md',
  *(
    f'docs/{name}'
    for name in re.findall(r'^ +- (\w+\.md)$', (ROOT / 'mkdocs.yml').read_text(), re.MULTILINE)
  ),
]
TEXTS = {path: (ROOT / path).read_text() for path in DOCUMENTS}
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def blocks():
  """(document, language, title or '', text) of every code block, in reading order."""
  return [(path, *found) for path, text in TEXTS.items() for found in _BLOCK.findall(text)]


def links(path):
  """(target relative to the repository, anchor or '') of every link that is not a web address."""
  text = re.sub(r'^```.*?^```', '', (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
  for target, anchor in re.findall(r'\]\(([^)#:\s]*)(?:#([^)\s]*))?\)', text):
    yield (ROOT / path).parent / target if target else ROOT / path, anchor


def anchors(path):
  """The anchors that a documentation site makes of a document's headings."""
  headings = re.findall(r'^#+ (.*)$', (ROOT / path).read_text(), re.MULTILINE)
  return {
    re.sub(r'[^\w\- ]', '', heading).strip().lower().replace(' ', '-') for heading in headings
  }
