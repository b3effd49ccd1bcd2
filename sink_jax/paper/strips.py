"""A part of a claim as a small picture: its seeds and their interval against the level."""

from __future__ import annotations

import html

from sink_jax.paper.content import JudgedPart
from sink_jax.paper.metrics import METRICS

LEGEND = ('In the pictures a dot is a seed, the bar the interval of their mean, the upright line '
          "the level that is asked for, and the diamond the paper's number. Rates stand on an axis "
          'from 0 to 100 %, ratios on a logarithmic one.')
_WIDTH, _HEIGHT, _EDGE = 240, 20, 8  # pixels; the edge keeps marks at the ends whole
_MARGIN = 0.08  # of the range of the numbers, on either side of them


def strip(part: JudgedPart) -> str:
  """Inline SVG without scripts or outside resources; '' of truths, which words say better."""
  metric = METRICS[part.metric]
  if metric.unit == 'truth':
    return ''
  ends = [end for end in (part.low, part.high, part.paper) if end is not None]
  if metric.unit == 'percent' and len(part.trials) == 1:
    least, largest = 0.0, 100.0
  else:
    shown = [metric.scaled(value) for value in (*part.values, part.level, *ends)]
    least, largest = min(shown), max(shown)
    margin = _MARGIN * (largest - least) or 1.0
    least, largest = least - margin, largest + margin
  middle = _HEIGHT / 2

  def across(value: float) -> float:
    """The pixel of a value; what lies off the axis stands at its end."""
    share = (metric.scaled(value) - least) / (largest - least)
    return round(_EDGE + min(max(share, 0.0), 1.0) * (_WIDTH - 2 * _EDGE), 1)

  marks = [f'<line class="axis" x1="{_EDGE}" x2="{_WIDTH - _EDGE}" y1="{middle}" y2="{middle}"/>']
  if part.low is not None and part.high is not None:
    marks.append(f'<line class="interval" x1="{across(part.low)}" x2="{across(part.high)}" '
                 f'y1="{middle}" y2="{middle}"/>')
  level = across(part.level)
  marks.append(f'<line class="level" x1="{level}" x2="{level}" y1="1" y2="{_HEIGHT - 1}"/>')
  if part.paper is not None:
    x = across(part.paper)
    marks.append(f'<path class="paper" d="M{x} {middle - 6}l6 6l-6 6l-6 -6z"/>')
  marks += [f'<circle class="seed" cx="{across(value)}" cy="{middle}" r="2.6"/>'
            for value in part.values]
  label = html.escape(f'{part.words}, asked {part.asked}: mean {metric.text(part.mean)}'
                      f'{"*" if part.proxy else ""} of n = {part.n}', quote=True)
  return (f'<svg class="strip" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
          f'{"".join(marks)}</svg>')
