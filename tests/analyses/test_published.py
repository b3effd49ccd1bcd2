"""Computes the numbers of results/open_models/README.md again from the rows of its files."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / 'results' / 'open_models'
MODELS = SMOL, GEMMA = 'SmolLM2-135M-Instruct (Q4_1)', 'Gemma3-270M (Q4_K_M)'
TEXT = ' '.join((FOLDER / 'README.md').read_text().split())


def rows(analysis, model, **wanted):
  found = json.loads((FOLDER / f'{analysis}.json').read_text())['rows']
  return [row for row in found if (wanted | {'model': model}).items() <= row.items()]


def strongest(analysis, model, column='importance'):
  return max(rows(analysis, model), key=lambda row: row[column])


def assert_said(*words):
  assert not [part for part in words if part not in TEXT]


def test_rates_of_inputs():
  for model in MODELS:
    rates = [f'{row["sink_1"]:.1f}' for row in rows('kinds', model)]
    assert_said(f'| {model} | ' + ' | '.join(rates))
  of_domains = []
  for model, name in zip(MODELS, ('SmolLM2', 'Gemma 3')):
    rates = [f'{row["sink_1"]:.1f} %' for row in rows('domains', model, epsilon=0.3)]
    of_domains.append(f'{" and ".join(rates)} in {name}')
  assert_said(', '.join(of_domains))


def test_norms():
  h, other = (rows('norms', model, kind='hidden states') for model in MODELS)  # starts at block 0
  shortest = lambda model: min(rows('norms', model, kind='values'), key=lambda row: row['ratio'])
  assert_said(
    f"to {h[3]['ratio']:.0f} times the others' after block 3, back to {h[10]['ratio']:.1f} times",
    f'norm of {h[11]["first"]:.0f} to {h[12]["first"]:,.0f}, which is {h[12]["ratio"]:.0f} times',
    "{ratio:.2f} times as long as the others' in block {block}".format(**shortest(SMOL)),
    f'{other[1]["ratio"]:.0f} times as long after block 1, and the values have '
    '{ratio:.2f} times the length in block {block}'.format(**shortest(GEMMA)),
  )


def test_blocks_without_a_sink_and_angles():
  def without(model):
    heads = rows('heads', model)
    sinks = {row['block'] for row in heads if row['importance'] > 0.3}
    return sorted({row['block'] for row in heads} - sinks)

  *blocks, last = without(SMOL)
  assert_said(
    f'blocks {", ".join(map(str, blocks))} and {last}.',
    f'only block {without(GEMMA)[0]} has no head',
    'block {block}, head {head}) the cosine of queries with the first key is {cosine_first:.2f}, '
    'with the other keys {cosine_others:.2f}, while the product of norms is smaller for the first '
    'key ({norm_product_first:.0f} against {norm_product_others:.0f})'.format(
      **strongest('angles', SMOL)
    ),
    '({norm_product_first:,.0f} against {norm_product_others:,.0f} in block {block}, head {head}), '
    'and the cosine decides as well ({cosine_first:.2f} against {cosine_others:.2f})'.format(
      **strongest('angles', GEMMA)
    ),
  )


def test_long_texts_and_propositions():
  late = rows('last_query', SMOL)[12:]
  low, second, *_, high = sorted((row['attention'], row['layer']) for row in late)
  of_gemma = [f'{row["attention"]:.2f}' for row in rows('last_query', GEMMA)[5::6]]
  assert_said(
    f'{second[0]:.2f} to {high[0]:.2f} of its attention in every layer from 12 on, with one '
    f'exception ({low[0]:.2f} in layer {low[1]})',
    '{}, {} and {}'.format(*of_gemma),
    f'an importance of {rows("propositions", "Relative()")[0]["importance"]:.3f}',
  )
  of_models = [rows('streaming', model, part='last quarter') for model in MODELS]
  for first, second in zip(*of_models, strict=True):
    assert_said(f'| {first["perplexity"]:.2f} | {second["perplexity"]:.2f} |')
