"""Chat templates: the text around the messages of a conversation, one format string per role.

A template is the built-in 'zephyr', 'chatml' or 'plain', or a JSON file. The Jinja templates that
checkpoints bring are programs, and none is executed here.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sink_jax.data.documents import Part, existing_path
from sink_jax.io.files import read_text_limited

ROLES = ('system', 'user', 'assistant')
BUILT_IN = {
    # As the tokenizer_config.json of HuggingFaceH4/zephyr-7b-beta renders it. The empty system
    # message that its training recipe puts before a conversation without one is not added.
    'zephyr': {role: f'<|{role}|>\n{{content}}{{eos}}\n' for role in ROLES},
    # https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md
    'chatml': {role: f'<|im_start|>{role}\n{{content}}<|im_end|>\n' for role in ROLES},
    'plain': {'system': '{content}\n\n', 'user': 'User:\n{content}\n\n',
              'assistant': 'Assistant:\n{content}{eos}\n\n'},
}
_CONTENT, _EOS = '{content}', '{eos}'
_FILE = ('a JSON object like {"system": "{content}\\n", "user": "Q: {content}\\n", '
         '"assistant": "A: {content}{eos}\\n"}')


class Message(NamedTuple):
  """One message of a conversation; the role is one of `ROLES`."""
  role: str
  content: str


class Format(NamedTuple):
  """The text around a message of one role; '{eos}' in it stands for the tokenizer's EOS.

  end: what ends the message and belongs to an answer: up to the first '{eos}', else up to the last
  character that is not white space, else all. rest: what follows `end`.
  """
  before: str
  end: str
  rest: str


Template = Mapping[str, Format]  # by role; 'system' may be missing


def load_template(name: str, option: str) -> Template:
  """The template of a name in `BUILT_IN`, or of a JSON file.

  Args:
    option: where the name was given, such as "ChatJsonl(template='...')", for the error message.

  Raises:
    ValueError: there is no such file, or it is no template; names file and role.
  """
  if name in BUILT_IN:
    return {role: _format(text, role, name) for role, text in BUILT_IN[name].items()}
  if not (name and pathlib.Path(name).expanduser().is_file()):
    raise ValueError(f'{option}: {name!r} is neither a template ({", ".join(BUILT_IN)}) nor a '
                     f'file; a file holds {_FILE}.')
  file = existing_path(name, option)
  try:
    formats = json.loads(read_text_limited(file))
  except (ValueError, RecursionError) as error:  # among them JSONDecodeError, UnicodeDecodeError
    raise ValueError(f'{file}: not a template ({error}); it must hold {_FILE}. Jinja templates '
                     'are not executed: write out what they put around a message.') from None
  if not isinstance(formats, dict) or set(formats) - set(ROLES):
    found = ', '.join(map(repr, formats)) if isinstance(formats, dict) else type(formats).__name__
    raise ValueError(f'{file}: not a template, since it holds {found}: it must hold {_FILE}.')
  for role in ROLES[1:]:
    if role not in formats:
      raise ValueError(f'{file}: no format for {role!r}; the file must hold {_FILE}.')
  return {role: _format(text, role, str(file)) for role, text in formats.items()}


def _format(text: object, role: str, where: str) -> Format:
  if not isinstance(text, str):
    raise ValueError(f'{where}: the format of {role!r} must be a string, not {text!r}.')
  if text.count(_CONTENT) != 1:
    raise ValueError(f'{where}: the format of {role!r}, {text!r}, must hold {_CONTENT} once, where '
                     f'the {"answer" if role == "assistant" else "message"} goes.')
  # Such as '{EOS}' or '{bos_token}', which would else be trained on letter by letter.
  unknown = [name for name in re.findall(r'\{\w+\}', text) if name not in (_CONTENT, _EOS)]
  if unknown:
    raise ValueError(f'{where}: the format of {role!r} holds {unknown[0]}; only {_CONTENT} and '
                     f'{_EOS} are replaced. BOS comes from data.bos=True.')
  before, after = text.split(_CONTENT)
  size = after.find(_EOS) + len(_EOS) if _EOS in after else len(after.rstrip()) or len(after)
  if role == 'assistant' and not size:
    raise ValueError(f'{where}: nothing follows {_CONTENT} in the format of {role!r}, so that a '
                     f'model could not learn to end an answer; put {_EOS} behind it.')
  return Format(before, after[:size], after[size:])


def rendered(template: Template, messages: Sequence[Message]) -> tuple[Part, ...]:
  """A conversation as the parts of a document, in their order; none of them is empty.

  The roles of all messages must be in the template.
  """
  parts = []
  for turn, message in enumerate(messages):
    form, is_answer = template[message.role], message.role == 'assistant'
    parts += _template_parts(form.before, turn, False)
    if message.content:  # a system message may be empty
      parts.append(Part(message.content, turn, is_answer, False))
    parts += _template_parts(form.end, turn, is_answer)
    parts += _template_parts(form.rest, turn, False)
  return tuple(parts)


def _template_parts(text: str, turn: int, is_answer: bool) -> list[Part]:
  pieces = re.split(f'({re.escape(_EOS)})', text)
  return [Part(None if piece == _EOS else piece, turn, is_answer, True)
          for piece in pieces if piece]
