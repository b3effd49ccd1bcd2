"""Tiny checkpoints with random weights, made without torch, for tests."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from sink_jax.pretrained.families import family_for

LLAMA = dict(
  model_type='llama',
  vocab_size=16,
  hidden_size=8,
  intermediate_size=12,
  num_hidden_layers=3,
  num_attention_heads=2,
  num_key_value_heads=1,
  hidden_act='silu',
  rms_norm_eps=1e-5,
  rope_theta=1e4,
  rope_scaling=None,
  tie_word_embeddings=False,
)
GPT_OSS = LLAMA | dict(
  model_type='gpt_oss',
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=4,
  head_dim=8,
  num_local_experts=3,
  num_experts_per_tok=2,
  sliding_window=4,
  quantization_config={'quant_method': 'mxfp4'},
)


def first_fixtures():
  """{model_type: the first folder with a stored checkpoint of this type}."""
  first = {}
  for folder in sorted((Path(__file__).parent / 'fixtures').iterdir()):
    first.setdefault(json.loads((folder / 'config.json').read_text())['model_type'], folder)
  return first


def tensors(hf, seed=0):
  """Every tensor of the checkpoint by full name: float32, or uint8 if it is quantised."""
  rng, family = np.random.default_rng(seed), family_for(hf)
  # An MXFP4 scale beyond 252 gives numbers that bfloat16 cannot hold.
  bytes_ = lambda name: 253 if name.endswith('scales') else 256
  return {
    name: (
      rng.integers(0, bytes_(name), stored.shape, np.uint8)
      if stored.quantized
      else rng.standard_normal(stored.shape, np.float32)
    )
    for name, stored in family.stored_tensors(hf, family.model_config(hf)).items()
    if not stored.optional
  }


def write(folder, hf=LLAMA, arrays=None, files=1):
  """Writes a checkpoint folder with `files` weight files; returns its tensors."""
  folder, arrays = Path(folder), tensors(hf) if arrays is None else arrays
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(hf))
  names = list(arrays)
  shards = [names[i * len(names) // files : (i + 1) * len(names) // files] for i in range(files)]
  index = {}
  for i, shard in enumerate(shards, 1):
    file = f'model-{i:05}-of-{files:05}.safetensors' if files > 1 else 'model.safetensors'
    save_file({name: arrays[name] for name in shard}, folder / file, {'format': 'pt'})
    index |= dict.fromkeys(shard, file)
  if files > 1:
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': index}))
  return arrays
