"""Recomputes the numbers in the prose of results/open_models/README.md from the rows of its files."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / 'results' / 'open_models'
MODELS = SMOL, GEMMA = 'SmolLM2-135M-Instruct (Q4_1)', 'Gemma3-270M (Q4_K_M)'
TEXT = ' '.join((FOLDER / 'README.md').read_text().split())


def rows(analysis, model, **wanted):
  found = json.loads((FOLDER / f'{analysis}.json').read_text())['rows']
  return [row for row in found if (wanted | {'model': model}).items() <= row.items()]


def test_numbers_of_the_page_of_open_models():
  said = [
    f'| {model} | ' + ' | '.join(f'{row["sink_1"]:.1f}' for row in rows('kinds', model))
    for model in MODELS
  ]
  said.append(
    ', '.join(
      ' and '.join(f'{row["sink_1"]:.1f} %' for row in rows('domains', model, epsilon=0.3))
      + f' in {name}'
      for model, name in zip(MODELS, ('SmolLM2', 'Gemma 3'))
    )
  )
  h, other = (rows('norms', model, kind='hidden states') for model in MODELS)  # starts at block 0
  value = [
    min(rows('norms', model, kind='values'), key=lambda row: row['ratio']) for model in MODELS
  ]
  said += [
    f"to {h[3]['ratio']:.0f} times the others' after block 3, back to {h[10]['ratio']:.1f} times",
    f'norm of {h[11]["first"]:.0f} to {h[12]["first"]:,.0f}, which is {h[12]["ratio"]:.0f} times',
    "{ratio:.2f} times as long as the others' in block {block}".format(**value[0]),
    f'{other[1]["ratio"]:.0f} times as long after block 1, and the values have '
    '{ratio:.2f} times the length in block {block}'.format(**value[1]),
  ]
  smol, gemma = (
    sorted(
      {row['block'] for row in rows('heads', model)}
      - {row['block'] for row in rows('heads', model) if row['importance'] > 0.3}
    )
    for model in MODELS
  )
  said += [
    f'blocks {", ".join(map(str, smol[:-1]))} and {smol[-1]}.',
    f'only block {gemma[0]} has no head',
  ]
  smol, gemma = (max(rows('angles', model), key=lambda row: row['importance']) for model in MODELS)
  said += [
    'block {block}, head {head}) the cosine of queries with the first key is {cosine_first:.2f}, with '
    'the other keys {cosine_others:.2f}, while the product of norms is smaller for the first key '
    '({norm_product_first:.0f} against {norm_product_others:.0f})'.format(**smol),
    '({norm_product_first:,.0f} against {norm_product_others:,.0f} in block {block}, head {head}), '
    'and the cosine decides as well ({cosine_first:.2f} against {cosine_others:.2f})'.format(
      **gemma
    ),
  ]
  low, second, *_, high = sorted(
    (row['attention'], row['layer']) for row in rows('last_query', SMOL)[12:]
  )
  said += [
    f'{second[0]:.2f} to {high[0]:.2f} of its attention in every layer from 12 on, with one exception '
    f'({low[0]:.2f} in layer {low[1]})',
    '{:.2f}, {:.2f} and {:.2f}'.format(
      *(row['attention'] for row in rows('last_query', GEMMA)[5::6])
    ),
  ]
  said += [
    f'| {first["perplexity"]:.2f} | {second["perplexity"]:.2f} |'
    for first, second in zip(
      *(rows('streaming', model, part='last quarter') for model in MODELS), strict=True
    )
  ]
  said.append(f'an importance of {rows("propositions", "Relative()")[0]["importance"]:.3f}')

  assert not [words for words in said if words not in TEXT]
