"""Times sink_jax and transformers (PyTorch) on CPUs, alternately in one process.

    bash launch/test.sh --parity --collect-only          # installs PyTorch and transformers
    PYTHONPATH=.venv/parity:. .venv/bin/python tests/benchmark/against_transformers.py FILE.json

Training steps of LLaMA models with AdamW, and SmolLM2-135M in float32: a probe, a forward pass,
generation. Both sides have the same sizes, dtype and optimizer and, for SmolLM2, the same tokens
and dequantised weights. The floor of training steps, the probe and the forward pass is the time of
their matrix products at the rate of a large one; generation, which reads all weights for each
token, has none.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

import sink_jax as sj
from sink_jax.benchmark.measure import ROUNDS, Program, compare, describe, interval, measured_rates
from sink_jax.benchmark.train_step import _prepare
from sink_jax.devices import cores, keep_freed_memory
from sink_jax.models.sizes import flops_per_token, sized
from sink_jax.pretrained.families import family_for
from sink_jax.pretrained.gguf import GgufCheckpoint, name_in_file
from sink_jax.pretrained.hub import PACKAGED

MODEL = 'SmolLM2-135M-Instruct'
STEPS = {  # name: (blocks, width, heads, FFN width, vocabulary, sequences, tokens)
  'training step, 0.15M parameters, 32 x 64 tokens': (2, 64, 4, 256, 256, 32, 64),
  'training step, 10M parameters, 8 x 256 tokens': (8, 256, 4, 704, 8192, 8, 256),
}
waiting = lambda result: None  # PyTorch on a CPU returns when it has computed


def training_steps(rates, layers, width, heads, ffn, vocab, sequences, length):
  """The seconds of the floor, and the programs of both sides."""
  model = sized(
    'tiny',
    layers=layers,
    d_model=width,
    heads=heads,
    ffn_hidden=ffn,
    vocab_size=vocab,
    dtype='float32',
    unroll=layers,
  )
  ours = _prepare({'batch': sequences, 'length': length}, model)
  theirs = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      num_hidden_layers=layers,
      hidden_size=width,
      num_attention_heads=heads,
      intermediate_size=ffn,
      vocab_size=vocab,
      max_position_embeddings=length,
      attn_implementation='sdpa',
      use_cache=False,
    )
  )
  optimizer = torch.optim.AdamW(
    theirs.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
  )
  tokens = torch.randint(0, vocab, (sequences, length))

  def step():
    theirs(tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

  floor = sequences * length * flops_per_token(model, length) / rates.flops
  return floor, {'sink_jax': ours, 'transformers': Program(step, waiting)}


def published(attention, folder):
  """SmolLM2 with the same float32 weights in transformers."""
  checkpoint = GgufCheckpoint(PACKAGED[MODEL].find())
  hf, run = checkpoint.config, sj.load_pretrained(MODEL)
  if not (folder / 'config.json').exists():
    names = [
      (name, name_in_file('llama', name)) for name in family_for(hf).stored_tensors(hf, run.config)
    ]
    save_file(
      {
        theirs: np.ascontiguousarray(checkpoint.read(ours))
        for theirs, ours in names
        if ours in checkpoint.entries
      },
      folder / 'model.safetensors',
      {'format': 'pt'},
    )
    known = {key: value for key, value in hf.items() if value is not None}
    (folder / 'config.json').write_text(json.dumps(known | {'max_position_embeddings': 8192}))
  return run, transformers.AutoModelForCausalLM.from_pretrained(
    folder, attn_implementation=attention, dtype=torch.float32
  ).eval()


def of_smollm2(rates, folder):
  """{name: (the seconds of the floor, the programs of both sides)}."""
  run, eager = published('eager', folder)
  _, sdpa = published('sdpa', folder)
  draw = lambda *shape: np.random.default_rng(0).integers(100, 40_000, shape)
  ids, long, prompts = draw(100, 64), draw(1, 2048), draw(8, 16)

  @torch.no_grad()
  def importance():
    for part in torch.from_numpy(ids).split(25):  # 1 GB of maps and states at a time
      # Without the unembedding: a probe computes no logits.
      out = eager.model(part, output_attentions=True, output_hidden_states=True, use_cache=False)
      [x[..., 0].mean((0, 2)) for x in out.attentions]
      [x.norm(dim=-1).mean(0) for x in out.hidden_states]

  @torch.no_grad()
  def forward():
    return sdpa(torch.from_numpy(long), use_cache=False).logits

  def generate(count):
    begin = torch.from_numpy(prompts[:count])
    return lambda: sdpa.generate(
      begin,
      max_new_tokens=64,
      min_new_tokens=64,
      do_sample=False,
      attention_mask=torch.ones_like(begin),
      pad_token_id=0,
    )

  flops = lambda tokens: tokens.size * flops_per_token(run.config, tokens.shape[1]) / 3
  products = lambda tokens: flops(tokens) / rates.flops
  return {
    'Sink_1 of SmolLM2, 100 x 64 tokens': (
      products(ids),
      {
        'sink_jax': Program(lambda: sj.probe(run, ids).sink_rate(1, 0.3), waiting),
        'transformers': Program(importance, waiting),
      },
    ),
    'forward pass of SmolLM2, 2,048 tokens': (
      products(long),
      {'sink_jax': Program(lambda: run.logits(long)), 'transformers': Program(forward, waiting)},
    ),
    **{
      f'64 tokens of SmolLM2, greedy, batch {n}': (
        None,
        {
          'sink_jax': Program(lambda n=n: run.generate(prompts[:n], 64), waiting),
          'transformers': Program(generate(n), waiting),
        },
      )
      for n in (1, 8)
    },
  }


def main():
  torch.set_num_threads(cores())
  keep_freed_memory()  # as `train` does
  rates, rows = measured_rates('float32', 5.0), []
  with tempfile.TemporaryDirectory() as folder:
    groups = [
      lambda name=name, sizes=sizes: {name: training_steps(rates, *sizes)}
      for name, sizes in STEPS.items()
    ]
    for group in [*groups, lambda: of_smollm2(rates, Path(folder))]:
      for name, (floor, programs) in group().items():
        times, failed = compare(programs, 20.0 if 'step' in name else 60.0)
        assert not failed, failed
        ratio, low, high = interval([a / b for a, b in zip(*times.values())])
        rows.append(
          {
            'name': name,
            **{key: float(np.median(of)) for key, of in times.items()},
            'ratio': ratio,
            'low': low,
            'high': high,
            'floor': floor,
          }
        )
        print(f'{name}: {rows[-1]}', flush=True)
  made = describe(rates, 'float32') | {
    'rounds': ROUNDS,
    'torch': torch.__version__,
    'transformers': transformers.__version__,
  }
  Path(sys.argv[1]).write_text(json.dumps({'made': made, 'rows': rows}, indent=1) + '\n')


if __name__ == '__main__':
  main()
