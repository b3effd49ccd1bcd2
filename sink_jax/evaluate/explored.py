"""The numbers and attention maps of every head of a model, for a page to explore them."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from sink_jax.evaluate.probe import probed
from sink_jax.evaluate.sink_report import SinkReport
from sink_jax.io.files import read_text_limited, write_atomically
from sink_jax.io.paths import AnyPath, inside
from sink_jax.models.record import RecordOptions, maps
from sink_jax.models.run import Run

MOST_STEPS = 20  # of a training run that keeps maps
_TOKENS = 10  # whose importance is known
_LENGTH, _FEWER, _MANY = 64, 32, 512  # tokens of a map; fewer in models of many heads
_KEPT = 0.95  # of the attention, within the distance
_EPSILONS = [n / 100 for n in range(1, 100)]


@dataclasses.dataclass(frozen=True, eq=False)
class Explored:
  """What is known of N layers of H heads, with maps of S texts of T tokens, P = T (T + 1) / 2.

  Attributes:
    numbers: `blocks`, from 1; `importance` [N][H][k] of the first tokens; `epsilons`, and
      `sink_rates` [k][epsilon] in percent; by layer and head `entropy`, as a share of uniform
      attention's, `value_ratio` and `key_ratio`, of the first token's norm to the others', and
      `distance`, in tokens, within which a head keeps 95 % of its attention. One for all texts, or,
      of a training run, one for each step.
    texts: the tokens of each text as words; of a run one text.
    roots_SxNxHxP: square roots of the attention weights, 255 for 1, of the lower triangles by rows;
      S counts texts, or the steps of a run.
    steps: of a run.
  """

  numbers: Sequence[dict[str, Any]]
  texts: Sequence[Sequence[str]]
  roots_SxNxHxP: UInt8[np.ndarray, 'S N H P']
  steps: Sequence[int] = ()

  @property
  def packed(self) -> str:
    """The roots as text."""
    return pack(self.roots_SxNxHxP.tobytes())


def pack(content: bytes) -> str:
  """Base64 of deflated bytes."""
  return base64.b64encode(zlib.compress(content, 9)).decode()


def explored(
  run: Run, report: SinkReport, tokens_SxT: np.ndarray, dtype: str
) -> tuple[Explored, np.ndarray]:
  """The numbers of a probe and the maps of some texts of it, and the ids (S, T) of the maps.

  A map has the first 64 tokens of a text, in a model of more than 512 heads the first 32, so that
  a page stays small. Where rows of weights do not sum to one, weights are the proxy scores.
  """
  layers, heads = report.importance.shape[1:3]
  shown_SxT = tokens_SxT[:, : _LENGTH if layers * heads <= _MANY else _FEWER]
  run = dataclasses.replace(run, config=probed(run.config, dtype))
  weights = []
  for tokens_T in shown_SxT:  # a text at a time: each has all heads
    recorded = run.record(tokens_T[None], RecordOptions(attention=maps)).layers.attention
    weights.append(np.asarray(recorded.proxy_BxHxTxT)[:, 0])
  weights_SxNxHxTxT = np.stack(weights)
  numbers = _numbers(report) | {'distance': _distances(weights_SxNxHxTxT).tolist()}
  queries, keys = np.tril_indices(shown_SxT.shape[1])
  lower_SxNxHxP = weights_SxNxHxTxT[..., queries, keys]
  roots_SxNxHxP = np.rint(255 * np.sqrt(np.clip(lower_SxNxHxP, 0, 1))).astype(np.uint8)
  return Explored([numbers], [], roots_SxNxHxP), shown_SxT


def keep(folder: AnyPath, step: int, run: Run, report: SinkReport, tokens_1xT: np.ndarray) -> None:
  """Writes what is known of a training run at a step, with the maps of one text, to STEP.json.

  Every process calls it, and the first writes. Continuous inputs have numbers as words.
  """
  found, shown_1xT = explored(run, report, tokens_1xT, report.protocol['dtype'])
  shape = found.roots_SxNxHxP.shape[1:]
  ids = shown_1xT[0].tolist() if shown_1xT.ndim == 2 else list(range(1, shown_1xT.shape[1] + 1))
  content = {'numbers': found.numbers[0], 'ids': ids, 'shape': shape, 'roots': found.packed}
  if jax.process_index() == 0:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f'{step}.json', json.dumps(content) + '\n')


def kept(folder: AnyPath) -> tuple[Explored, list[int]] | None:
  """What `keep` wrote at all steps, and the ids of the text; None where it wrote nothing.

  Raises:
    ValueError: a file is not one that `keep` writes.
  """
  if not folder.is_dir():
    return None
  steps = sorted(int(path.stem) for path in folder.glob('*.json') if path.stem.isdecimal())
  numbers, roots, ids = [], [], []
  for step in steps[:MOST_STEPS]:
    path = inside(folder, f'{step}.json')
    try:
      content = json.loads(read_text_limited(path))
      numbers.append(content['numbers'])
      data = zlib.decompress(base64.b64decode(content['roots']))
      roots.append(np.frombuffer(data, np.uint8).reshape(content['shape']))
      ids = content['ids']
    except (ValueError, KeyError, TypeError, zlib.error) as error:
      raise ValueError(f'{path} does not hold maps of a run ({error}): remove it.') from None
  return (Explored(numbers, [], np.stack(roots), steps), ids) if steps else None


def _numbers(report: SinkReport) -> dict[str, Any]:
  alpha_NxHxK = report.importance[..., :_TOKENS].mean(0, np.float64)
  heads = alpha_NxHxK.shape[1]
  rates_ExK = [100 * report.sink_rates(epsilon)[:_TOKENS] for epsilon in _EPSILONS]
  ratios = {}
  for kind in ('value', 'key'):
    mean_NxHkvxT = report.norms[kind].mean(0, np.float64)
    others_NxHkv = np.maximum(mean_NxHkvxT[..., 1:].mean(-1), np.finfo(np.float32).tiny)
    ratio_NxHkv = mean_NxHkvxT[..., 0] / others_NxHkv
    ratios[f'{kind}_ratio'] = np.repeat(ratio_NxHkv, heads // ratio_NxHkv.shape[1], 1)
  assert report.entropy is not None
  return {
    'blocks': report.protocol['blocks'],
    'epsilons': _EPSILONS,
    'sink_rates': _rounded(np.transpose(rates_ExK)),
    'importance': _rounded(alpha_NxHxK),
    'entropy': _rounded(report.entropy.mean(0)),
    **{name: _rounded(ratio_NxH) for name, ratio_NxH in ratios.items()},
  }


def _distances(weights_SxNxHxTxT: np.ndarray) -> np.ndarray:
  """The smallest distance (N, H) in tokens within which 95 % of the attention of all queries is."""
  mean_NxHxTxT = weights_SxNxHxTxT.mean(0, np.float64)
  length = mean_NxHxTxT.shape[-1]
  diagonals = [np.trace(mean_NxHxTxT, -distance, 2, 3) for distance in range(length)]
  kept_TxNxH = np.cumsum(diagonals, 0)
  return (kept_TxNxH >= _KEPT * kept_TxNxH[-1]).argmax(0)


def _rounded(x: Any) -> Any:
  """Nested lists of numbers with four digits; None for what is not finite."""
  if np.ndim(x):
    return [_rounded(part) for part in x]
  return float(f'{x:.4g}') if math.isfinite(x) else None
