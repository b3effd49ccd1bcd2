"""Tiny checkpoints of every supported family, and what transformers computes with them.

    python tests/pretrained/make_fixtures.py [--out=DIR] [--only=llama] [--seed=0]

Runs where torch and transformers are. Every case becomes a folder with config.json and the
safetensors files of a checkpoint, as published ones are laid out, and expected.safetensors:
tokens, logits, hidden_states.0 to .N as transformers returns them (the last one after the
final norm), last_block (before that norm), and attentions.i of every attention layer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.granite_swa import modeling_granite_swa

SEQUENCES, LENGTH = 2, 14
# Far larger than usual, so that a norm without it, or with another one, is found out.
EPSILON = 0.003
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
             num_attention_heads=4, max_position_embeddings=32)
LLAMA = SIZES | dict(rms_norm_eps=EPSILON)
NEOX = SIZES | dict(layer_norm_eps=EPSILON)
GPT2 = dict(vocab_size=64, n_embd=32, n_inner=40, n_layer=2, n_head=4, n_positions=16,
            layer_norm_epsilon=EPSILON)
OPT = dict(vocab_size=64, hidden_size=32, ffn_dim=40, num_hidden_layers=2,
           num_attention_heads=4, max_position_embeddings=16)
FALCON = dict(vocab_size=64, hidden_size=32, ffn_hidden_size=40, num_hidden_layers=2,
              num_attention_heads=4, layer_norm_epsilon=EPSILON)
MOE = dict(num_key_value_heads=2, num_experts_per_tok=2)


def old_rope_keys(config, tensors):
  """Writes rotary settings as all published configs do that are older than transformers 5."""
  rope = config.pop('rope_parameters')
  if config['model_type'] == 'gpt_neox':
    config['rotary_emb_base'] = rope.pop('rope_theta')
    config['rotary_pct'] = rope.pop('partial_rotary_factor')
  else:
    config['rope_theta'] = rope.pop('rope_theta')
  kind = rope.pop('rope_type')
  name = 'type' if kind == 'linear' else 'rope_type'  # the key before llama3 and yarn
  config['rope_scaling'] = {name: kind, **rope} if rope else None
  return config, tensors


def gpt2_as_published(config, tensors):
  """Without the prefix, and with the masks of every layer."""
  tensors = {name.removeprefix('transformer.'): x for name, x in tensors.items()}
  size = config['n_positions']
  for layer in range(config['n_layer']):
    tensors[f'h.{layer}.attn.bias'] = torch.ones(size, size).tril()[None, None]
    tensors[f'h.{layer}.attn.masked_bias'] = torch.tensor(-1e4)
  return config, tensors


def neox_as_published(config, tensors):
  """With the buffers that Pythia's files hold."""
  size = config['max_position_embeddings']
  for layer in range(config['num_hidden_layers']):
    name = f'gpt_neox.layers.{layer}.attention'
    tensors[f'{name}.bias'] = torch.ones(1, 1, size, size, dtype=torch.bool).tril()
    tensors[f'{name}.masked_bias'] = torch.tensor(-1e9)
    tensors[f'{name}.rotary_emb.inv_freq'] = torch.ones(1)
  return old_rope_keys(config, tensors)


def llama_as_published(config, tensors):
  """With the frequencies that Llama 2's files hold."""
  for layer in range(config['num_hidden_layers']):
    tensors[f'model.layers.{layer}.self_attn.rotary_emb.inv_freq'] = torch.ones(4)
  return old_rope_keys(config, tensors)


def without_layers(config, tensors):
  """Without the list of layers, which follows from other keys; of Gemma 2 with a key left unread."""
  del config['layer_types']
  if config['model_type'] == 'gemma2':
    config['hidden_act'] = 'gelu_pytorch_tanh'
  return old_rope_keys(config, tensors)


def phi3_as_published(config, tensors):
  """With the share of rotated channels beside the other keys, as Phi-4-mini has it."""
  share = config['rope_parameters'].pop('partial_rotary_factor')
  config, tensors = old_rope_keys(config, tensors)
  return config | {'partial_rotary_factor': share}, tensors


def gemma3_as_published(config, tensors):
  """With the keys before transformers 5: one pattern, one base for each kind of layer."""
  rope = config.pop('rope_parameters')
  del config['layer_types']
  full, sliding = rope['full_attention'], rope['sliding_attention']
  config |= {'rope_theta': full.pop('rope_theta'), 'rope_scaling': full,
             'rope_local_base_freq': sliding['rope_theta'], 'sliding_window_pattern': 2}
  return config, tensors


