"""The records of runs in one file, to be taken from a machine."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

_RECORDS = ('metrics.jsonl', 'config.json', 'status.json', 'data.json')


def records(runs: Path) -> bytes:
  """The records of all runs, a tar file in bytes; of metrics the lines that are whole."""
  packed = io.BytesIO()
  with tarfile.open(fileobj=packed, mode='w:gz') as archive:
    for path in sorted(path for name in _RECORDS for path in runs.glob(f'*/{name}')):
      content = path.read_bytes()
      if path.suffix == '.jsonl':
        content = content[:content.rfind(b'\n') + 1]
      entry = tarfile.TarInfo(str(path.relative_to(runs)))
      entry.size, entry.mtime = len(content), path.stat().st_mtime
      archive.addfile(entry, io.BytesIO(content))
  return packed.getvalue()
