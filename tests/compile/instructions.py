"""Counts the instructions of the GPU kernels' loops over full tiles: rows of JSON.

Counts the kernels of whichever `sink_jax` is found first, so that those of an older commit
can be counted by this code; `tests.kernels.tables` does so.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from tests.compile.ptx import ptx_report
from tests.compile.test_attention import INSTRUCTIONS, SHAPES, SPECS, arguments, gradients


def rows() -> Iterator[dict[str, Any]]:
  """A row of JSON for each kernel of the attention and its gradients."""
  for spec, shape in INSTRUCTIONS:
    _, kernels = ptx_report(gradients(SPECS[spec]), *arguments(SPECS[spec], SHAPES[shape]))
    for kernel in kernels:
      if kernel.pallas:
        yield {'similarity': spec, 'kernel': kernel.name.strip('_').partition('_')[0],
               'head_dim': SHAPES[shape].head_dim, 'warps': kernel.threads // 32,
               'registers': kernel.registers, 'spilled_bytes': kernel.spilled_bytes,
               **kernel.loop._asdict(), 'matrix_share': kernel.loop.matrix_share}


if __name__ == '__main__':
  json.dump(list(rows()), sys.stdout)
