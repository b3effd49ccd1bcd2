"""Runs transformers' eager attention on padded batches, and on each of their texts by itself.

    python tests/pretrained/make_padded.py OUT

The weights are random, those of a Llama with grouped keys, and of a Mistral whose window is shorter
than the texts. OUT gets a checkpoint of each, and arrays.npz: tokens, masks, attentions, keys and
values.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

LENGTHS = (12, 5, 9, 2)
SIZES = dict(
  vocab_size=64,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  initializer_range=0.5,
  attn_implementation='eager',
)


def run(model, tokens, mask):
  """Every array of a forward pass; positions count from the first token of a text."""
  positions = (mask.cumsum(1) - 1).clamp(min=0)
  cache = transformers.DynamicCache()  # the one that Mistral makes drops keys before the window
  with torch.no_grad():
    out = model(
      tokens,
      attention_mask=mask,
      position_ids=positions,
      output_attentions=True,
      use_cache=True,
      past_key_values=cache,
    )
  stack = lambda parts: torch.stack(list(parts), 1).numpy()
  return {
    'attentions': stack(out.attentions),
    'keys': stack(x.keys for x in out.past_key_values.layers),
    'values': stack(x.values for x in out.past_key_values.layers),
  }


def main(folder):
  for name, kind, more in (('llama', 'Llama', {}), ('mistral', 'Mistral', dict(sliding_window=4))):
    torch.manual_seed(0)
    config = getattr(transformers, f'{kind}Config')(**SIZES, **more)
    model = getattr(transformers, f'{kind}ForCausalLM')(config).eval()
    model.save_pretrained(folder / name)
    texts = [torch.randint(0, 64, (1, n)) for n in LENGTHS]
    arrays = {}
    for s, text in enumerate(texts):
      arrays |= {f'{s}.{key}': x for key, x in run(model, text, torch.ones_like(text)).items()}
    for side in ('left', 'right'):
      tokens, mask = torch.zeros((2, len(texts), max(LENGTHS)), dtype=torch.long)
      for s, n in enumerate(LENGTHS):
        at = slice(-n, None) if side == 'left' else slice(n)
        tokens[s, at], mask[s, at] = texts[s][0], 1
      arrays |= {f'{side}.tokens': tokens.numpy(), f'{side}.mask': mask.numpy()}
      arrays |= {f'{side}.{key}': x for key, x in run(model, tokens, mask).items()}
    np.savez(folder / name / 'arrays.npz', **arrays)


if __name__ == '__main__':
  main(Path(sys.argv[1]))
