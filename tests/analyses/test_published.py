"""Numbers in the prose of results/open_models/README.md, again from the rows of its files."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / 'results' / 'open_models'
MODELS = SMOL, GEMMA = 'SmolLM2-135M-Instruct (Q4_1)', 'Gemma3-270M (Q4_K_M)'
TEXT = ' '.join((FOLDER / 'README.md').read_text().split())


def rows(analysis, **wanted):
  found = json.loads((FOLDER / f'{analysis}.json').read_text())['rows']
  return [row for row in found if wanted.items() <= row.items()]


def test_numbers_of_the_page_of_open_models():
  said, of = [], {model: {name: rows(name, model=model) for name in ('norms', 'heads', 'last_query')}
                  for model in MODELS}
  for model in MODELS:
    said.append(f'| {model} | ' + ' | '.join(f'{row["sink_1"]:.1f}' for row in rows('kinds', model=model)))
  domains = [[f'{row["sink_1"]:.1f} %' for row in rows('domains', model=model, epsilon=0.3)]
             for model in MODELS]
  said.append(f'{" and ".join(domains[0])} in SmolLM2, {" and ".join(domains[1])} in Gemma 3')
  norm = {(model, row['kind'], row['block']): row for model in MODELS for row in of[model]['norms']}
  hidden, smallest = 'hidden states', {model: min(
      (row['ratio'], row['block']) for row in of[model]['norms'] if row['kind'] == 'values') for model in MODELS}
  said += [f'to {norm[SMOL, hidden, 3]["ratio"]:.0f} times the others\' after block 3, back to '
           f'{norm[SMOL, hidden, 10]["ratio"]:.1f} times after block 10',
           f'from a norm of {norm[SMOL, hidden, 11]["first"]:.0f} to {norm[SMOL, hidden, 12]["first"]:,.0f}, '
           f'which is {norm[SMOL, hidden, 12]["ratio"]:.0f} times the others\'',
           f'{smallest[SMOL][0]:.2f} times as long as the others\' in block {smallest[SMOL][1]}',
           f'{norm[GEMMA, hidden, 1]["ratio"]:.0f} times as long after block 1, and the values have '
           f'{smallest[GEMMA][0]:.2f} times the length in block {smallest[GEMMA][1]}']
  without = [[str(block) for block in sorted({row['block'] for row in of[model]['heads']}) if max(
      row['importance'] for row in of[model]['heads'] if row['block'] == block) <= 0.3] for model in MODELS]
  said += [f'blocks {", ".join(without[0][:-1])} and {without[0][-1]}.',
           f'only block {without[1][0]} has no head above 0.3']
  strongest = [max(rows('angles', model=model), key=lambda row: row['importance']) for model in MODELS]
  said += ['block {block}, head {head}) the cosine of queries with the first key is {cosine_first:.2f}, with the '
           'other keys {cosine_others:.2f}, while the product of norms is smaller for the first key '
           '({norm_product_first:.0f} against {norm_product_others:.0f})'.format(**strongest[0]),
           '({norm_product_first:,.0f} against {norm_product_others:,.0f} in block {block}, head {head}), and the '
           'cosine decides as well ({cosine_first:.2f} against {cosine_others:.2f})'.format(**strongest[1])]
  late = sorted((row['attention'], row['layer']) for row in of[SMOL]['last_query'] if row['layer'] >= 12)
  said += [f'{late[1][0]:.2f} to {late[-1][0]:.2f} of its attention in every layer from 12 on, with one exception '
           f'({late[0][0]:.2f} in layer {late[0][1]})', ', '.join(
               f'{row["attention"]:.2f}' for row in of[GEMMA]['last_query'] if row['layer'] in (5, 11))]
  caches = [[row['perplexity'] for row in rows('streaming', model=model, part='last quarter')] for model in MODELS]
  said += [f'| {first:.2f} | {second:.2f} |' for first, second in zip(*caches, strict=True)]
  said += [f'an importance of {rows("propositions", model="Relative()")[0]["importance"]:.3f}']
  for words in said:
    assert words in TEXT, words
