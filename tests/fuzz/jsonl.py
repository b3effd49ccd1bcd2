"""Corpora of JSON lines: plain, gzip and zstd; broken, bottomless, and of one endless line."""

from __future__ import annotations

import functools
import gzip
import json
import time

from hypothesis import strategies as st

from tests.fuzz import mutate
from tests.fuzz.inputs import File, Input, Kind

_LINES = [{'text': 'Hello.', 'meta': {'set': 'web'}}, {'text': 'Ünïcödé \U0001f600', 'id': 3},
          {'text': 'a' * 300, 'meta': {'set': 'books'}, 'score': 1.5, 'tags': ['x', None]}]
_HUGE = 1 << 30


def _prepare(folder):
  import zstandard
  plain = '\n'.join(json.dumps(line) for line in _LINES).encode() + b'\n'
  packed = {'.jsonl': plain, '.jsonl.gz': gzip.compress(plain, mtime=0),
            '.jsonl.zst': zstandard.ZstdCompressor().compress(plain)}
  for suffix, data in packed.items():
    source = Input(files={f'a{suffix}': File(data)})
    source.write(folder, {})
    _run(None, source, folder)
  return packed


def _endless(piece, total, kind):
  """So many bytes of a repeated piece, as members or frames of 16 MiB that are all the same."""
  import zstandard
  block = piece * ((1 << 24) // len(piece))
  member = (gzip.compress(block, mtime=0) if kind == 'gz'
            else zstandard.ZstdCompressor().compress(block))
  return member * (total // len(block))


@functools.cache
def _bombs(kind):
  """Small files of a gigabyte or more: one line, blank lines, short lines, brackets, digits."""
  pieces = [b'\0', b'\n', b'a', b'[', b'9', b' ', b'{"text":"a"}\n', b'{},', b'\n\n\r\n',
            b'"\\u0041']
  size = _HUGE if kind == 'gz' else 4 * _HUGE
  return [_endless(piece, size if piece == b'\0' else size // 4, kind) for piece in pieces]


def _zstd_frames():
  """Frames written by hand: one byte repeated by blocks of four bytes each, wide windows."""
  run = (b'\x28\xb5\x2f\xfd' + b'\x00\x58' + (b'\x02\x00\x10a') * 20_000 + b'\x03\x00\x10a')
  wide = [b'\x28\xb5\x2f\xfd\x00' + bytes([window]) + b'\x01\x00\x00'
          for window in range(0, 256, 8)]
  skipped = b'\x50\x2a\x4d\x18' + b'\xff\xff\xff\x7f'
  declared = b'\x28\xb5\x2f\xfd\xe0' + b'\xff' * 8 + b'\x01\x00\x00'
  return [run, run * 20, *wide, skipped, declared, b'', b'\x28\xb5\x2f\xfd']


def _inputs(prepared):
  import zstandard
  names = st.sampled_from(['a', 'web/a', '\udcff', 'a\nb', 'sub/../a', '-', '*', 'ü', 'a b', "'"])
  record = mutate.changed_json(_LINES)
  rows = st.lists(st.one_of(record, mutate.changed_bytes([json.dumps(x).encode() for x in _LINES]),
                            st.binary(max_size=50), st.just(mutate.nested())), max_size=4)
  text = rows.map(b'\n'.join)
  packed = st.one_of(
      text.map(lambda data: ('.jsonl', File(data))),
      text.map(lambda data: ('.jsonl.gz', File(gzip.compress(data, 1, mtime=0)))),
      text.map(lambda data: ('.jsonl.zst', File(zstandard.ZstdCompressor().compress(data)))),
      *[mutate.changed_bytes([data]).map(lambda x, s=suffix: (s, File(x)))
        for suffix, data in prepared.items()],
      st.sampled_from(_zstd_frames()).map(lambda data: ('.jsonl.zst', File(data))))
  monsters = st.one_of(
      st.sampled_from(range(10)).map(lambda n: ('.jsonl.gz', File(_bombs('gz')[n]))),
      st.sampled_from(range(10)).map(lambda n: ('.jsonl.zst', File(_bombs('zst')[n]))),
      st.sampled_from([File(b'{"text":"', _HUGE, b'"}'), File(b'\n' * 5, 10 * _HUGE),
                       File(link='/dev/zero'), File(link='a.jsonl'), File(link='/nowhere')]).map(
                           lambda file: ('.jsonl', file)))
  rare = st.integers(0, 199).flatmap(lambda i: packed if i else monsters)
  options = st.sampled_from([('text', ''), ('text', 'meta.set'), ('meta.set', ''), ('', ''),
                             ('.', '.'), ('meta', 'text')])
  return st.builds(lambda name, file, own: Input('\x1e'.join(own), {name + file[0]: file[1]}),
                   names, rare, options)


def _run(prepared, input, folder):
  from sink_jax.data.sources import Jsonl, held_out
  field, _, domain = input.text.partition('\x1e')
  source = Jsonl(path=str(folder), field=field or 'text', domain_field=domain)
  source.fingerprint()
  start = time.perf_counter()
  for document in source.documents():
    held_out(document.name, 0.5)
    document.text.encode()
    if time.perf_counter() - start > 5:  # it reads on, a document after the other
      return


KINDS = {'jsonl': Kind(_prepare, _inputs, _run, ('ValueError', 'OSError'), share=12)}
