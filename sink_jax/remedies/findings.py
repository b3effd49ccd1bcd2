"""What each remedy's own paper reports of sinks, drain and massive activations, and at what scale.

Only what was read in the paper or its release stands here. The numbers are of models that are a
thousand to a million times larger than those of the leaderboard: that both agree says that a
mechanism is the same, and that they do not says little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sink_jax.paper import numbers
from sink_jax.paper.metrics import METRICS
from sink_jax.remedies.standings import MOVES, REMOVES, SAME, UNDECIDED, Task

AGREES, DISAGREES, CANNOT_TELL = 'agrees', 'disagrees', 'cannot tell'
_LESS = frozenset({'reduces', REMOVES, MOVES})
_STAYS = frozenset({SAME, 'adds'})


@dataclasses.dataclass(frozen=True)
class Finding:
  """A published result on a variant.

  Attributes:
    variant: of configs/remedies.py.
    source: authors and arXiv number.
    scale: of its models.
    words: what it reports, with its numbers.
    axes: the verdicts that agree with it, by the key of the axis.
  """

  variant: str
  source: str
  scale: str
  words: str
  axes: Mapping[str, frozenset[str]]


def _of_gu(variant: str, scale: str, axes: Mapping[str, frozenset[str]]) -> Finding:
  """A result of the paper that this package reproduces, whose numbers are read where they stand."""
  row = next(row for table in numbers.TABLES for row in table.rows if row.trial == variant)
  words = [f'{METRICS[key].heading} {METRICS[key].text(value)}'
           for key, value in row.values.items() if key in METRICS and isinstance(value, float)]
  return Finding(variant, 'Gu et al., 2410.10781', scale, ', '.join(words), axes)


FINDINGS = (
    *(_of_gu(name, '60M parameters', {'concentration': _LESS, 'massive': _LESS})
      for name in ('k-bias', 'kv-bias', 'sink-token')),
    _of_gu('v-bias', '60M parameters', {'concentration': _STAYS, 'massive': _STAYS}),
    _of_gu('sigmoid', '60M and 1B parameters', {'concentration': _LESS, 'massive': _LESS}),
    _of_gu('sigmoid-normalized', '60M parameters', {'concentration': _STAYS}),
    Finding('head-gate', 'Qiu et al., 2505.06708', '15B mixtures of experts and 1.7B models',
            'mean attention to the first token 0.467 becomes 0.073, largest activation 1053 '
            'becomes 98, perplexity 6.026 becomes 5.792 (Table 4)',
            {'concentration': _LESS, 'massive': _LESS, 'loss': frozenset({'better', SAME})}),
    Finding('element-gate', 'Qiu et al., 2505.06708', '15B mixtures of experts and 1.7B models',
            'mean attention to the first token 0.467 becomes 0.048, largest activation 1053 '
            'becomes 94, perplexity 6.026 becomes 5.761 (Table 4)',
            {'concentration': _LESS, 'massive': _LESS, 'loss': frozenset({'better', SAME})}),
    Finding('softpick', 'Zuhri et al., 2504.20966', '340M and 1.8B parameters',
            'a sink rate of 0 %', {'concentration': _LESS}),
    Finding('zero-sink', 'Kaul et al., 2410.17174', 'GPT-2 and Llama-2 models',
            'softmax-1 alone is enough to reduce the attention to the first token; to reduce '
            'outliers, OrthoAdam is needed as well (Table 2)',
            {'concentration': _LESS, 'massive': _STAYS}),
    Finding('zero-sink-orthoadam', 'Kaul et al., 2410.17174', 'GPT-2 and Llama-2 models',
            'mean attention to the first token 65 % becomes 3.3 %, kurtosis 1657 becomes 3.1 '
            '(abstract)', {'concentration': _LESS, 'massive': _LESS}),
    Finding('ssnorm-muon', 'Park et al., 2506.19697', '1.4B parameters, 1T tokens',
            'excess kurtosis 1818.56 becomes 0.04 (with a learned projection of the embedding)',
            {'massive': _LESS}),
)


def compared(finding: Finding, task: Task) -> dict[str, str]:
  """{axis: AGREES, DISAGREES or CANNOT_TELL} of a finding on a task; empty where it was not run."""
  variant = next((v for v in task.variants if v.name == finding.variant), None)
  if variant is None:
    return {}
  return {key: _verdict(variant.standings[key].verdict, wanted)
          for key, wanted in finding.axes.items()}


def _verdict(found: str, wanted: frozenset[str]) -> str:
  decided = _LESS | _STAYS | {'better', 'worse'}
  if found == UNDECIDED or found not in decided:
    return CANNOT_TELL
  return AGREES if found in wanted else DISAGREES
