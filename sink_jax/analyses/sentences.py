"""The sentences of a sink card: fixed rules make them from the rows of its analyses.

Signature and edits may have been measured on several texts (column `source_text`). A finding is
said once, with the range of its numbers over the texts that have it, and with the names of these
texts. Findings in all texts come first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from sink_jax.analyses.runner import SOURCE_TEXT
from sink_jax.pictures.style import Row, groups
from sink_jax.report.markdown import digits_of_runs, of_runs

Findings = dict[Hashable, Row]  # of the rows of one text, by what texts must agree in


class _Said(NamedTuple):
  words: str
  everywhere: bool = False  # in all of several texts


def sentences(rows: Mapping[str, Sequence[Row]]) -> list[str]:
  """The sentences of {part: rows of its analysis}, of some of the parts of a card."""
  said = [each for part, rule in _RULES if part in rows for each in rule(rows[part])]
  said.sort(key=lambda each: not each.everywhere)
  return [each.words for each in said if each.words]


def first(rows: Sequence[Row], **values: Any) -> Row | None:
  """The first row with these values."""
  return next(
    (row for row in rows if all(row.get(key) == value for key, value in values.items())), None
  )


def by_text(rows: Sequence[Row]) -> dict[str, list[Row]]:
  """{name of a text: its rows}; the name is '' if there is only one."""
  found: dict[str, list[Row]] = {}
  for row in rows:
    found.setdefault(row.get(SOURCE_TEXT, ''), []).append(row)
  return found


def _grouped(
  find: Callable[[Sequence[Row]], Findings], rows: Sequence[Row]
) -> dict[tuple[str, ...], list[list[Row]]]:
  """{texts: findings that are in these texts and in no other, each a list of its rows}."""
  found: dict[Hashable, dict[str, Row]] = {}
  for text, of_text in by_text(rows).items():
    for key, row in find(of_text).items():
      found.setdefault(key, {})[text] = row
  grouped: dict[tuple[str, ...], list[list[Row]]] = {}
  for of_texts in found.values():
    grouped.setdefault(tuple(of_texts), []).append(list(of_texts.values()))
  return dict(sorted(grouped.items(), key=lambda item: -len(item[0])))


def _in_texts(texts: Sequence[str], rows: Sequence[Row]) -> str:
  """'in all texts (docstrings, code, manual)' or 'in code (not in docstrings)'; '' for one."""
  names = list(by_text(rows))
  if len(names) == 1:
    return ''
  others = [name for name in names if name not in texts]
  if not others:
    return f'in all texts ({", ".join(names)})'
  return f'in {" and ".join(texts)} (not in {" and ".join(others)})'


def _finding(
  find: Callable[[Sequence[Row]], Findings],
  words: Callable[[list[list[Row]]], str],
  otherwise: Callable[[Sequence[Row]], str] = lambda rows: '',
) -> Callable[[Sequence[Row]], list[_Said]]:
  """A rule that says which texts have a finding.

  words: of findings, of each its rows in the texts that have it. otherwise: if no text has one.
  """

  def rule(rows: Sequence[Row]) -> list[_Said]:
    said = []
    for texts, findings in _grouped(find, rows).items():
      sentence, where = words(findings), _in_texts(texts, rows)
      if where:
        sentence = f'{where.capitalize()}, {sentence[0].lower()}{sentence[1:]}'
      said.append(_Said(sentence, where.startswith('in all')))
    return said or [_Said(otherwise(rows))]

  return rule


def _one_text(words: Callable[[Sequence[Row]], str]) -> Callable[[Sequence[Row]], list[_Said]]:
  """A rule about rows of one text."""
  return lambda rows: [_Said(words(rows))]


def _span(rows: Sequence[Row], key: str, form: Callable[[float], str]) -> str:
  """'0.11', or '0.11 to 0.13' if rows differ."""
  values = [row[key] for row in rows]
  ends = dict.fromkeys(map(form, (min(values), max(values))))
  return ' to '.join(ends)


def _interval(rows: Sequence[Row], form: Callable[[float], str]) -> str:
  """From the lowest bound of all rows to the highest."""
  return f'{form(min(row["low"] for row in rows))} to {form(max(row["high"] for row in rows))}'


def _number(x: float) -> str:
  return f'{x:,.0f}' if x >= 1000 else f'{x:.3g}'


def _percent(x: float) -> str:
  return f'{100 * x:.1f}'


def _nats(x: float) -> str:
  return f'{x:+.2f}'


_NULLS = {
  'uniform': 'no effect',
  'random_positions': 'random positions',
  'untrained': 'untrained',
}


def _nulls(rows: Sequence[Row], times: float = 1) -> str:
  """The nulls and control of a measure: 'nulls: no effect 0, untrained 0; shuffled text 72.8'."""
  number = lambda x: _number(times * x)
  known = lambda name: all(row.get(name) is not None for row in rows)
  nulls = [f'{word} {_span(rows, name, number)}' for name, word in _NULLS.items() if known(name)]
  control = f'; shuffled text {_span(rows, "shuffled", number)}' if known('shuffled') else ''
  return f'nulls: {", ".join(nulls)}{control}'


def _find_sink(rows: Sequence[Row]) -> Findings:
  row = first(rows, measure='sink rate', position=1)
  return {'sink': row} if row and row['beyond'] else {}


def _sink(findings: list[list[Row]]) -> str:
  [rows] = findings
  return (
    f'The first token is a sink: in {_span(rows, "value", _percent)} % of heads and sequences it '
    f'gets more than 0.3 of the attention (99 % interval {_interval(rows, _percent)} %; '
    f'{_nulls(rows, 100)}).'
  )


def _no_sink(rows: Sequence[Row]) -> str:
  rates = [row for row in rows if row['measure'] == 'sink rate' and row['position'] == 1]
  if not rates:
    return ''
  where = ' in any text' if len(rates) > 1 else ''
  return (
    f'The first token is not shown to be a sink{where}: Sink_1 is '
    f'{_span(rates, "value", _percent)} % ({_interval(rates, _percent)} %; {_nulls(rates, 100)}).'
  )


def _find_further(rows: Sequence[Row]) -> Findings:
  return {
    row['position']: row
    for row in rows
    if row['measure'] == 'sink rate' and row['position'] > 1 and row['beyond']
  }


def _further(findings: list[list[Row]]) -> str:
  words = ', '.join(
    f'token {rows[0]["position"]} ({_span(rows, "value", _percent)} %; {_nulls(rows, 100)})'
    for rows in findings[:3]
  )
  count = len(findings)
  return f'{count} further token{"s are sinks" if count > 1 else " is a sink"}: {words}.'


def _find_effect(measure: str, same: tuple[str, ...], rows: Sequence[Row]) -> Findings:
  """The row of a measure, if it is beyond; texts must agree in the columns `same`."""
  row = first(rows, measure=measure)
  return {tuple(row[name] for name in same): row} if row and row['beyond'] else {}


def _massive(findings: list[list[Row]]) -> str:
  [rows] = findings
  return (
    f'Token {rows[0]["position"]} has a massive activation in channel {rows[0]["channel"]} after '
    f'block {_span(rows, "block", str)}: {_span(rows, "value", "{:,.0f}".format)} times the median '
    f'({_nulls(rows)}).'
  )


def _drained(findings: list[list[Row]]) -> str:
  [rows] = findings
  return (
    f'The value of the first token is {_span(rows, "value", "{:.2f}".format)} times as long as '
    f'those of the others in block {_span(rows, "block", str)}, where it is shortest '
    f'({_nulls(rows)}).'
  )


def _marked(rows: Sequence[Row]) -> str:
  """The addition without which least of the sink is left; '' where none is shown to mark it."""
  marking = [row for row in rows if row.get('marks')]
  if not marking:
    return ''
  row = min(marking, key=lambda row: row['left'])
  return (
    f"Block {row['block']}'s {row['what']} marks the first token: without what it adds there, "
    f'Sink_1 is {row["left"]:.1f} % instead of {row["sink_1"]:.1f} % (without that at a random '
    f'position: {row["control_low"]:.1f} to {row["control_high"]:.1f} %). It adds '
    f'{_number(row["along"])} along the direction that this token has in the middle of the model '
    f'(99 % of random positions: at most {_number(row["along_random"])}).'
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


def _find_edits(rows: Sequence[Row]) -> Findings:
  return {row['edit']: row for row in rows if row.get('beyond')}


def _edit(rows: list[Row]) -> str:
  """An edit that counts, over the texts in which it does."""
  low = min(row['control_low'] for row in rows)
  high = max(row['control_high'] for row in rows)
  controls = f'{_nats(low)} to {_nats(high)}'
  matched = [row for row in rows if 'matched' in row]
  size = f', of the same size {_span(matched, "matched", _nats)}' if matched else ''
  return (
    f'{_EDITS[rows[0]["edit"]].format(_targets(rows))} {_span(rows, "change", _nats)} nats '
    f'({_interval(rows, _nats)}; controls {controls}{size})'
  )


def _targets(rows: Sequence[Row]) -> str:
  """'position 1 in 56 heads', or 'position 1 in 56 to 58 heads' if texts have other numbers."""
  words = [row['targets'].split() for row in rows]
  if len({len(each) for each in words}) > 1:
    return ' or '.join(dict.fromkeys(row['targets'] for row in rows))
  joined = []
  for same_place in zip(*words):
    different = sorted(set(same_place), key=lambda word: (len(word), word))
    joined.append(' to '.join(dict.fromkeys((different[0], different[-1]))))
  return ' '.join(joined)


def _matters(rows: Sequence[Row]) -> list[_Said]:
  """How many edits count in all texts, and these edits; then those that count in some."""
  made = {row['edit'] for row in rows if 'change' in row}
  if not made:
    return []
  texts = tuple(by_text(rows))
  grouped = _grouped(_find_edits, rows)
  everywhere = grouped.pop(texts, [])
  where = _in_texts(texts, rows)
  controls = sorted({row['controls'] for row in rows if 'change' in row})
  words = [
    f'{len(everywhere)} of {len(made)} edits cost more than each of their controls '
    f'({" or ".join(map(str, controls))} for a text), and at least 1 % of the '
    f'loss{", " * bool(where)}{where}'
  ]
  if everywhere:
    words[0] += f': {"; ".join(map(_edit, everywhere))}'
  words += [
    f'{_in_texts(some, rows).capitalize()} also {"; ".join(map(_edit, edits))}'
    for some, edits in grouped.items()
  ]
  return [_Said('. '.join(words) + '.', bool(where and everywhere))]


def _find_moved(rows: Sequence[Row]) -> Findings:
  """Where the sink goes, if hiding its key everywhere costs less than in the sink heads."""
  everywhere, in_heads = (
    first(rows, edit=edit) for edit in ('drop the key', 'drop the key in sink heads')
  )
  if not everywhere or not in_heads or 'change' not in everywhere or 'change' not in in_heads:
    return {}
  if everywhere['change'] >= in_heads['change']:
    return {}
  moves = everywhere['moved_rate'] > 2 * everywhere['rate_before']
  return {(moves, everywhere['moved_to']): everywhere}


def _moved(findings: list[list[Row]]) -> str:
  [rows] = findings
  moves = rows[0]['moved_rate'] > 2 * rows[0]['rate_before']
  words = 'the sink moves to' if moves else 'no token becomes a sink, at most'
  return (
    'Hiding the key in all heads costs less than in the sink heads, and '
    f'{words} token {rows[0]["moved_to"]}, which gets more than 0.3 of the attention in '
    f'{_span(rows, "moved_rate", _percent)} % of heads and sequences, and in '
    f'{_span(rows, "rate_before", _percent)} % with the key.'
  )


def _cache(rows: Sequence[Row]) -> str:
  advice = first(rows, part='advice')
  tried = [row for row in rows if row['part'] == 'cache' and 'change' in row]
  if advice is None or not tried:
    return ''
  words, checked = advice['words'], first(rows, part='held out')
  if checked:  # the words have its numbers
    size = checked['size']
  else:
    with_first = [row for row in tried if row['first']]
    best = min(with_first, key=lambda row: row['change'], default=tried[0])
    size = best['size']
    words += (
      f' The best, the first {best["first"]} and the last {best["recent"]} tokens, changes the '
      f'loss by {best["change"]:+.1f} % ({best["low"]:+.1f} to {best["high"]:+.1f}).'
    )
  return words + _first_tokens([row for row in tried if row['size'] == size])


def _first_tokens(tried: Sequence[Row]) -> str:
  """What fewer first tokens cost, in caches of one size whose positions are those of the text."""
  by_first = {row['first']: row for row in tried if row['positions'] == 'text'}
  if len(by_first) < 2:
    return ''
  changes = ', '.join(
    f'{row["change"]:+.1f} % with {number}' for number, row in sorted(by_first.items())
  )
  words = f' By first tokens, in a cache of {tried[0]["size"]}, the loss changes by {changes}.'
  compared = [row for row in by_first.values() if 'more' in row]
  if not compared:
    return words
  enough = [row for row in compared if row['enough']]
  if not enough:
    return f'{words} Fewer than {max(by_first)} are not shown to be enough.'
  fewest = min(enough, key=lambda row: row['first'])
  return (
    f'{words} With {fewest["first"]} instead of {max(by_first)} it changes by '
    f'{fewest["more"]:+.2f} % ({fewest["more_low"]:+.2f} to {fewest["more_high"]:+.2f}), so '
    f'{fewest["first"]} is enough.'
  )


def _heads(rows: Sequence[Row]) -> str:
  roles = [row for row in rows if 'role' in row]
  if not roles:
    return ''
  streams = sum(row['role'] == 'streams' for row in roles)
  words = (
    f'{streams} of {len(roles)} heads stream: they keep 95 % of their attention on the first '
    f'{roles[0]["first"]} and the last {roles[0]["recent"]} tokens (uniform attention would keep '
    f'{100 * roles[0]["uniform"]:.0f} %). The loss of a short cache for them was not measured.'
  )
  shared = groups(roles, ('block', 'key_value_head'))
  if len(shared) == len(roles):
    return words
  shorter = sum(all(row['role'] == 'streams' for row in heads) for heads in shared.values())
  return (
    f'{words} All query heads of {shorter} of {len(shared)} key/value heads stream: only these can '
    'have a short cache.'
  )


def _quantisation(rows: Sequence[Row]) -> str:
  costs = []
  for name in ('int8 per tensor', 'int8 per token'):
    none, sinks, random = (
      first(rows, part='all', quantiser=name, spared=spared)
      for spared in ('none', 'sinks', 'random')
    )
    if none is None or sinks is None or random is None:
      return ''
    recovered = ', and '.join(
      f'sparing {words} recovers {_cost(row, "recovered_")}, then {row["verdict"]}'
      for words, row in (('the sinks', sinks), ('as many random tokens', random))
    )
    cost = f'{name} {_cost(none)}, {none["verdict"]}'
    nothing_to_recover = none['verdict'] == 'safe' or 'within noise' in cost
    costs.append(cost if nothing_to_recover else f'{cost}, of which {recovered}')
  return f'Quantised activations change the loss in nats: {"; ".join(costs)}.'


def _quantised_cache(rows: Sequence[Row]) -> str:
  costs = [
    f'{row["quantiser"]} of {row["tool"]}, {row["bits"]:.3g} bits a value, {_cost(row)}, '
    f'{row["verdict"]}'
    for row in rows
    if row.get('what') == 'cache' and row['spared'] == 'none' and row.get('least') is not None
  ]
  if not costs:
    return ''
  return (
    f'Quantised caches, instead of 16 bits, change the loss in nats: {"; ".join(costs)} (safe: the '
    'interval ends at 1 % of the loss or below; unsafe: it begins above).'
  )


def _cost(row: Row, prefix: str = '') -> str:
  """'+0.08 (+0.04 to +0.12)', with the digits that runs share."""
  least, most = row[f'{prefix}least'], row[f'{prefix}most']
  mean = of_runs(row[prefix.removesuffix('_') or 'change'], least, most)
  digits = digits_of_runs(least, most)
  return f'{mean} ({row[f"{prefix}low"]:+.{digits}f} to {row[f"{prefix}high"]:+.{digits}f})'


_find_massive = functools.partial(_find_effect, 'massive activation', ('position', 'channel'))
_find_drained = functools.partial(_find_effect, 'value norm ratio', ())
_RULES: tuple[tuple[str, Callable[[Sequence[Row]], list[_Said]]], ...] = (
  ('signature', _finding(_find_sink, _sink, _no_sink)),
  ('signature', _finding(_find_further, _further)),
  ('signature', _finding(_find_massive, _massive)),
  ('signature', _finding(_find_drained, _drained)),
  ('marking', _one_text(_marked)),
  ('edits', _matters),
  ('edits', _finding(_find_moved, _moved)),
  ('cache', _one_text(_cache)),
  ('cache', _one_text(_heads)),
  ('quantisation', _one_text(_quantisation)),
  ('quantisation', _one_text(_quantised_cache)),
)
