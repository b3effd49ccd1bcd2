"""A sink card: one page that says where a model's sinks are, whether they matter, and what to do.

Its numbers are the rows of five analyses, and `analyses.sentences` makes its sentences from them.
Each number in them has a null or a control next to it.
"""

from __future__ import annotations

import dataclasses
import html
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sink_jax.analyses import runner
from sink_jax.analyses.card_parts import Parts
from sink_jax.analyses.explore import explore
from sink_jax.analyses.models import InputOptions, Model, makes_its_tokens
from sink_jax.analyses.sentences import by_text, first, sentences
from sink_jax.analyses.signature import from_arrays
from sink_jax.arguments import check_known
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

FORMAT = 2  # of card.json
#: The texts of signature and edits, which are on every machine; the first is that of other parts.
TEXTS = {
  'docstrings': "Stdlib(domains='docs')",
  'code': 'StdlibFunctions()',
  'manual': 'PythonManual()',
}
_ON_TEXTS = 'signature', 'edits'
# Options where there are several texts, so that a card takes minutes; a full one has defaults.
_SHORTER = {
  'signature': {'sequences': 16},
  'edits': {'sequences': 12, 'controls': 2},
  'quantisation': {'sequences': 8},
}
_LONG = {'length': 2048, 'least': 8}  # the inputs of caches in a full card
_INPUT_OPTIONS = [field.name for field in dataclasses.fields(InputOptions)]


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
    """What the rows say, each sentence by a rule."""
    return sentences({part: result.rows for part, result in self.results.items()})

  def __str__(self) -> str:
    return '\n'.join([self.name, *self.sentences])

  def write(self, folder: AnyPath, command: str = '') -> list[AnyPath]:
    """Writes index.html, its text card.md, the rows as card.json, and a picture of each part."""
    rows = {part: result.rows for part, result in self.results.items()}
    pictures = {
      f'{part}.png': style.png(result.plot())
      for part, result in self.results.items()
      if _can_be_drawn(part, result.rows)
    }
    page = self._text(pictures, command)
    # Rows of masses without a role are many, and no picture shows them.
    stored = {
      part: [row for row in of_part if row.get('part') != 'mass' or 'role' in row]
      for part, of_part in rows.items()
    }
    found = {'format': FORMAT, 'model': self.name, 'sentences': self.sentences}
    inputs = {part: result.models for part, result in self.results.items()}
    found |= {'serving': serving(rows), 'rows': stored, 'inputs': inputs}
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
    page = to_html(self._text((), command), {})
    return with_explorer(page, self.explored) if self.explored else page

  def _text(self, pictures: Collection[str], command: str) -> str:
    """The page in Markdown; pictures: names of files next to it."""
    rows = {part: result.rows for part, result in self.results.items()}
    inputs = {part: result.models for part, result in self.results.items()}
    return card_page.page(self.name, self.sentences, rows, pictures, command, inputs)


def _can_be_drawn(part: str, rows: Sequence[Row]) -> bool:
  """Whether the picture of a part has something to show."""
  if part == 'signature':  # the arrays of another library may lack importances
    return first(rows, measure='importance') is not None
  if part == 'edits':  # short texts have no targets or controls
    return any('change' in row for row in rows)
  return True


