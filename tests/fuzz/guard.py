"""What reading an input may not do: run code, reach the network, write elsewhere, eat memory."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import resource
import socket
import sys
import typing

LIMIT = 2 << 30  # bytes of address space


class Forbidden(BaseException):
  """Raised in the place of a forbidden action, which thereby does not happen."""


# The event's arguments that are paths which it changes.
_CHANGING = {
    'os.rename': (0, 1), 'os.remove': (0,), 'os.rmdir': (0,), 'os.mkdir': (0,), 'os.link': (0, 1),
    'os.symlink': (1,), 'os.truncate': (0,), 'os.chmod': (0,), 'os.chown': (0,), 'os.utime': (0,),
    'os.setxattr': (0,), 'os.removexattr': (0,), 'shutil.rmtree': (0,), 'shutil.move': (0, 1),
    'shutil.copyfile': (1,), 'tempfile.mkstemp': (0,), 'tempfile.mkdtemp': (0,)}
_NEVER = ('subprocess.', 'os.system', 'os.exec', 'os.posix_spawn', 'os.spawn', 'os.fork',
          'os.startfile', 'socket.', 'urllib.', 'http.', 'ftplib.', 'smtplib.', 'pty.spawn',
          'pickle.find_class', 'marshal.', 'ctypes.dlopen', 'code.__new__', 'os.kill', 'os.putenv',
          'webbrowser.', 'cpython.run_')
# They execute what they write themselves: annotations, and methods of new classes.
_MAKERS = (typing.__file__, dataclasses.__file__, collections.__file__)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard:
  """Watches what happens while an input is read; there is one a process.

  Args:
    scratch: the only folder that may be written to.
    trusted: folders of installed programs; importing from there is not the input's doing,
      unless the input names the module.
  """

  def __init__(self, scratch, trusted=()):
    self._scratch = os.path.realpath(scratch)
    self._trusted = tuple(os.path.realpath(t) + os.sep for t in (
        sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *trusted))
    self._text, self._on = '', False
    self.seen: list[str] = []
    sys.addaudithook(self._hook)

  @contextlib.contextmanager
  def watching(self, text: str):
    """Watches; text: all that the input says."""
    self._text, self._on, self.seen = text, True, []
    try:
      yield self
    finally:
      self._on = False

  def _hook(self, event, arguments):
    if not self._on:
      return
    self._on = False  # what the judgement itself does is not the input's
    try:
      wrong = self._judge(event, arguments)
    finally:
      self._on = True
    if wrong:
      self.seen.append(f'{event}: {wrong}')
      raise Forbidden(self.seen[-1])

  def _judge(self, event, arguments):
    if event == 'open':
      return self._opened(*arguments)
    if event == 'import':
      return self._imported(arguments[0])
    if event in ('exec', 'compile'):
      return self._code(event, arguments)
    if event in _CHANGING:
      return next(filter(None, (self._outside(arguments[i]) for i in _CHANGING[event])), None)
    if event == 'socket.__new__' and arguments[1] == socket.AF_UNIX:
      return None  # an event loop wakes itself by a pair of these
    if event == 'marshal.loads' and sys._getframe(2).f_code.co_filename.startswith('<frozen'):
      return None  # an import, which is judged as such
    if event.startswith(_NEVER):
      return repr(arguments)[:200]
    return None

  def _opened(self, path, mode, flags):
    writes = set(mode or '') & set('wax+') or (flags or 0) & _WRITING
    return self._outside(path) if writes else None

  def _outside(self, path):
    if isinstance(path, int) or path is None:
      return None
    path = os.path.realpath(os.fsdecode(path))
    inside = path == os.devnull or (path + os.sep).startswith(self._scratch + os.sep)
    return None if inside else repr(path)

  def _imported(self, name):
    top = name.partition('.')[0]
    return repr(name) if top not in sys.modules and top in self._text else None

  def _code(self, event, arguments):
    """Only modules of installed programs, and the annotations of their classes, are executed."""
    if event == 'compile':
      # Into a tree alone, by ast.parse: nothing is executed, or 'exec' would be seen.
      return None
    code = arguments[0]
    file, frame = os.path.realpath(code.co_filename), sys._getframe(3)
    if file.startswith(self._trusted) or code.co_filename.startswith('<frozen'):
      return None
    if frame.f_code.co_filename in _MAKERS:
      return None
    return f'{code.co_filename}: {code.co_name} {code.co_names}'


def limit_memory(limit: int = LIMIT) -> dict[str, int]:
  """Limits the address space of this process; returns what was in use, and the limit.

  Where half a gigabyte would not be left, the limit is above what is in use.
  """
  used = memory()['VmSize']
  limit = limit if used < limit - (limit >> 3) else used + limit
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  return {'address_space_before': used, 'limit': limit}


def memory() -> dict[str, int]:
  """VmSize, VmHWM and others of this process in bytes."""
  with open('/proc/self/status') as file:
    rows = (line.split() for line in file if line.startswith('Vm'))
    return {row[0].rstrip(':'): int(row[1]) * 1024 for row in rows}
