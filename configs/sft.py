"""Supervised fine-tuning (Figure 30): does a model without a sink train as stably as one with it?

  python -m sink_jax sweep --config=configs/one_billion.py --workdir=runs/one_billion
  python -m sink_jax sweep --config=configs/sft.py --workdir=runs/sft/paper
  python -m sink_jax sweep --config=configs/sft.py --protocol=answers --workdir=runs/sft/answers
  python -m sink_jax report --kind=fine-tuning --runs=runs/sft --out=sft

and for two CPU cores, where each seed begins with the pre-trained run of that seed:

  python -m configs.make_stdlib_chat data/stdlib_chat
  python -m sink_jax sweep --config=configs/desk.py --only=default,sigmoid --seeds=1,2,3 \\
    --workdir=runs/desk
  python -m sink_jax sweep --config=configs/sft.py --budget=desk --seeds=1,2,3 \\
    --workdir=runs/sft/paper

The paper states: its 1B models with softmax, and with sigmoid without normalisation; UltraChat with
200,000 conversations; all parameters; a learning rate of 2e-5 with a cosine; batches of 64 x 2048
tokens; one epoch. It names the platform, alignment-handbook, and nothing more. From that platform's
recipe (zephyr-7b-beta/sft/config_full.yaml) are: a warm-up of 10 % of the steps, bfloat16, the
zephyr template, a loss of all tokens, questions too; and from the defaults of the trainer that
reads it: AdamW with b2 = 0.999, no weight decay, gradients clipped at 1, a cosine down to 0. How
many steps an epoch has depends on the tokenizer, and is written nowhere: 2,200 steps are 288
million tokens. `python -m sink_jax data_build` prints how many there are, for --config.steps
and --config.optimizer.warmup_steps. data/ultrachat holds ultrachat_200k as .jsonl files.

The budgets `desk` and `smoke` take the default run and the sigmoid run of that budget, with their
sizes, sequences and batches; the text is that of configs/make_stdlib_chat.py, for 300 steps, and the
learning rate is the paper's share of the pre-training one, 2e-5 of 4e-4. Protocol `paper` counts
all tokens in the loss, `answers` those of answers alone. Every step is logged, since the page
judges single steps. The tokenizer is the one that lies in the workdir of the run to begin with.

`sft-unstable` is no model of the paper: it is sft-softmax with 1,000 times the learning rate, which
the criteria of the page have to find unstable before they say anything of the others.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import attention_operation, budget
from sink_jax.arguments import check_known
from sink_jax.models.sizes import SIZES

_WARMUP = 0.1  # of the steps
_TUNING = {
    'steps': 2_200,
    'batch_size': 64,
    'log_every': 1,
    'optimizer.rule': 'AdamW(b1=0.9, b2=0.999, eps=1e-08)',
    'optimizer.learning_rate': 2e-5,
    'optimizer.final_fraction': 0.0,
    'optimizer.warmup_steps': round(_WARMUP * 2_200),
    'optimizer.weight_decay': 0.0,
    'data.valid_fraction': 0.005,
}
_UNSTABLE = 1_000
TRIALS = {
    'sft-softmax': _TUNING,
    'sft-sigmoid': _TUNING | attention_operation.TRIALS['sigmoid'],
    'sft-unstable': _TUNING | {'optimizer.learning_rate': _UNSTABLE * 2e-5},
}
_LOSS = {'paper': 'all', 'answers': 'answers'}  # what it counts, by protocol
PROTOCOLS = {protocol: budget.PROTOCOLS['paper'] for protocol in _LOSS}

_STEPS = 300  # of the small budgets


def _full(loss: str) -> dict[str, Any]:
  return {'model.size': '1b', **_sizes('1b'),
          'data.source': f"ChatJsonl(path='data/ultrachat', template='zephyr', loss={loss!r})"}


def _small(loss: str) -> dict[str, Any]:
  return {**_sizes('tiny'), 'steps': _STEPS, 'batch_size': 16,
          'optimizer.warmup_steps': round(_WARMUP * _STEPS),
          'data.source': f"ChatJsonl(path='data/stdlib_chat/train.jsonl', template='zephyr', loss={loss!r})",
          'data.valid_source': f"ChatJsonl(path='data/stdlib_chat/valid.jsonl', template='zephyr', loss={loss!r})",
          'data.tokenizer': 'Bytes()',  # which stands for that of the source
          'probe.every': 100, 'validation.every': 100, 'checkpoint_every': 100}


def _sizes(size: str) -> dict[str, int]:
  """The source's, written out: what a run costs is then known before the source is there."""
  return {f'model.{key}': SIZES[size][key] for key in ('layers', 'd_model', 'heads', 'ffn_hidden')}


# {budget: (what it changes, the runs to begin with, of softmax and of sigmoid)}
_BUDGETS = {
    'full': (_full, 'runs/one_billion/1b-softmax', 'runs/one_billion/1b-sigmoid'),
    'desk': (_small, 'runs/desk/default-seed-{seed}', 'runs/desk/sigmoid-seed-{seed}'),
    'smoke': (_small, 'runs/smoke/default-seed-{seed}', 'runs/smoke/sigmoid-seed-{seed}'),
}

def get_config(argument: str = '') -> ConfigDict:
  config = budget.config(TRIALS, argument, protocols=PROTOCOLS)
  label = config.to_dict()['label']
  check_known(label['budget'], _BUDGETS, 'Fine-tuning has no budget')
  changes, softmax, sigmoid = _BUDGETS[label['budget']]
  config.update_from_flattened_dict(changes(_LOSS[label['protocol']]) | {
      'init.source': sigmoid if label['trial'] == 'sft-sigmoid' else softmax})
  return config
