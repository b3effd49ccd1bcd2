"""Makes a checkpoint of every family with other weights, and stores what transformers computes.

    python tests/pretrained/make_fixtures.py --out=DIR [--only=llama] [--seed=1]
    python tests/pretrained/make_fixtures.py EXPORT...

It needs torch and transformers. A folder of fixtures/ has the config.json and the safetensors files
of a checkpoint, laid out like published ones. It also has expected.safetensors: tokens, logits,
hidden_states.0 to .N as transformers returns them (the last one after the final norm), last_block
(before that norm), and attentions.i of every attention layer. Without --seed the weights and tokens
are the stored ones, so the files come out unchanged. A new folder needs only a config.json. An
export with tokens.npy gets its expected.safetensors, and generated.npy: 32 tokens, chosen greedily.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.granite_swa import modeling_granite_swa

FIXTURES = Path(__file__).parent / 'fixtures'
SEQUENCES, LENGTH = 2, 14


def with_sink_share(attention):
  """GraniteSWA's attention returns the weights of softmax; here those that act on values."""

  def wrapped(module, query, key, value, mask, scaling, **options):
    out, weights = attention(module, query, key, value, mask, scaling, **options)
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ keys.mT * scaling + (0 if mask is None else mask)
    total = torch.logaddexp(scores.logsumexp(-1), module.sinks[:, None])
    return out, (scores - total[..., None]).exp()

  return wrapped


modeling_granite_swa.eager_attention_forward = with_sink_share(
  modeling_granite_swa.eager_attention_forward
)


def draw(name, x, generator, gains):
  """Weights that reveal mistakes: gains are not one, biases not zero, attention not uniform.

  gains: the centre of their values; 0 for Gemma, which adds one to them.
  """
  if x.dtype == torch.uint8:  # MXFP4, with scales of ordinary size
    low, high = (122, 126) if name.endswith('scales') else (0, 256)
    return torch.randint(low, high, x.shape, generator=generator, dtype=torch.uint8)
  if x.ndim in (0, 4) or name.endswith('inv_freq'):  # buffers, such as masks
    return x
  noise = torch.randn(x.shape, generator=generator)
  if name.endswith('A_log'):
    return torch.log(torch.arange(1.0, 1 + x.shape[1])) + 0.2 * noise
  if name.endswith('.D') or x.ndim == 1 and name.endswith('weight'):
    return gains + 0.3 * noise
  if name.endswith('dt_proj.bias'):
    return noise - 3  # small steps, as in trained models
  if name.endswith(('bias', 'sinks')):
    return 0.5 * noise
  if any(word in name for word in ('embed', 'wte', 'wpe')):
    return noise
  scale = 1.4
  if name.endswith('experts.gate_up_proj'):
    # The input of gpt-oss's gated unit has to reach the limit at which it is clamped.
    scale = 4
  elif (
    name.endswith(('mamba.out_proj.weight', 'w2.weight'))
    or 'expert' in name
    and 'down_proj' in name
  ):
    # Long sums and products come out large, and would drown everything before them.
    scale = 0.3
  return scale * noise / min(x.shape[-2:]) ** 0.5


def new_weights(source, scratch):
  """The weight files that transformers saves for a checkpoint with only a config.json."""
  config = AutoConfig.from_pretrained(source)
  AutoModelForCausalLM.from_config(config).to(config.dtype).save_pretrained(scratch)
  return [scratch / 'model.safetensors']


def readable(folder, scratch):
  """A checkpoint for transformers: 4-bit numbers unpacked, the part for images left out.

  transformers can unpack the numbers too, but it needs the package accelerate for that.
  """
  config = json.loads((folder / 'config.json').read_text())
  packed, images = config.pop('quantization_config', None), config.get('text_config')
  if not packed and not images:
    return folder
  tensors = load_file(folder / 'model.safetensors')
  if images:
    tensors = {
      name.removeprefix('language_model.'): x
      for name, x in tensors.items()
      if name.startswith('language_model.')
    }
  for name in [name.removesuffix('_blocks') for name in tensors if name.endswith('_blocks')]:
    tensors[name] = convert_moe_packed_tensors(
      tensors.pop(f'{name}_blocks'), tensors.pop(f'{name}_scales')
    )
  (scratch / 'config.json').write_text(json.dumps(images or config))
  save_file(tensors, scratch / 'model.safetensors', {'format': 'pt'})
  return scratch


def expected(folder, tokens):
  """The results of transformers in float32 with the files of a folder."""
  model, info = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager', output_loading_info=True
  )
  assert not info['missing_keys'] and not info['mismatched_keys'], info
  last = []
  blocks = next(x for name, x in model.named_modules() if name.split('.')[-1] in ('layers', 'h'))
  blocks[-1].register_forward_hook(
    lambda module, inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
  )
  with torch.no_grad():
    out = model.eval()(tokens, output_hidden_states=True, output_attentions=True, use_cache=False)
  result = {'tokens': tokens.int(), 'logits': out.logits, 'last_block': last[0].clone()}
  result |= {f'hidden_states.{i}': x for i, x in enumerate(out.hidden_states)}
  result |= {f'attentions.{i}': x for i, x in enumerate(out.attentions)}
  return {name: x.contiguous() for name, x in result.items()}


def make(source, out, seed):
  """Writes the checkpoint of one folder into another, or into the same one."""
  out.mkdir(parents=True, exist_ok=True)
  config = json.loads((source / 'config.json').read_text())
  text = config.get('text_config', config)
  for path in source.glob('*.json') if source.resolve() != out.resolve() else ():
    shutil.copy(path, out)
  with tempfile.TemporaryDirectory() as scratch:
    stored = sorted(source.glob('model*.safetensors'))
    fresh = seed is not None or not stored
    generator = torch.Generator().manual_seed((seed or 0) + zlib.crc32(out.name.encode()))
    for path in stored or new_weights(source, Path(scratch)):
      tensors = load_file(path)
      if fresh:
        gains = 0 if text['model_type'].startswith('gemma') else 1
        tensors = {name: draw(name, x, generator, gains).to(x.dtype) for name, x in tensors.items()}
      save_file(tensors, out / path.name, {'format': 'pt'})
    tokens = (
      torch.randint(text['vocab_size'], (SEQUENCES, LENGTH), generator=generator)
      if fresh
      else load_file(source / 'expected.safetensors')['tokens'].long()
    )
    save_file(expected(readable(out, Path(scratch)), tokens), out / 'expected.safetensors')


def run_export(folder):
  """The results of transformers with an export, and what it generates with its cache."""
  tokens = torch.from_numpy(np.load(folder / 'tokens.npy')).long()
  save_file(expected(folder, tokens), folder / 'expected.safetensors')
  model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  )
  model.generation_config.eos_token_id = None  # no token ends a text
  out = model.eval().generate(
    tokens,
    attention_mask=torch.ones_like(tokens),
    do_sample=False,
    max_new_tokens=32,
    min_new_tokens=32,
  )
  np.save(folder / 'generated.npy', out[:, tokens.shape[1] :].numpy())


def main():
  """Makes the folders that the command line names."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('exports', type=Path, nargs='*')
  parser.add_argument('--out', type=Path)
  parser.add_argument('--only')
  parser.add_argument('--seed', type=int)
  options = parser.parse_args()
  for folder in options.exports:
    run_export(folder)
  if options.out:
    for source in [FIXTURES / options.only] if options.only else sorted(FIXTURES.iterdir()):
      make(source, options.out / source.name, options.seed)


if __name__ == '__main__':
  main()
