"""A sink card: one page that says where a model's sinks are, whether they matter, and what to do.

Its numbers are the rows of five analyses. It has at most eleven sentences, each made from these
rows by a rule, and each number in them has a null or a control next to it.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import time
from collections.abc import Callable, Sequence
from typing import Any

from sink_jax.analyses import runner
from sink_jax.analyses.explore import explore
from sink_jax.analyses.models import Model
from sink_jax.analyses.signature import from_arrays
from sink_jax.evaluate.explored import Explored
from sink_jax.foreign import standard_promotion
from sink_jax.io.paths import AnyPath
from sink_jax.io.terminal import short
from sink_jax.models.run import Run
from sink_jax.models.sizes import flops_per_token
from sink_jax.pictures import style
from sink_jax.pictures.style import Row
from sink_jax.report import card_page
from sink_jax.report.card_page import PARTS
from sink_jax.report.explorer import with_explorer
from sink_jax.report.files import recorded, to_json, write_files
from sink_jax.report.html_page import to_html
from sink_jax.report.markdown import digits_of_runs, of_runs

FORMAT = 2  # of card.json
_LONG = {'length': 2048, 'least': 8}  # the inputs of caches in a full card


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
    """At most eleven sentences, each made from the rows by a rule."""
    rows = {part: result.rows for part, result in self.results.items()}
    return [words for part, rule in _RULES if part in rows and (words := rule(rows[part]))]

  def __str__(self) -> str:
    return '\n'.join([self.name, *self.sentences])

  def write(self, folder: AnyPath, command: str = '') -> list[AnyPath]:
    """Writes index.html, its text card.md, the rows as card.json, and a picture of each part."""
    rows = {part: result.rows for part, result in self.results.items()}
    # The arrays of another library may lack importances, which the picture of the signature shows.
    pictures = {
      f'{part}.png': style.png(result.plot())
      for part, result in self.results.items()
      if part != 'signature' or _first(result.rows, measure='importance')
    }
    page = card_page.page(self.name, self.sentences, rows, pictures, command)
    # Rows of masses without a role are many, and no picture shows them.
    stored = {
      part: [row for row in of_part if row.get('part') != 'mass' or 'role' in row]
      for part, of_part in rows.items()
    }
    inputs = {part: result.models for part, result in self.results.items()}
    found = {'format': FORMAT, 'model': self.name, 'sentences': self.sentences}
    found |= {'rows': stored, 'inputs': inputs}
    if self.explored:
      found['explorer'] = self.explored.numbers
    files = {
      'index.html': to_html(page, pictures),
      'card.md': page,
      'card.json': to_json(recorded(found)),
    }
    if self.explored:
      files['card.html'] = self._page(command)
    return write_files(folder, files | pictures)

  def _repr_html_(self) -> str:
    """The page to explore, inside of a notebook."""
    page = html.escape(self._page())
    return f'<iframe srcdoc="{page}" style="border: 0; width: 100%; height: 60rem"></iframe>'

  def _page(self, command: str = '') -> str:
    """The sentences, the heads to explore where they were measured, and the tables."""
    rows = {part: result.rows for part, result in self.results.items()}
    page = to_html(card_page.page(self.name, self.sentences, rows, (), command), {})
    return with_explorer(page, self.explored) if self.explored else page


@standard_promotion()
def card(
  run: Run, *, full: bool = False, say: Callable[[str], None] = print, **inputs: Any
) -> Card:
  """Measures a model by five analyses: `sj.card(sj.load_pretrained('SmolLM2-135M-Instruct'))`.

  Args:
    full: whether caches are measured on texts of 2,048 tokens, where the source has 8 of them.
    say: called with a line after each part.
    inputs: options of the inputs of all parts, such as source= (`analyses.models.InputOptions`).
  """
  results = {}
  for part, title in PARTS.items():
    start, chosen = time.monotonic(), dict(inputs)
    if part == 'cache' and run.probe_tokens is not None:  # the run was trained on such sequences
      chosen['length'] = run.probe_tokens.shape[1]
    elif part == 'cache' and full:
      chosen = _LONG | chosen
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
    'edits': 75,
    'cache': 5,
    'quantisation': 91 + run.config.layers,
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
  size = lambda row: f', of the same size {row["matched"]:+.2f}' if 'matched' in row else ''
  words = '; '.join(
    f'{_EDITS[row["edit"]].format(row["targets"])} {row["change"]:+.2f} nats ({row["low"]:+.2f} to '
    f'{row["high"]:+.2f}; controls {row["control_low"]:+.2f} to {row["control_high"]:+.2f}'
    f'{size(row)})'
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
  'zero the value': 'a value of zero at {} for later tokens',
  'cap the massive channels': 'a cap on {}',
  'cap the massive channels of sinks': 'a cap on {} of the sinks',
  'cap the massive channels of others': 'a cap on {} of the others',
  'remove the dormant heads': 'removing {}',
  'leave out BOS': 'leaving out {}',
}


def _moved(rows: Sequence[Row]) -> str:
  """Where the sink goes, if hiding its key everywhere costs less than in the sink heads."""
  everywhere, in_heads = (
    _first(rows, edit=edit) for edit in ('drop the key', 'drop the key in sink heads')
  )
  if not everywhere or not in_heads or 'change' not in everywhere or 'change' not in in_heads:
    return ''
  if everywhere['change'] >= in_heads['change']:
    return ''
  rate, before = 100 * everywhere['moved_rate'], 100 * everywhere['rate_before']
  moves = 'the sink moves to' if rate > 2 * before else 'no token becomes a sink, at most'
  return (
    'Hiding the key in all heads costs less than in the sink heads: '
    f'{moves} token {everywhere["moved_to"]}, which gets more than 0.3 of the attention in '
    f'{rate:.1f} % of heads and sequences, and in {before:.1f} % with the key.'
  )


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
  costs = []
  for name in ('int8 per tensor', 'int8 per token'):
    none, sinks, random = (
      _first(rows, part='all', quantiser=name, spared=spared)
      for spared in ('none', 'sinks', 'random')
    )
    if none is None or sinks is None or random is None:
      return ''
    recovered = ' and '.join(
      f'sparing {words} recovers {_cost(row, "recovered_")}'
      for words, row in (('the sinks', sinks), ('as many random tokens', random))
    )
    destroyed = ' (destroyed)' * none['destroyed']
    costs.append(f'{name} {_cost(none)}{destroyed}, of which {recovered}')
  return f'Quantised activations change the loss in nats: {"; ".join(costs)}.'


def _quantised_cache(rows: Sequence[Row]) -> str:
  costs = [
    f'{row["quantiser"]} of {row["tool"]} {_cost(row)}'
    for row in rows
    if row.get('what') == 'cache' and row['spared'] == 'none' and row.get('least') is not None
  ]
  return f'Quantised caches change the loss in nats: {"; ".join(costs)}.' if costs else ''


def _cost(row: Row, prefix: str = '') -> str:
  """'+0.08 (+0.04 to +0.12)', with the digits that runs share; 'none' within their range."""
  least, most = row[f'{prefix}least'], row[f'{prefix}most']
  mean = of_runs(row[prefix.removesuffix('_') or 'change'], least, most)
  digits = digits_of_runs(least, most)
  return f'{mean} ({row[f"{prefix}low"]:+.{digits}f} to {row[f"{prefix}high"]:+.{digits}f})'


_RULES: tuple[tuple[str, Callable[[Sequence[Row]], str]], ...] = (
  ('signature', _sink),
  ('signature', _further_sinks),
  ('signature', _massive),
  ('signature', _drained),
  ('marking', _marked),
  ('edits', _matters),
  ('edits', _moved),
  ('cache', _cache),
  ('cache', _heads),
  ('quantisation', _quantisation),
  ('quantisation', _quantised_cache),
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
