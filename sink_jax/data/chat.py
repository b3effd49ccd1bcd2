"""Conversations as a corpus: files of chat messages, and questions about the standard library.

A conversation becomes one text, by a template, and is packed into chunks like all text. Where
answers alone count in the loss, a weight per token is packed beside it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from sink_jax.data import stdlib_questions, text_lines
from sink_jax.data.chat_template import (
  BUILT_IN,
  ROLES,
  Message,
  Template,
  load_template,
  rendered,
)
from sink_jax.data.documents import (
  Document,
  DocumentSource,
  conversation,
  digest_of,
  files_fingerprint,
  folder_domain,
  jsonl_files,
  total_size,
)
from sink_jax.data.part_encoding import answers
from sink_jax.data.stdlib import Stdlib

# The names that files give to the roles: those of OpenAI and of the Hub, and those of ShareGPT.
_ROLES = {role: role for role in ROLES} | {'human': 'user', 'gpt': 'assistant'}
_LISTS = ('messages', 'conversations')
_LOSSES, _LONG = ('all', 'answers'), ('parts', 'drop')


class _Chat(DocumentSource):
  """A source of conversations; `ChatJsonl` says what its three options are."""
  abstract = True
  # Annotated and not declared, as the fields of a subclass have an order of their own.
  template: str
  loss: str
  long: str

  def __post_init__(self) -> None:
    name = type(self).__name__
    if self.loss not in _LOSSES:
      raise ValueError(f"{name}(loss={self.loss!r}): choose 'all' tokens or 'answers' alone.")
    if self.long not in _LONG:
      raise ValueError(f"{name}(long={self.long!r}): conversations longer than the context are "
                       "kept in 'parts', or it is 'drop'.")
    if not self.template:
      raise ValueError(f'{name}(template={self.template!r}): choose {", ".join(BUILT_IN)}, or '
                       'name a JSON file of formats.')

  @property
  def answers_only(self) -> bool:
    return self.loss == 'answers'

  @property
  def drops_long(self) -> bool:
    return self.long == 'drop'

  def _template(self) -> Template:
    return load_template(self.template, f'{type(self).__name__}(template=...)')


@dataclasses.dataclass(frozen=True)
class ChatJsonl(_Chat):
  """Conversations, one in each line, in .jsonl, .jsonl.gz or .jsonl.zst: one file or a folder.

  A line has a list `messages` or `conversations` of objects with `role` and `content`, or with
  `from` and `value`; roles are system, user (human) and assistant (gpt). The domain is the first
  sub-folder, else 'text'.

  Attributes:
    template: 'zephyr', 'chatml', 'plain', or a JSON file with a format for each role, such as
      {"user": "Q: {content}\\n", "assistant": "A: {content}{eos}\\n"}.
    loss: 'all' tokens, as alignment-handbook trains zephyr-7b-beta, or 'answers' alone, each with
      what ends it; a training batch without any answer then has the loss 0 and no gradient.
    long: what becomes of conversations that no chunk can hold whole: 'parts' cuts them at its
      edges, as all text; 'drop' leaves them out. Both are counted.
  """
  path: str = ''
  template: str = 'zephyr'
  loss: str = 'all'
  long: str = 'parts'

  def documents_from(self, start: int) -> Iterator[Document]:
    template, before = self._template(), 0
    for name, file in self._files():
      read = answered = 0
      for number, (line, position) in enumerate(text_lines.lines(file), 1):
        if not line.strip():
          continue
        start, read = start - 1, read + 1
        # Lines that were done before are parsed only until it is known that the file has an answer.
        if start < 0 or not answered:
          where = f'{file}, line {number}'
          messages = _messages(text_lines.json_value(line, where), where)
          if missing := {message.role for message in messages} - set(template):
            raise ValueError(f'{where}: a message of {missing.pop()!r}, for which {self.template} '
                             'has no format; add one to it.')
          parts = rendered(template, messages)
          answered += answers(parts)
          if start < 0:
            yield conversation(parts, folder_domain(name), f'{name}:{number}', before + position)
      if not answered:
        raise ValueError(f'{file} has no answer in its {read} conversations, so there is nothing '
                         'to learn from them: roles are '
                         f'{", ".join(_ROLES)}. Correct the file or leave it out.')
      before += file.stat().st_size

  def size(self) -> int:
    return total_size(self._files())

  def fingerprint(self) -> str:
    return digest_of([files_fingerprint(self._files()), self._template()])

  def _files(self) -> list[tuple[str, pathlib.Path]]:
    return jsonl_files(self.path, "ChatJsonl(path='...')")


@dataclasses.dataclass(frozen=True)
class StdlibChat(_Chat):
  """Questions about the running Python's standard library, with answers out of it.

  They are made from its definitions and docstrings, see `stdlib_questions`, and are of one domain,
  'chat'. Modules are held out with their near copies, as `Stdlib(split='content')` does. See
  `ChatJsonl` for `template`, `loss` and `long`.

  Attributes:
    max_files: this many modules are read only; 0 reads all.
  """
  template: str = 'zephyr'
  loss: str = 'all'
  long: str = 'parts'
  max_files: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    self._library()

  def documents(self) -> Iterator[Document]:
    template = self._template()
    for module in self._library().documents():
      for messages in stdlib_questions.conversations(module.name, module.text):
        yield conversation(rendered(template, messages), 'chat', module.name, module.position)

  def held_out(self, name: str, fraction: float) -> bool:
    return self._library().held_out(name, fraction)

  def size(self) -> int:
    return self._library().size()

  def fingerprint(self) -> str:
    return digest_of([self._library().fingerprint(), stdlib_questions.VERSION, self._template()])

  def _library(self) -> Stdlib:
    """The modules, a document each."""
    return Stdlib(domains='code', max_files=self.max_files, split='content')


def _messages(record: Any, where: str) -> list[Message]:
  """The messages of a line.

  Raises:
    ValueError: it is no conversation; names the message, counted from 1.
  """
  listed = next((record[key] for key in _LISTS if isinstance(record, dict) and key in record), None)
  if not isinstance(listed, list):
    fields = ', '.join(record) if isinstance(record, dict) else 'none (not an object)'
    raise ValueError(f"{where}: no list in the field 'messages' or 'conversations'; its fields "
                     f'are: {fields}.')
  if not listed:
    raise ValueError(f'{where}: no message in the conversation; remove the line.')
  messages = [_message(item, f'{where}, message {i}') for i, item in enumerate(listed, 1)]
  for i, (first, second) in enumerate(zip(messages, messages[1:]), 2):
    if first.role == second.role == 'assistant':
      raise ValueError(f'{where}, message {i}: a second answer in a row; join the two, or put the '
                       'question between them.')
  return messages


def _message(item: Any, where: str) -> Message:
  if not isinstance(item, dict):
    raise ValueError(f'{where}: not an object with role and content, but {_shown(item)}.')
  keys = ('from', 'value') if not {'role', 'content'} & set(item) else ('role', 'content')
  for key in keys:
    if key not in item:
      raise ValueError(f'{where}: no {key}; its fields are: {", ".join(item) or "none"}.')
    if not isinstance(item[key], str):
      raise ValueError(f'{where}: {key} must be a string, not {_shown(item[key])}.')
  role, content = item[keys[0]], text_lines.whole_characters(item[keys[1]])
  if role not in _ROLES:
    raise ValueError(f'{where}: the role {_shown(role)} is unknown; roles are '
                     f'{", ".join(_ROLES)}.')
  if _ROLES[role] == 'assistant' and not content.strip():
    raise ValueError(f'{where}: an empty answer; fill it in, or remove the conversation.')
  return Message(_ROLES[role], content)


def _shown(value: Any) -> str:
  """The beginning of a value of a file, for an error message of one line."""
  text = ascii(value)
  return text if len(text) <= 60 else f'{text[:57]}...'
