"""Computes the logits of transformers with edits of keys, values, heads and hidden states.

    python tests/pretrained/make_edited.py OUT

The edits change the layers of transformers from outside, by hooks and by another function for eager
attention. OUT gets NAME.npz for each of two stored checkpoints: tokens, the arrays of every edit as
`sink_jax.models.edits.edit_tree` takes them, and EDIT.logits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama

FIXTURES = Path(__file__).parent / 'fixtures'
MODELS = {'llama': modeling_llama, 'gemma3': modeling_gemma3}


def draw_edits(layers, batch, heads, length, width):
  """{name: arrays of an edit}, random ones; the last edit has all arrays."""
  rng = np.random.default_rng(3)
  mostly = lambda *shape: rng.random((layers, *shape)) < 0.7
  edits = {
    'none': {},
    'keys': {'keep_NxBxHxT': mostly(batch, heads, length)},
    'values': {'values_NxBxT': mostly(batch, length)},
    'heads': {'heads_NxH': mostly(heads)},
    'caps': {'caps_MxD': rng.uniform(0.1, 2, (layers, width)).astype(np.float32)},
  }
  edits['caps of some'] = edits['caps'] | {'capped_T': rng.random(length) < 0.5}
  every = [name for name in edits if name != 'caps']
  edits['all'] = {key: x for name in every for key, x in edits[name].items()}
  return edits


def edited_attention(attention, edit):
  """Eager attention (B, T, H, Dh) with the keys, values and heads of an edit."""

  def wrapped(module, query, key, value, mask, **options):
    block, length = module.layer_idx, query.shape[2]
    later_TxT = torch.ones(length, length).tril(-1).bool()
    if 'keep_NxBxHxT' in edit:
      hidden_BxHxT = ~torch.tensor(edit['keep_NxBxHxT'][block])
      hidden_BxHxTxT = hidden_BxHxT[:, :, None] & later_TxT
      mask = mask.masked_fill(hidden_BxHxTxT, torch.finfo(mask.dtype).min)
    out_BxTxHxDh, weights_BxHxTxT = attention(module, query, key, value, mask, **options)
    if 'values_NxBxT' in edit:
      zero_BxT = ~torch.tensor(edit['values_NxBxT'][block])
      lost_BxHxTxT = weights_BxHxTxT * (zero_BxT[:, None, None] & later_TxT)
      groups = query.shape[1] // value.shape[1]
      lost_BxHxTxDh = lost_BxHxTxT @ value.repeat_interleave(groups, 1)
      out_BxTxHxDh = out_BxTxHxDh - lost_BxHxTxDh.transpose(1, 2)
    if 'heads_NxH' in edit:
      kept_H = torch.tensor(edit['heads_NxH'][block])
      out_BxTxHxDh = out_BxTxHxDh * kept_H[:, None]
    return out_BxTxHxDh, weights_BxHxTxT

  return wrapped


def clip(model, edit):
  """Clips the hidden states after every block; returns the hooks that do it."""

  def hook_of(block):
    cap_D = torch.tensor(edit['caps_MxD'][block])
    capped_Tx1 = torch.tensor(edit.get('capped_T', True)).reshape(-1, 1)

    def hook(module, inputs, output):
      h_BxTxD = output[0] if isinstance(output, tuple) else output
      changed = torch.where(capped_Tx1, torch.clamp(h_BxTxD, -cap_D, cap_D), h_BxTxD)
      return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook

  layers = model.model.layers
  return [layer.register_forward_hook(hook_of(block)) for block, layer in enumerate(layers)]


def logits_of(model, module, tokens, edit):
  """The logits (B, T, V) of a model with an edit; `module` has its function for attention."""
  original = module.eager_attention_forward
  hooks = clip(model, edit) if 'caps_MxD' in edit else []
  module.eager_attention_forward = edited_attention(original, edit)
  try:
    with torch.no_grad():
      return model(tokens, use_cache=False).logits.numpy()
  finally:
    module.eager_attention_forward = original
    for hook in hooks:
      hook.remove()


def main(folder):
  for name, module in MODELS.items():
    stored = FIXTURES / name
    model = AutoModelForCausalLM.from_pretrained(
      stored, dtype=torch.float32, attn_implementation='eager'
    ).eval()
    config = model.config
    tokens = load_file(stored / 'expected.safetensors')['tokens'].long()
    sizes = config.num_hidden_layers, len(tokens), config.num_attention_heads, tokens.shape[1]
    arrays = {'tokens': tokens.numpy()}
    for edit, values in draw_edits(*sizes, config.hidden_size).items():
      arrays |= {f'{edit}.{key}': x for key, x in values.items()}
      arrays[f'{edit}.logits'] = logits_of(model, module, tokens, values)
    np.savez(folder / f'{name}.npz', **arrays)


if __name__ == '__main__':
  main(Path(sys.argv[1]))