def gemma3_with_images(config, tensors):
  """As the language model of a model that sees images, whose tensors stand beside its own."""
  config, tensors = gemma3_as_published(config, tensors)
  tensors = {f'language_model.{name}': x for name, x in tensors.items()}
  tensors |= {'vision_tower.vision_model.embeddings.weight': torch.ones(3, 2),
              'multi_modal_projector.mm_soft_emb_norm.weight': torch.ones(2)}
  return {'model_type': 'gemma3', 'text_config': config}, tensors


def olmo3_as_published(config, tensors):
  """With the keys before transformers 5."""
  del config['rope_parameters'], config['layer_types']
  return config | {'rope_theta': 500000, 'rope_scaling': None}, tensors


def gpt_oss_as_published(config, tensors):
  """With 4-bit weights of the experts; their bytes are those of the weights that were drawn."""
  config['quantization_config'] = {'quant_method': 'mxfp4', 'modules_to_not_convert': [
      'model.layers.*.self_attn', 'model.layers.*.mlp.router', 'model.embed_tokens', 'lm_head']}
  for name in [name for name in tensors if name.endswith('_proj') and 'experts' in name]:
    x = tensors.pop(name)
    count, inner, outer = x.shape
    groups = count, outer, inner // 32
    random = x.view(torch.uint8).flatten()[::2]  # lower halves of bfloat16 numbers
    tensors[f'{name}_blocks'] = random[:x.numel() // 2].reshape(*groups, 16).clone()
    tensors[f'{name}_scales'] = 122 + random[-x.numel() // 32:].reshape(groups) % 4
  return old_rope_keys(config, tensors)


def mixtral_fused(config, tensors):
  """With the matrices of a layer's experts in two tensors, as transformers 5 computes with them."""
  for layer in range(config['num_hidden_layers']):
    old, new = f'model.layers.{layer}.block_sparse_moe', f'model.layers.{layer}.mlp'
    of_all = lambda matrix: torch.stack([tensors.pop(f'{old}.experts.{e}.{matrix}.weight')
                                         for e in range(config['num_local_experts'])])
    tensors[f'{new}.gate.weight'] = tensors.pop(f'{old}.gate.weight')
    tensors[f'{new}.experts.gate_up_proj'] = torch.cat([of_all('w1'), of_all('w3')], 1)
    tensors[f'{new}.experts.down_proj'] = of_all('w2')
  return config, tensors


def unedited(config, tensors):
  """As transformers saves it."""
  return config, tensors


# Name: model_type, config, dtype of the stored tensors, edit of the saved files.
CASES = {
    'gpt2': ('gpt2', GPT2, 'float32', gpt2_as_published),
    'gpt2_inverse_layer': ('gpt2', GPT2 | dict(scale_attn_by_inverse_layer_idx=True,
                                               n_embd=24, n_inner=None), 'float32', unedited),
    'gpt2_unscaled': ('gpt2', GPT2 | dict(scale_attn_weights=False,
                                          scale_attn_by_inverse_layer_idx=True),
                      'float32', unedited),
    'llama': ('llama', LLAMA, 'float16', llama_as_published),
    'llama_llama3': ('llama', LLAMA | dict(
        num_key_value_heads=2, max_position_embeddings=128, rope_parameters=dict(
            rope_type='llama3', rope_theta=100.0, factor=8.0, low_freq_factor=1.0,
            high_freq_factor=4.0, original_max_position_embeddings=64)),
                     'bfloat16', old_rope_keys),
    'llama_biases': ('llama', LLAMA | dict(tie_word_embeddings=True, attention_bias=True,
                                           mlp_bias=True), 'float32', unedited),
    'llama_linear': ('llama', LLAMA | dict(
        head_dim=12, rope_parameters=dict(rope_type='linear', rope_theta=1000.0, factor=2.0)),
                     'bfloat16', old_rope_keys),
    'mistral': ('mistral', LLAMA | dict(num_key_value_heads=2, sliding_window=5),
                'bfloat16', old_rope_keys),
    'gpt_neox': ('gpt_neox', NEOX | dict(num_attention_heads=2, rope_parameters=dict(
        rope_type='default', rope_theta=1000.0, partial_rotary_factor=0.25)),
                 'float16', neox_as_published),
    'gpt_neox_sequential': ('gpt_neox', NEOX | dict(
        use_parallel_residual=False, attention_bias=False, rope_parameters=dict(
            rope_type='default', rope_theta=500.0, partial_rotary_factor=0.5)),
                            'float32', unedited),
    'opt': ('opt', OPT, 'float16', unedited),
    'opt_post_norm': ('opt', OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=24),
                      'float16', unedited),
    'jamba': ('jamba', LLAMA | MOE | dict(
        hidden_size=16, intermediate_size=12, num_hidden_layers=8, num_experts=4,
        attn_layer_period=4, attn_layer_offset=2, mamba_d_state=6, mamba_dt_rank=3),
              'bfloat16', unedited),
    'jamba_biases': ('jamba', LLAMA | MOE | dict(
        hidden_size=16, num_hidden_layers=3, num_experts=1, attn_layer_period=3,
        attn_layer_offset=0, mamba_d_state=6, mamba_d_conv=3, mamba_proj_bias=True,
        mamba_conv_bias=False, tie_word_embeddings=True), 'float32', unedited),
    'qwen2': ('qwen2', LLAMA | dict(
        num_key_value_heads=2, tie_word_embeddings=True, use_sliding_window=True,
        sliding_window=4, max_window_layers=1), 'bfloat16', without_layers),
    'phi3': ('phi3', LLAMA | dict(
        num_key_value_heads=2, sliding_window=5, rope_parameters=dict(
            rope_type='default', rope_theta=100.0, partial_rotary_factor=0.5)),
             'bfloat16', phi3_as_published),
    'mixtral': ('mixtral', LLAMA | MOE | dict(
        intermediate_size=12, num_local_experts=3, head_dim=12, sliding_window=6),
                'bfloat16', old_rope_keys),
    'mixtral_fused': ('mixtral', LLAMA | MOE | dict(intermediate_size=12, num_local_experts=3),
                      'bfloat16', mixtral_fused),
    'granite': ('granite', LLAMA | dict(
        num_key_value_heads=2, attention_bias=True, embedding_multiplier=3.0,
        attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=2.0),
                'bfloat16', old_rope_keys),
    'falcon': ('falcon', FALCON, 'bfloat16', old_rope_keys),
    'falcon_grouped': ('falcon', FALCON | dict(new_decoder_architecture=True, num_kv_heads=2),
                       'bfloat16', unedited),
    'falcon_sequential': ('falcon', FALCON | dict(
        parallel_attn=False, multi_query=False, bias=True, tie_word_embeddings=False),
                          'float32', unedited),
    'qwen3': ('qwen3', LLAMA | dict(num_key_value_heads=2, head_dim=12,
                                    tie_word_embeddings=True), 'bfloat16', old_rope_keys),
    'qwen3_window': ('qwen3', LLAMA | dict(
        num_hidden_layers=3, num_key_value_heads=1, head_dim=8, use_sliding_window=True,
        sliding_window=4, max_window_layers=1, max_position_embeddings=1024, rope_parameters=dict(
            rope_type='yarn', rope_theta=20.0, factor=4.0, beta_fast=16.0, beta_slow=2.0,
            original_max_position_embeddings=256)), 'bfloat16', without_layers),
    'granite_swa': ('granite_swa', LLAMA | dict(
        num_hidden_layers=4, num_key_value_heads=2, sliding_window=4, tie_word_embeddings=True,
        attention_bias=True, mlp_bias=True, embedding_multiplier=3.0, attention_multiplier=0.2,
        residual_multiplier=0.5, logits_scaling=2.0,
        layer_types=['full_attention', 'sliding_attention'] * 2,
        layer_rope_theta=[0, 100.0, 1000.0, 100.0]), 'bfloat16', unedited),
    'olmo2': ('olmo2', LLAMA | dict(num_key_value_heads=2), 'bfloat16', old_rope_keys),
    # Caps so low that scores and logits reach them.
    'gemma2': ('gemma2', LLAMA | dict(
        num_hidden_layers=4, num_key_value_heads=2, head_dim=12, sliding_window=4,
        query_pre_attn_scalar=6, attn_logit_softcapping=2.5, final_logit_softcapping=4.0),
               'bfloat16', without_layers),
    'gemma2_uncapped': ('gemma2', LLAMA | dict(
        num_key_value_heads=4, head_dim=8, attn_logit_softcapping=None,
        final_logit_softcapping=None, attention_bias=True, tie_word_embeddings=False,
        layer_types=['full_attention'] * 2), 'float32', unedited),
    'gemma3': ('gemma3_text', LLAMA | dict(
        num_hidden_layers=4, num_key_value_heads=2, head_dim=12, sliding_window=4,
        query_pre_attn_scalar=6, sliding_window_pattern=2, rope_parameters=dict(
            full_attention=dict(rope_type='linear', rope_theta=1000.0, factor=2.0),
            sliding_attention=dict(rope_type='default', rope_theta=50.0))),
               'bfloat16', gemma3_as_published),
    'gemma3_new': ('gemma3_text', LLAMA | dict(
        num_key_value_heads=4, head_dim=8, attention_bias=True, tie_word_embeddings=False,
        sliding_window=4, final_logit_softcapping=4.0,
        layer_types=['full_attention', 'sliding_attention']), 'float32', unedited),
    'gemma3_images': ('gemma3_text', LLAMA | dict(
        head_dim=8, num_key_value_heads=4, sliding_window=4, sliding_window_pattern=2),
                      'bfloat16', gemma3_with_images),
    'smollm3': ('smollm3', LLAMA | dict(
        num_hidden_layers=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=4,
        rope_parameters=dict(rope_type='default', rope_theta=100.0)), 'bfloat16', old_rope_keys),
    'smollm3_listed': ('smollm3', LLAMA | dict(
        num_hidden_layers=3, num_key_value_heads=1, no_rope_layers=[0, 1, 1],
        tie_word_embeddings=False), 'float32', unedited),
    'olmo3': ('olmo3', LLAMA | dict(
        num_hidden_layers=4, num_key_value_heads=2, sliding_window=4, max_position_embeddings=1024,
        rope_parameters=dict(
            full_attention=dict(rope_type='yarn', rope_theta=20.0, factor=4.0, beta_fast=16.0,
                                beta_slow=2.0, original_max_position_embeddings=256),
            sliding_attention=dict(rope_type='default', rope_theta=30.0))),
              'bfloat16', unedited),
    'olmo3_plain': ('olmo3', LLAMA | dict(num_hidden_layers=2), 'float32', olmo3_as_published),
    'gpt_oss': ('gpt_oss', LLAMA | MOE | dict(
        head_dim=8, intermediate_size=24, num_local_experts=4, sliding_window=4,
        rope_parameters=dict(
            rope_type='yarn', rope_theta=150.0, factor=4.0, beta_fast=4.0, beta_slow=0.5,
            truncate=False, original_max_position_embeddings=32)), 'bfloat16', old_rope_keys),
    'gpt_oss_mxfp4': ('gpt_oss', LLAMA | MOE | dict(
        head_dim=8, intermediate_size=32, num_local_experts=3, sliding_window=6,
        rope_parameters=dict(
            rope_type='yarn', rope_theta=150.0, factor=4.0, beta_fast=4.0, beta_slow=0.5,
            truncate=False, original_max_position_embeddings=32)),
                      'bfloat16', gpt_oss_as_published),
}


def with_sink_share(attention):
  """GraniteSWA's attention, which returns the weights of softmax, with those that act on values."""
  def wrapped(module, query, key, value, mask, scaling, **options):
    out, weights = attention(module, query, key, value, mask, scaling, **options)
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ keys.mT * scaling + (0 if mask is None else mask)
    total = torch.logaddexp(scores.logsumexp(-1), module.sinks[:, None])
    return out, (scores - total[..., None]).exp()
  return wrapped


modeling_granite_swa.eager_attention_forward = with_sink_share(
    modeling_granite_swa.eager_attention_forward)


def draw(name, x, generator, gains=1):
  """Weights whose mistakes show: gains off one, biases off zero, attention far from uniform.

  gains: what they lie around; of Gemma it is 0, as it adds one to them.
  """
  noise = torch.randn(x.shape, generator=generator)
  if name.endswith('A_log'):
    return torch.log(torch.arange(1.0, 1 + x.shape[1])) + 0.2 * noise
  if name.endswith('.D') or x.ndim == 1 and name.endswith('weight'):
    return gains + 0.3 * noise
  if name.endswith('dt_proj.bias'):
    return noise - 3  # small steps, as trained ones are
  if name.endswith(('bias', 'sinks')):
    return 0.5 * noise
  if any(word in name for word in ('embed_tokens', 'embed_in', 'embed_positions', 'word_embeddings',
                                   'wte', 'wpe')):
    return noise
  scale = 1.4
  if name.endswith('experts.gate_up_proj'):
    scale = 4  # what enters gpt-oss's gated unit has to reach the limit that it is clamped at
  elif name.endswith(('mamba.out_proj.weight', 'experts.down_proj')):
    scale = 0.3  # long sums and products come out large, and would drown what is before them
  return scale * noise / min(x.shape[-2:]) ** 0.5


def save(folder, model_type, kwargs, dtype, edit, generator):
  """Writes the checkpoint of a model with random weights."""
  config = AutoConfig.for_model(model_type, bos_token_id=0, eos_token_id=0, pad_token_id=1,
                                **kwargs)
  model = AutoModelForCausalLM.from_config(config)
  with torch.no_grad():
    for name, x in model.named_parameters():
      x.copy_(draw(name, x, generator, 0 if model_type.startswith('gemma') else 1))
  sharded = model_type == 'mistral'
  model.to(getattr(torch, dtype)).save_pretrained(
      folder, max_shard_size='20KB' if sharded else '1GB')
  (folder / 'generation_config.json').unlink(missing_ok=True)
  path = folder / 'config.json'
  tensors = {} if sharded else load_file(folder / 'model.safetensors')
  config, tensors = edit(json.loads(path.read_text()), tensors)
  path.write_text(json.dumps(config, indent=2, sort_keys=True) + '\n')
  if tensors:
    save_file(tensors, folder / 'model.safetensors', {'format': 'pt'})


def unpack(folder, out):
  """The same checkpoint with the 4-bit numbers written out, by transformers' own function.

  It would do this itself when loading, but only where the package accelerate is.
  """
  config = json.loads((folder / 'config.json').read_text())
  del config['quantization_config']
  (out / 'config.json').write_text(json.dumps(config))
  tensors = load_file(folder / 'model.safetensors')
  for name in [name for name in tensors if name.endswith('_blocks')]:
    name = name.removesuffix('_blocks')
    tensors[name] = convert_moe_packed_tensors(
        tensors.pop(f'{name}_blocks'), tensors.pop(f'{name}_scales'))
  save_file(tensors, out / 'model.safetensors', {'format': 'pt'})


def only_text(folder, out):
  """The language model of a model that sees images, as a checkpoint of its own."""
  config = json.loads((folder / 'config.json').read_text())['text_config']
  (out / 'config.json').write_text(json.dumps(config))
  tensors = load_file(folder / 'model.safetensors')
  save_file({name.removeprefix('language_model.'): x for name, x in tensors.items()
             if name.startswith('language_model.')}, out / 'model.safetensors', {'format': 'pt'})


def expected(folder, tokens):
  """What transformers computes in float32 with the files of the folder."""
  model, info = AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation='eager', output_loading_info=True)
  assert not info['missing_keys'] and not info['mismatched_keys'], info
  last = []
  blocks = next(x for name, x in model.named_modules() if name.split('.')[-1] in ('layers', 'h'))
  blocks[-1].register_forward_hook(lambda module, inputs, output: last.append(
      output[0] if isinstance(output, tuple) else output))
  with torch.no_grad():
    out = model.eval()(tokens, output_hidden_states=True, output_attentions=True,
                       use_cache=False)
  result = {'tokens': tokens.int(), 'logits': out.logits, 'last_block': last[0].clone()}
  result |= {f'hidden_states.{i}': x for i, x in enumerate(out.hidden_states)}
  result |= {f'attentions.{i}': x for i, x in enumerate(out.attentions)}
  return {name: x.contiguous() for name, x in result.items()}


