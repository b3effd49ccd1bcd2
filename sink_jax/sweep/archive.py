"""Packs the records of runs into one file, to be copied from a machine that is lent."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

# Small files alone: checkpoints stay where they are.
_RECORDS = ('metrics.jsonl', 'config.json', 'status.json', 'data.json')


def pack_records(runs: Path) -> bytes:
  """Returns the records of all runs below a folder as the bytes of a tar.gz file.

  A run may be writing its metrics meanwhile, so a last line that is not complete is left out.
  """
  packed = io.BytesIO()
  with tarfile.open(fileobj=packed, mode='w:gz') as archive:
    for path in sorted(path for name in _RECORDS for path in runs.glob(f'*/{name}')):
      content = path.read_bytes()
      if path.suffix == '.jsonl':
        content = content[:content.rfind(b'\n') + 1]
      entry = tarfile.TarInfo(str(path.relative_to(runs)))
      # The size of what is packed, and not that of the file, which may have grown since it was
      # read.
      entry.size, entry.mtime = len(content), path.stat().st_mtime
      archive.addfile(entry, io.BytesIO(content))
  return packed.getvalue()
