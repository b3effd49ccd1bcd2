"""What transformers computes with exported runs.

    python tests/pretrained/run_exported.py FOLDER...

Runs where torch and transformers are. Every folder holds an export and tokens.npy, and gets
expected.safetensors as `make_fixtures` writes it, and generated.npy: 32 tokens, greedily.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from make_fixtures import expected
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

NEW = 32


def generated(folder, tokens):
  """The most likely continuation, through transformers' own cache."""
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                               attn_implementation='eager')
  model.generation_config.eos_token_id = None  # no token ends a text
  out = model.eval().generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                              max_new_tokens=NEW, min_new_tokens=NEW)
  return out[:, tokens.shape[1]:]


def main():
  """Runs every folder that the command line names."""
  for folder in map(Path, sys.argv[1:]):
    tokens = torch.from_numpy(np.load(folder / 'tokens.npy')).long()
    save_file(expected(folder, tokens), folder / 'expected.safetensors')
    np.save(folder / 'generated.npy', generated(folder, tokens).numpy())


if __name__ == '__main__':
  main()
