"""A sink card: one page that says where a model's sinks are, whether they matter, and what to do.

Its numbers are the rows of five analyses. It has at most nine sentences, each made from these rows
by a rule, and each number in them has a null or a control next to it.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sink_jax.analyses import runner
from sink_jax.analyses.explore import explore
from sink_jax.analyses.models import Model
from sink_jax.analyses.pictures import Row
from sink_jax.analyses.signature import from_arrays
from sink_jax.evaluate.explored import Explored
from sink_jax.foreign import standard_promotion
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath
from sink_jax.io.terminal import short
from sink_jax.models.run import Run
from sink_jax.models.sizes import flops_per_token
from sink_jax.report import card_page
from sink_jax.report.card_page import PARTS
from sink_jax.report.explorer import with_explorer
from sink_jax.report.model_page import to_html


@dataclasses.dataclass(frozen=True, eq=False)
class Card:
  """The card of a model.

  results: {name: result} of the five analyses, or of some of them. explored: the heads of the page
  to explore, None where only arrays are known.
  """

  name: str
  results: dict[str, runner.Result]
  explored: Explored | None = None

  @property
  def sentences(self) -> list[str]:
    """At most nine sentences, each made from the rows by a rule."""
    rows = {part: result.rows for part, result in self.results.items()}
    return [words for part, rule in _RULES if part in rows and (words := rule(rows[part]))]

  def __str__(self) -> str:
    return '\n'.join([self.name, *self.sentences])

  def write(self, folder: AnyPath, command: str = '') -> list[AnyPath]:
    """Writes index.html, its text card.md, a picture of each part, and the rows as card.json."""
    folder.mkdir(parents=True, exist_ok=True)
    # The arrays of another library may lack importances, which the picture of the signature shows.
    drawn = [
      part
      for part, result in self.results.items()
      if part != 'signature' or _first(result.rows, measure='importance')
    ]
    for part in drawn:
      self.results[part].plot(folder / f'{part}.png')
    all_rows = {part: result.rows for part, result in self.results.items()}
    text = card_page.page(self.name, self.sentences, all_rows, drawn, command)
    write_atomically(folder / 'card.md', text)
    # Rows of masses without a role are many, and no picture shows them.
    rows = {
      part: [row for row in result.rows if row.get('part') != 'mass' or 'role' in row]
      for part, result in self.results.items()
    }
    write_atomically(
      folder / 'card.json',
      json.dumps(
        {
          'model': self.name,
          'sentences': self.sentences,
          'rows': rows,
          'inputs': {part: result.models for part, result in self.results.items()},
          **({'explorer': self.explored.numbers} if self.explored else {}),
        },
        indent=0,
      )
      + '\n',
    )
    write_atomically(folder / 'index.html', to_html(text, folder))
    names = ['index.html', 'card.md', 'card.json']
    if self.explored:
      write_atomically(folder / 'card.html', self._page(command))
      names.append('card.html')
    return [folder / name for name in names]

  def _repr_html_(self) -> str:
    """The page to explore, inside of a notebook."""
    page = html.escape(self._page())
    return f'<iframe srcdoc="{page}" style="border: 0; width: 100%; height: 60rem"></iframe>'

  def _page(self, command: str = '') -> str:
    """The sentences, the heads to explore where they were measured, and the tables."""
    all_rows = {part: result.rows for part, result in self.results.items()}
    text = card_page.page(self.name, self.sentences, all_rows, (), command)
    page = to_html(text, Path())  # without pictures
    return with_explorer(page, self.explored) if self.explored else page


@standard_promotion()
def card(run: Run, *, say: Callable[[str], None] = print, **inputs: Any) -> Card:
  """Measures a model by five analyses: `sj.card(sj.load_pretrained('SmolLM2-135M-Instruct'))`.

  Args:
    say: called with a line after each part.
    inputs: options of the inputs of all parts, such as source= (`analyses.models.InputOptions`).
  """
  results = {}
  for part, title in PARTS.items():
    start, chosen = time.monotonic(), dict(inputs)
    if part == 'cache' and run.probe_tokens is not None:  # the run was trained on such sequences
      chosen['length'] = run.probe_tokens.shape[1]
    results[part] = runner.analyse(part, run, **chosen)
    say(f'{title}: {time.monotonic() - start:.0f} s')
  # On the texts of the signature, so that the page shows the numbers of its sentences.
  inputs_of_signature = dataclasses.replace(runner.find('signature').inputs, **inputs)
  explored = explore(Model(run, inputs_of_signature))
  return Card(run.name or 'model', results, explored)


def cost(run: Run) -> str:
  """The cost of a card in words: tokens of forward passes by part, and FLOPs of matrix products."""
  flops, words = 0.0, []
  for part, passes in {
    'signature': 3,
    'marking': 28,
    'edits': 48,
    'cache': 6,
    'quantisation': 96 + run.config.layers,
  }.items():
    inputs = runner.find(part).inputs
    tokens = passes * inputs.sequences * inputs.length
    flops += tokens * flops_per_token(run.config, inputs.length) / 3
    words.append(f'{short(tokens)} tokens ({part})')
  return f'forward passes of about {", ".join(words)}: {flops:.1e} FLOPs in matrix products'


@standard_promotion()
def card_of(*, name: str = 'model', **arrays: Any) -> Card:
  """The card of another library's model, from its arrays; the other analyses need the model.

  Without lengths or mask, padding on the right counts as text, since it cannot be recognised.

  Args:
    arrays: as in `analyses.signature.from_arrays`: importance or attentions, hidden, values, keys,
      heads, and of a padded batch lengths (S,) or mask (S, T).

  Raises:
    ValueError: a shape does not fit, also to that of another array, a number is not finite, or an
      importance or a map is not one.
  """
  rows = from_arrays(name=name, **arrays)
  return Card(name, {'signature': runner.Result(runner.find('signature'), rows, [])})


def _sink(rows: Sequence[Row]) -> str:
  row = _first(rows, measure='sink rate', position=1)
  if row is None:
    return ''
  nulls = _nulls(row, 100)
  if not row['beyond']:
    return (
      f'The first token is not shown to be a sink: Sink_1 is {100 * row["value"]:.1f} % '
      f'({100 * row["low"]:.1f} to {100 * row["high"]:.1f} %; {nulls}).'
    )
  return (
    f'The first token is a sink: in {100 * row["value"]:.1f} % of heads and sequences it gets more '
    f'than 0.3 of the attention ({100 * row["low"]:.1f} to {100 * row["high"]:.1f} %; {nulls}).'
  )


def _further_sinks(rows: Sequence[Row]) -> str:
  found = [
    row for row in rows if row['measure'] == 'sink rate' and row['position'] > 1 and row['beyond']
  ]
  words = ', '.join(
    f'token {row["position"]} ({100 * row["value"]:.1f} %; {_nulls(row, 100)})' for row in found[:3]
  )
  if not found:
    return ''
  return f'{len(found)} further token{"s are sinks" if len(found) > 1 else " is a sink"}: {words}.'


def _effect(measure: str, words: str, rows: Sequence[Row]) -> str:
  row = _first(rows, measure=measure)
  return words.format(**row, nulls=_nulls(row)) if row and row['beyond'] else ''


_massive = functools.partial(
  _effect,
  'massive activation',
  (
    'Token {position} has a massive activation in channel {channel} after block {block}: '
    '{value:,.0f} times the median ({nulls}).'
  ),
)
_drained = functools.partial(
  _effect,
  'value norm ratio',
  (
    'The value of the first token is {value:.2f} times as long as those of the others in block '
    '{block} ({nulls}).'
  ),
)


def _marked(rows: Sequence[Row]) -> str:
  """The addition without which least of the sink is left; '' where none is shown to mark it."""
  marking = [row for row in rows if row.get('marks')]
  if not marking:
    return ''
  row = min(marking, key=lambda row: row['left'])
  return (
    f"Block {row['block']}'s {row['what']} marks the first token: it adds {_number(row['along'])} "
    'along the direction that this token has in the middle of the model (random positions: up to '
    f'{_number(row["along_random"])}). Without this addition Sink_1 is {row["left"]:.1f} % instead '
    f'of {row["sink_1"]:.1f} % (without that at a random position: {row["control_low"]:.1f} to '
    f'{row["control_high"]:.1f} %).'
  )


def _matters(rows: Sequence[Row]) -> str:
  made = [row for row in rows if 'change' in row]
  words = '; '.join(
    f'{_EDITS[row["edit"]].format(row["targets"])} {row["change"]:+.2f} nats ({row["low"]:+.2f} to '
    f'{row["high"]:+.2f}; controls {row["control_low"]:+.2f} to {row["control_high"]:+.2f})'
    for row in made
  )
  beyond = f'{sum(row["beyond"] for row in made)} of {len(made)} edits'
  return (
    f'{beyond} cost more than each of their controls, and at least 1 % of the loss: {words}.'
    if made
    else ''
  )


_EDITS = {
  'drop the key': 'hiding the key of {} in all heads',
  'drop the key in sink heads': 'hiding the key of {}',
  'zero the value': 'a value of zero at {}',
  'cap the massive channels': 'a cap on {}',
  'remove the dormant heads': 'removing {}',
  'leave out BOS': 'leaving out {}',
}


def _cache(rows: Sequence[Row]) -> str:
  advice, tried = (
    _first(rows, part='advice'),
    [row for row in rows if row['part'] == 'cache' and 'change' in row],
  )
  if advice is None or not tried:
    return ''
  best = min(
    (row for row in tried if row['first']), key=lambda row: row['change'], default=tried[0]
  )
  at = best if 'size' not in advice else {'size': advice['size'], 'first': advice['sinks']}
  words = advice['words']
  if at is best:
    words += (
      f' The best, the first {best["first"]} and the last {best["recent"]} tokens, changes the '
      f'loss by {best["change"]:+.1f} % ({best["low"]:+.1f} to {best["high"]:+.1f}).'
    )
  control = _first(tried, size=at['size'], first=0)
  return words + (
    f' Without first tokens: {control["change"]:+.1f} %.' if control and at['first'] else ''
  )


def _heads(rows: Sequence[Row]) -> str:
  roles = [row for row in rows if 'role' in row]
  if not roles:
    return ''
  streams = sum(row['role'] == 'streams' for row in roles)
  return (
    f'{streams} of {len(roles)} heads stream: they keep 95 % of their attention on the first '
    f'{roles[0]["first"]} and the last {roles[0]["recent"]} tokens (uniform attention would keep '
    f'{100 * roles[0]["uniform"]:.0f} %).'
  )


def _quantisation(rows: Sequence[Row]) -> str:
  found = []
  for scale in ('per tensor', 'per token'):
    of = {
      row['spared']: row
      for row in rows
      if row['part'] == 'all'
      and row['what'] == 'activations'
      and row['bits'] == 8
      and row['scale'] == scale
    }
    none, sinks, random = of['none'], of['sinks'], of['random']
    found.append(
      f'{none["change"]:+.2f} nats {scale}{" (destroyed)" if none["destroyed"] else ""}, of '
      f'which sparing the sinks recovers {sinks["recovered"]:.2f} '
      f'({sinks["recovered_low"]:.2f} to {sinks["recovered_high"]:.2f}) and sparing as many '
      f'random tokens {random["recovered"]:.2f}'
    )
  return f'Activations of 8 bits cost {"; ".join(found)}.'


_RULES: tuple[tuple[str, Callable[[Sequence[Row]], str]], ...] = (
  ('signature', _sink),
  ('signature', _further_sinks),
  ('signature', _massive),
  ('signature', _drained),
  ('marking', _marked),
  ('edits', _matters),
  ('cache', _cache),
  ('cache', _heads),
  ('quantisation', _quantisation),
)


def _first(rows: Sequence[Row], **values: Any) -> Row | None:
  """The first row with these values."""
  return next(
    (row for row in rows if all(row.get(key) == value for key, value in values.items())), None
  )


def _nulls(row: Row, times: float = 1) -> str:
  """The nulls and control of a measure: 'nulls: no effect 0, untrained 0; shuffled text 72.8'."""
  number = lambda x: _number(times * x)
  words = {'uniform': 'no effect', 'random_positions': 'random positions', 'untrained': 'untrained'}
  nulls = ', '.join(
    f'{word} {number(row[name])}' for name, word in words.items() if row.get(name) is not None
  )
  return f'nulls: {nulls}' + (
    f'; shuffled text {number(row["shuffled"])}' if row.get('shuffled') is not None else ''
  )


def _number(x: float) -> str:
  return f'{x:,.0f}' if x >= 1000 else f'{x:.3g}'
