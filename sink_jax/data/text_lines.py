"""Lines of plain, gzip and zstd text files, and JSON in them, with errors that name the place."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

LONGEST = 1 << 25  # bytes of a line: read as JSON it may take thirty times as much memory
# A compressed file that expands more than this, once this many bytes of text were read, is refused.
# Text is compressed ten times, lines that repeat each other some hundred times; gzip cannot do more
# than a thousand.
_EXPANSION, _UNSUSPICIOUS = 4000, 1 << 23
_MANY = 1 << 20  # lines
_PIECE = 1 << 10  # bytes of a zstd file: a block of four bytes can stand for 128 KiB


def lines(path: pathlib.Path) -> Iterator[tuple[bytes, int]]:
  """Yields the lines of a file, decompressed by its suffix (.gz, .zst), in bounded memory.

  With each line comes the number of bytes of the file, as it is stored, that were read up to the
  end of the line.

  Raises:
    ValueError: the compressed stream is damaged, ends early or holds next to nothing, or a line is
      too long.
  """
  import zstandard
  kind = {'.gz': 'gzip', '.zst': 'zstd'}.get(path.suffix)
  if not path.is_file():  # a device has no end
    raise ValueError(f'{path} is not a file.')
  with open(path, 'rb') as stored:
    file = {'gzip': lambda: io.BufferedReader(gzip.GzipFile(fileobj=stored)),
            'zstd': lambda: io.BufferedReader(_ZstdFile(stored)), None: lambda: stored}[kind]()
    number, read, check_at = 0, 0, _UNSUSPICIOUS
    try:
      while line := file.readline(LONGEST + 1):
        number, read = number + 1, read + len(line)
        if kind and read > check_at:
          check_at += LONGEST
          if read > _EXPANSION * stored.tell():
            raise ValueError(f'{path}: {stored.tell()} bytes of it stand for {read}, so it hardly '
                             'holds text; decompress it, if it does.')
        if kind and number == _MANY and read < 3 * number:  # a flood takes minutes to walk through
          raise ValueError(f'{path}: nearly all of its first {number} lines are empty, so it '
                           'hardly holds text; decompress it, if it does.')
        if len(line) > LONGEST:
          raise ValueError(f'{path}, line {number} is longer than {LONGEST} bytes; split the '
                           'document.')
        yield line, stored.tell() if kind else read
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
      raise ValueError(f'{path}: damaged or truncated {kind} file ({error}); '
                       'copy or download it again, or remove it.') from error


def json_value(line: bytes, where: str) -> Any:
  """What a line of JSON holds.

  Raises:
    ValueError: it is not JSON; the message begins with `where`.
  """
  try:
    return json.loads(line)
  except UnicodeDecodeError as error:
    raise ValueError(f'{where}: not UTF-8 at byte {error.start}: iconv -t UTF-8.') from None
  except (ValueError, RecursionError) as error:  # among them JSONDecodeError
    raise ValueError(f'{where}: not a JSON object ({error}); a last line that fails means a '
                     'truncated file: copy it again, or remove the line.') from None


def whole_characters(text: str) -> str:
  """The text, with a replacement character for each half of a surrogate pair, which has no UTF-8.

  JSON escapes can spell one.
  """
  try:
    text.encode()
  except UnicodeEncodeError:
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
  return text


class _ZstdFile(io.RawIOBase):
  """The content of all frames of a file.

  The library's file readers take an early end for the end of the file, and its decompressor has no
  bound on the size that a piece expands to. So the frames are walked here, in small pieces.
  """

  def __init__(self, stored: BinaryIO):
    import zstandard
    self._stored, self._zstandard = stored, zstandard
    self._decompressor, self._frame = zstandard.ZstdDecompressor(), None
    self._rest, self._ready = b'', memoryview(b'')

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:  # anything with a writable buffer
    while not self._ready:
      data = self._rest or self._stored.read(_PIECE)
      if not data:
        if self._frame is not None:
          raise self._zstandard.ZstdError('the stream ends inside a frame')
        return 0
      self._frame = self._frame or self._decompressor.decompressobj()
      self._ready = memoryview(self._frame.decompress(data))
      if self._frame.eof:  # the bytes that follow are another frame
        self._rest, self._frame = self._frame.unused_data, None
      else:
        self._rest = b''
    count = min(len(buffer), len(self._ready))
    buffer[:count] = self._ready[:count]
    self._ready = self._ready[count:]
    return count