def serving(rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
  """What somebody who serves the model asks, from {part: rows}: memory, loss, heads that stream.

  Blocks and heads count from 1, except in `duo_attention`: a line for each block with attention and
  a column for each key/value head, 1 for the full cache and 0 for one that streams, as in the files
  full_attention_heads.tsv of DuoAttention.
  """
  found: dict[str, Any] = {}
  measured = [row for row in rows.get('edits', ()) if 'baseline' in row]
  if measured:
    found['loss'] = {text or 'text': of[0]['baseline'] for text, of in by_text(measured).items()}
    found['loss_of_equal_chances'] = measured[0]['equal_chances']
  caches = [row for row in rows.get('quantisation', ()) if 'bytes_of_16_bits' in row]
  if caches:
    found['cache_bytes_per_token'] = caches[0]['bytes_of_16_bits']
  roles = [row for row in rows.get('cache', ()) if 'role' in row]
  if roles:
    heads: dict[int, list[int]] = {}
    shared: dict[int, dict[int, bool]] = {}  # {block: {key/value head: all its heads stream}}
    for row in roles:
      block, group, streams = row['block'], row['key_value_head'], row['role'] == 'streams'
      heads.setdefault(block, []).extend([row['head']] * streams)
      of_block = shared.setdefault(block, {})
      of_block[group] = of_block.get(group, True) and streams
    found['streaming'] = {
      'first': roles[0]['first'],
      'recent': roles[0]['recent'],
      'heads': heads,
      'key_value_heads': {
        block: [group for group, streams in of_block.items() if streams]
        for block, of_block in shared.items()
      },
      'duo_attention': [
        [int(not streams) for streams in of_block.values()] for of_block in shared.values()
      ],
    }
  return found


@standard_promotion()
def card(
  run: Run,
  *,
  full: bool = False,
  say: Callable[[str], None] = print,
  parts: str | os.PathLike | None = None,
  **inputs: Any,
) -> Card:
  """Measures a model by five analyses: `sj.card(sj.load_pretrained('SmolLM2-135M-Instruct'))`.

  Signature and edits are measured on the three `TEXTS`, unless source= names a text, or the model
  is a training run. Other parts, and the page to explore, have the first text. With three texts
  there are fewer sequences and controls, so that a card of 135 million parameters takes at most
  ten minutes on two CPU cores.

  Args:
    full: whether caches are measured on texts of 2,048 tokens, where the source has 8 of them, and
      three texts with as many sequences and controls as one.
    say: called with a line after each part.
    parts: a folder in which each part is kept when it is done, so that a card that was killed goes
      on from there: the same card with the same code. The caller removes it.
    inputs: options of the inputs of all parts, such as source= (`analyses.models.InputOptions`).

  Raises:
    ValueError: an option is unknown, or a text is too short; before anything is measured.
  """
  for name in inputs:
    check_known(name, _INPUT_OPTIONS, 'sj.card: there is no option')
  results, kept = {}, Parts(parts, run, FORMAT, inputs) if parts else None
  texts = _texts(run, inputs)
  options = {part: _options(part, run, inputs, full) for part in PARTS}
  for part, chosen in options.items():
    for source in texts.values() if part in _ON_TEXTS else [chosen.get('source', '')]:
      _read(part, run, chosen | {'source': source})
  for part, title in PARTS.items():
    start, chosen = time.monotonic(), options[part]
    of_texts = texts if part in _ON_TEXTS else {}
    asked = {'options': chosen, 'texts': of_texts}
    result = kept.read(part, asked) if kept else None
    if result is None:
      result = _measured(part, run, of_texts, chosen)
      if kept:
        kept.write(part, asked, result)
      say(f'{title}: {time.monotonic() - start:.0f} s')
    else:
      say(f'{title}: measured before')
    results[part] = result
  # On the texts of the signature, so that the page shows the numbers of its sentences.
  of_signature = _SHORTER['signature'] if texts and not full else {}
  explored = explore(
    Model(run, dataclasses.replace(runner.find('signature').inputs, **of_signature | inputs))
  )
  return Card(run.name or 'model', results, explored)


def _options(part: str, run: Run, inputs: Mapping[str, Any], full: bool) -> dict[str, Any]:
  """The options of a part: those that are asked for, then those of a full or of a shorter card."""
  chosen = dict(inputs)
  if run.probe_tokens is not None:
    sequences, length = run.probe_tokens.shape
    if part == 'cache':  # the run was trained on such sequences
      chosen['length'] = length
    if makes_its_tokens(run):  # and has no others
      usual = runner.find(part).inputs
      fewer = {'sequences': min(usual.sequences, sequences), 'length': min(usual.length, length)}
      chosen = fewer | chosen
  elif part == 'cache' and full and 'length' not in inputs and _has_long_documents(run, inputs):
    chosen = _LONG | chosen
  shorter = _texts(run, inputs) and not full
  return _SHORTER.get(part, {}) | chosen if shorter else chosen


def _read(part: str, run: Run, options: Mapping[str, Any]) -> None:
  """Makes the inputs of a part; a ValueError if they cannot be made."""
  asked = {name: value for name, value in options.items() if name in _INPUT_OPTIONS}
  Model(run, dataclasses.replace(runner.find(part).inputs, **asked)).inputs()


def _has_long_documents(run: Run, inputs: Mapping[str, Any]) -> bool:
  try:
    _read('cache', run, {**_LONG, **inputs})
  except ValueError:
    return False
  return True


def _texts(run: Run, inputs: Mapping[str, Any]) -> dict[str, str]:
  """The sources of several texts; {} where there is one text, which the options describe."""
  natural = inputs.get('inputs', 'natural') == 'natural'
  if inputs.get('source') or not natural or run.probe_tokens is not None:
    return {}
  return TEXTS


def _measured(
  part: str, run: Run, texts: Mapping[str, str], options: Mapping[str, Any]
) -> runner.Result:
  """The rows of an analysis, of one text after the other where there are several."""
  if not texts:
    return runner.analyse(part, run, **options)
  results = {
    name: runner.analyse(part, run, **{**options, 'source': source})
    for name, source in texts.items()
  }
  rows = [
    row | {runner.SOURCE_TEXT: name} for name, result in results.items() for row in result.rows
  ]
  models = [about for result in results.values() for about in result.models]
  return runner.Result(runner.find(part), rows, models)


def cost(run: Run, source: str = '', *, full: bool = False) -> str:
  """The cost of a card in words: tokens of forward passes by part, and FLOPs of matrix products."""
  flops, words, given = 0.0, [], {'source': source}
  texts = 3 if _texts(run, given) else 1
  edits = 31 if texts > 1 and not full else 75  # there are fewer controls
  for part, passes in {
    'signature': 3 * texts,
    'marking': 11,
    'edits': edits * texts,
    'cache': 6,
    'quantisation': 68 + run.config.layers // 2,
  }.items():
    inputs = dataclasses.asdict(runner.find(part).inputs) | _options(part, run, given, full)
    tokens = passes * inputs['sequences'] * inputs['length']
    flops += tokens * flops_per_token(run.config, inputs['length']) / 3
    words.append(f'{short(tokens)} tokens ({part})')
  return f'forward passes of about {", ".join(words)}: {flops:.1e} FLOPs in matrix products'


@standard_promotion()
def card_of(*, name: str = 'model', **arrays: Any) -> Card:
  """The card of another library's model, from its arrays; the other analyses need the model.

  Without a mask, padding on the right counts as text, since it cannot be recognised.

  Args:
    arrays: as in `analyses.signature.from_arrays`: importance or attentions, hidden, values, keys,
      heads, and of a padded batch mask (S, T).

  Raises:
    ValueError: a shape does not fit, also to that of another array, a number is not finite, or an
      importance or a map is not one.
  """
  rows = from_arrays(name=name, **arrays)
  return Card(name, {'signature': runner.Result(runner.find('signature'), rows, [])})
