"""Conversations as a corpus: their files, templates, and which of their tokens are answers.

A template is one format string per role: the built-in 'zephyr', 'chatml' or 'plain', or a JSON
file. The Jinja templates of checkpoints are programs, and none is executed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sink_jax.arguments import check_known
from sink_jax.data import sources
from sink_jax.data.sources import Document, JsonLines, Part
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.files import read_text_limited
from sink_jax.io.paths import expanded

# The names of roles in files: first those of OpenAI and the hub, then those of ShareGPT.
_ROLES = {
  'system': 'system',
  'user': 'user',
  'assistant': 'assistant',
  'human': 'user',
  'gpt': 'assistant',
}
_CONTENT, _EOS = '{content}', '{eos}'
TEMPLATES = {
  # As the tokenizer_config.json of HuggingFaceH4/zephyr-7b-beta renders it. The empty system
  # message that its training recipe puts before a conversation without one is not added.
  'zephyr': {role: f'<|{role}|>\n{{content}}{{eos}}\n' for role in ('system', 'user', 'assistant')},
  # https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md
  'chatml': {
    role: f'<|im_start|>{role}\n{{content}}<|im_end|>\n' for role in ('system', 'user', 'assistant')
  },
  'plain': {
    'system': '{content}\n\n',
    'user': 'User:\n{content}\n\n',
    'assistant': 'Assistant:\n{content}{eos}\n\n',
  },
}


class ChatJsonl(JsonLines):
  """Conversations, one in each line, in .jsonl, .jsonl.gz or .jsonl.zst: one file or a folder.

  A line has a list `messages` or `conversations` of objects with `role` and `content`, or with
  `from` and `value`; roles are system, user (human) and assistant (gpt). The domain is the first
  sub-folder, else 'text'.

  Attributes:
    template: 'zephyr', 'chatml', 'plain', or a JSON file with a format for each role, such as
      {"user": "Q: {content}\\n", "assistant": "A: {content}{eos}\\n"}.
    loss: 'all' tokens, as alignment-handbook trains zephyr-7b-beta, or only 'answers', each with
      what ends it; a training batch without any answer then has the loss 0 and no gradient.
  """

  template: str = 'zephyr'
  loss: str = 'all'

  def __post_init__(self) -> None:
    check_known(self.loss, ('all', 'answers'), 'ChatJsonl: loss =')

  @property
  def answers_only(self) -> bool:
    return self.loss == 'answers'

  def fingerprint(self) -> str:
    return sources.digest_of([super().fingerprint(), load_template(self.template)])

  def _reader(self) -> Callable[[Any, str, str], Document]:
    template = load_template(self.template)

    def read(record: Any, folder: str, name: str) -> Document:
      try:
        messages = _messages(record)
      except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
          f'not a conversation ({type(error).__name__}: {error}); it is '
          '{"messages": [{"role": "user", "content": "..."}, ...]}.'
        ) from None
      if missing := {role for role, _ in messages} - set(template):
        raise ValueError(f'the template {self.template} has no format for {missing.pop()!r}.')
      parts = rendered(template, messages)
      text = ''.join(
        part.text.replace(_EOS, '') if part.is_template else part.text for part in parts
      )
      return Document(text, folder, name, parts)

    return read


def load_template(name: str) -> Mapping[str, str]:
  """The formats by role of a name in `TEMPLATES`, or of a JSON file.

  Raises:
    ValueError: there is no such file, or it is not a template; names file and role.
  """
  formats = TEMPLATES.get(name)
  if formats is None:
    path = expanded(name)
    if not path.is_file():
      raise ValueError(
        f'{name!r} is not a template: choose {", ".join(TEMPLATES)}, or a JSON file.'
      )
    formats = json.loads(read_text_limited(path))
  if not isinstance(formats, dict) or not {'user', 'assistant'} <= set(formats) <= set(_ROLES):
    raise ValueError(
      f'{name} is not a template: write {{"user": "Q: {{content}}\\n", "assistant": '
      '"A: {content}{eos}\\n"}, and "system" if there are such messages.'
    )
  for role, text in formats.items():
    # Such as '{EOS}' or '{bos_token}', which would else be trained on letter by letter.
    unknown = set(re.findall(r'\{\w+\}', str(text))) - {_CONTENT, _EOS}
    endless = role == 'assistant' and str(text).endswith(_CONTENT)
    if not isinstance(text, str) or text.count(_CONTENT) != 1 or unknown or endless:
      raise ValueError(
        f'{name}: the format of {role!r} must hold {_CONTENT} once, and apart from '
        f'it only {_EOS}, which ends an answer; for BOS set data.bos. It is '
        f'{text!r}.'
      )
  return formats


def rendered(template: Mapping[str, str], messages: Sequence[tuple[str, str]]) -> tuple[Part, ...]:
  """A conversation of (role, content) as the parts of a document; none of them is empty.

  An answer includes its end: the template's text up to the first '{eos}', else up to the last
  character that is not white space, else all.
  """
  parts = []
  for role, content in messages:
    before, after = template[role].split(_CONTENT)
    if _EOS in after:
      end = after.find(_EOS) + len(_EOS)
    else:
      end = len(after.rstrip()) or len(after)
    is_answer = role == 'assistant'
    parts += [
      Part(before, False, True),
      Part(content, is_answer, False),
      Part(after[:end], is_answer, True),
      Part(after[end:], False, True),
    ]
  return tuple(part for part in parts if part.text)


def question(template: Mapping[str, str], text: str) -> Document:
  """The message of a user, with what the template puts before the answer to it."""
  parts = rendered(template, [('user', text)])
  before, _ = template['assistant'].split(_CONTENT)
  if before:
    parts += (Part(before, False, True),)
  return Document(''.join(part.text for part in parts), 'text', '', parts)


def _messages(record: Any) -> list[tuple[str, str]]:
  """(role, content) of the messages of a line; KeyError, TypeError, ... if it has other fields."""
  listed = record['messages'] if 'messages' in record else record['conversations']
  if not isinstance(listed, list) or not listed:
    raise TypeError('no list of messages')
  messages = []
  for number, item in enumerate(listed, 1):
    role, content = ('role', 'content') if 'role' in item else ('from', 'value')
    if item[role] not in _ROLES:
      raise ValueError(
        f'message {number} has the role {str(item[role])[:60]!r}; roles are {", ".join(_ROLES)}.'
      )
    if not isinstance(item[content], str):
      raise TypeError(f'message {number} has no text')
    messages.append((_ROLES[item[role]], item[content]))
  return messages


def encode(
  documents: Sequence[Document], tokenizer: TextTokenizer
) -> list[tuple[np.ndarray, np.ndarray]]:
  """The ids and weights of documents, both (T,) int32, without BOS and EOS.

  A weight is 1 for the tokens of answers and of what ends them, and 0 for others. The parts of a
  conversation are tokenized separately, as a prompt and its answer are when a model is used: no
  token spans two of them. In the text of a template the names of special tokens become these
  tokens; in that of a message they stay letters.
  """
  special = tokenizer.special_tokens | {_EOS: tokenizer.eos_id}
  names = sorted(special, key=len, reverse=True)  # one may begin with another
  split = re.compile(f'({"|".join(map(re.escape, names))})')

  def pieces_of(document: Document) -> Iterator[tuple[str | int, bool]]:
    """(text or id of a special token, whether it is part of an answer)."""
    for part in document.parts or [Part(document.text, False, False)]:
      if not part.is_template:
        yield part.text, part.is_answer
        continue
      for piece in filter(None, split.split(part.text)):
        yield special.get(piece, piece), part.is_answer

  pieces_D = [list(pieces_of(document)) for document in documents]
  # The beginning of a document is encoded differently from its continuation.
  heads = [pieces[0][0] for pieces in pieces_D]
  tails = [text for pieces in pieces_D for text, _ in pieces[1:]]
  begin = iter(tokenizer.encode_batch([text for text in heads if isinstance(text, str)]))
  go_on = iter(_continuing([text for text in tails if isinstance(text, str)], tokenizer))
  encoded = []
  for pieces in pieces_D:
    ids = [
      [text] if isinstance(text, int) else next(go_on if i else begin)
      for i, (text, _) in enumerate(pieces)
    ]
    weights = np.repeat([is_answer for _, is_answer in pieces], list(map(len, ids)))
    encoded.append((np.concatenate(ids).astype(np.int32), weights.astype(np.int32)))
  return encoded


def _continuing(texts: list[str], tokenizer: TextTokenizer) -> list[list[int]]:
  """The ids of texts that continue another text."""
  alone = tokenizer.encode_batch(texts)
  # Tokenizers made with sentencepiece put a space before every text, which would be wrong in the
  # middle of a document. They put none after a line break.
  lead, a, both = tokenizer.encode_batch(['\n', 'a', '\na'])
  if both == lead + a:
    return alone
  behind = tokenizer.encode_batch(['\n' + text for text in texts])
  return [
    ids[len(lead) :] if len(ids) > len(lead) and ids[: len(lead)] == lead else by_itself
    for ids, by_itself in zip(behind, alone, strict=True)
  ]