def make(folder, case, seed):
  """Writes one case into its folder."""
  generator = torch.Generator().manual_seed(seed + zlib.crc32(folder.name.encode()))
  folder.mkdir(parents=True, exist_ok=True)
  for old in folder.iterdir():
    old.unlink()
  save(folder, *case, generator)
  vocabulary = case[1]['vocab_size']
  tokens = torch.randint(vocabulary, (SEQUENCES, LENGTH), generator=generator)
  with tempfile.TemporaryDirectory() as scratch:
    readable = folder
    if case[-1] is gpt_oss_as_published:
      readable = Path(scratch)
      unpack(folder, readable)
    if case[-1] is gemma3_with_images:
      readable = Path(scratch)
      only_text(folder, readable)
    save_file(expected(readable, tokens), folder / 'expected.safetensors')


def main():
  """Makes the cases that the command line names."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', type=Path, default=Path(__file__).parent / 'fixtures')
  parser.add_argument('--only', choices=CASES)
  parser.add_argument('--seed', type=int, default=0)
  options = parser.parse_args()
  for name in [options.only] if options.only else CASES:
    make(options.out / name, CASES[name], options.seed)
    size = sum(path.stat().st_size for path in (options.out / name).iterdir())
    print(f'{name}: {size / 1000:.0f} kB')


if __name__ == '__main__':
  main()
