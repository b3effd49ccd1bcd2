"""Changed .npy files: headers that lie about shape, type and order, or hold code."""

from __future__ import annotations

import re
import struct

from hypothesis import strategies as st

from tests.fuzz import mutate

_TYPES = ['|O', 'O', '<i4', '>i4', '<f8', '<c16', '|S10', '<U100', '|V1000', '<M8[s]', '<i999', '',
          'object', "{'a': 'O'}", "[('a', '|O')]", "[('a', '<i4', (9, 9, 9))]", 'i4,O', '\0', '<i0',
          "[('a', '<i4'), ('a', '<i4')]", '<U999999999', '|S0', '|b1']
_SHAPES = ['(0,)', '()', '(2,2)', '(10**9,)', '(9223372036854775807,)', '(4294967296, 4294967296)',
           '(-1,)', '(1.5,)', '(None,)', '[4, 16]', '(True, 16)', '(1000000000000,)', '4',
           '(99999999999999999999999,)', '(' + '1,' * 100 + ')', '(0, 9223372036854775807)',
           '(4, 16)']


def header(descr: str, shape: str, order: str = 'False', version: bytes = b'\1\0') -> bytes:
  """The beginning of a .npy file, whatever is said of the array."""
  text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
  size = struct.pack('<H' if version[:1] == b'\1' else '<I', len(text))
  return b'\x93NUMPY' + version + size + text


def changed_npy(data: bytes):
  """Strategy of .npy files that begin like `data`, or as their header pleases."""
  body = data[10 + struct.unpack('<H', data[8:10])[0]:]
  own = st.builds(header, st.sampled_from(_TYPES).map(lambda t: t if t[:1] in '[{' and t
                                                      else repr(t)),
                  st.sampled_from(_SHAPES), st.sampled_from(['False', 'True', '1', 'None']),
                  st.sampled_from([b'\1\0', b'\2\0', b'\3\0', b'\4\0', b'\0\0']))
  code = st.sampled_from(mutate.CODE).flatmap(
      lambda text: st.sampled_from([header(text, '(4, 16)'), header("'<i4'", text)]))
  zipped = st.sampled_from([b'PK\3\4' + bytes(30), b'PK\5\6' + bytes(18), b'\x80\x04.', b'\x80'])
  put = lambda n: re.sub(b'v\0', lambda _: struct.pack('<H', n), data[:10]) + data[10:]
  lengths = st.builds(put, st.integers(0, 65535))
  return st.one_of((own | code).map(lambda head: head + body), mutate.changed_bytes([data]), zipped,
                   lengths)
