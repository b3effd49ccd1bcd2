"""Failures that may pass, after which the same command is started again, and how often.

A lost connection or a chip that is not there yet is gone a minute later; a full disk, a full device
and a mistake in the config are not. WORKDIR/restarts.json counts the starts of a run that has made
no new checkpoint since, so that a failure that never passes does not hold machines for days. What
fails before the run has its workdir, such as finding the devices, is bounded by the launchers.
"""

from __future__ import annotations

import errno
import json
import re
import socket
from collections.abc import Iterator

from sink_jax.io.files import SMALL, read_text_limited, write_atomically
from sink_jax.io.paths import AnyPath

EXIT_PASSING = 175  # the launchers start the job again, as they do after 128 and more
STARTS = 3  # of a run, without a new checkpoint; the next one is an error
# Status codes of XLA, of the runtime of several processes, and of TensorStore, which writes
# checkpoints. They begin the message.
_PASSING = re.compile(r'(UNAVAILABLE|ABORTED|DATA_LOSS|DEADLINE_EXCEEDED)\b')
_INTERNAL = re.compile(r'INTERNAL\b')
# Of devices that another process still holds, and of a process that has died.
_PASSING_WORDS = re.compile(
  r'Unable to initialize backend|[Cc]onnection (reset|closed|refused|aborted)|another task died'
)
_LASTING_WORDS = re.compile(r'RESOURCE_EXHAUSTED|Out of memory')
_LASTING_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PASSING_NUMBERS = (
  errno.ENETDOWN,
  errno.ENETUNREACH,
  errno.EHOSTDOWN,
  errno.EHOSTUNREACH,
  errno.ESTALE,  # a network file system that was mounted again
)
_HTTP_PASSING = (408, 429)  # besides 500 to 599: too slow, and too many requests


class Repeated(RuntimeError):
  """An error that would be started again, had it not come before, without a checkpoint between."""

  def __init__(self, error: BaseException):
    super().__init__(f'for the second time without a new checkpoint: {error}')


def passes(error: BaseException) -> bool:
  """True if the same command may succeed where this error, or one that caused it, is gone."""
  return _kind(error) != ''


def may_start_again(error: BaseException, workdir: AnyPath) -> bool:
  """True if `error` passes; that of a wrong kernel, INTERNAL, does so once without a checkpoint.

  Call it where the run writes its files; it remembers in restarts.json.
  """
  kind = _kind(error)
  if kind != 'internal':
    return kind == 'passing'
  count = _read(workdir)
  _write(workdir, {**count, 'internal': count.get('internal', 0) + 1})
  return not count.get('internal')


def count_start(workdir: AnyPath, checkpoint: int | None) -> None:
  """Counts a start of the run whose newest checkpoint this is.

  Raises:
    ValueError: as many starts as are allowed have ended without a new checkpoint, or two by
      INTERNAL, of which the processes of a job other than the first know nothing.
  """
  count = _read(workdir)
  if count.get('checkpoint', -1) != checkpoint:
    count = {'checkpoint': checkpoint, 'starts': 0}
  if count['starts'] >= STARTS or count.get('internal', 0) > 1:
    forget_starts(workdir)  # a person who starts it again has a reason
    raise ValueError(
      f'{workdir} was started {count["starts"]} times, and died each time before it saved a '
      f'checkpoint after step {checkpoint or 0}. Look at the errors above; a smaller '
      'checkpoint_every or checkpoint_minutes saves earlier. The same command tries again.'
    )
  _write(workdir, {**count, 'starts': count['starts'] + 1})


def forget_starts(workdir: AnyPath) -> None:
  """Lets the count begin again, after an end that is not a failure that may pass."""
  (workdir / 'restarts.json').unlink(missing_ok=True)


def _kind(error: BaseException) -> str:
  """'passing', 'internal', or '' for an error that stays."""
  kinds = [_kind_of_one(each) for each in _chain(error)]
  if 'lasting' in kinds:
    return ''
  return 'passing' if 'passing' in kinds else 'internal' if 'internal' in kinds else ''


def _kind_of_one(error: BaseException) -> str:
  message = str(error)
  if _LASTING_WORDS.search(message):
    return 'lasting'
  if isinstance(error, OSError) and error.errno in _LASTING_NUMBERS:
    return 'lasting'
  if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
    return 'passing'
  if isinstance(error, OSError) and error.errno in _PASSING_NUMBERS:
    return 'passing'
  code = _http_code(error)
  if code in _HTTP_PASSING or 500 <= code < 600:
    return 'passing'
  if _PASSING.match(message) or _PASSING_WORDS.search(message):
    return 'passing'
  return 'internal' if _INTERNAL.match(message) else ''


def _http_code(error: BaseException) -> int:
  """The status of a request to a store, which each library keeps elsewhere; 0 without one."""
  response = getattr(error, 'response', None)
  for holder, name in (
    (error, 'code'),  # gcsfs, google.api_core, urllib
    (error, 'status'),  # aiohttp
    (error, 'status_code'),
    (response, 'status_code'),  # requests, httpx
  ):
    code = getattr(holder, name, None)
    if isinstance(code, int):
      return int(code)
  # gcsfs raises a bare error where the answer was not JSON.
  found = re.match(r'(\d{3})\b', str(error)) if type(error).__name__ == 'HttpError' else None
  return int(found[1]) if found else 0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
  """An error and those that it came from."""
  seen = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    yield error
    error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _read(workdir: AnyPath) -> dict:
  try:
    count = json.loads(read_text_limited(workdir / 'restarts.json', SMALL))
    return {
      'checkpoint': count['checkpoint'],
      'starts': int(count['starts']),
      'internal': int(count.get('internal', 0)),
    }
  except (OSError, ValueError, KeyError, TypeError):
    return {}


def _write(workdir: AnyPath, count: dict) -> None:
  write_atomically(workdir / 'restarts.json', json.dumps(count))
