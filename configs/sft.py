"""Supervised fine-tuning (Figure 30): does a model without a sink train as stably as one with it?

  python -m sink_jax sweep --config=configs/paper.py --only="1b-*" --workdir=runs/one_billion
  python -m sink_jax sweep --config=configs/sft.py --workdir=runs/sft/paper
  python -m sink_jax report --runs=runs/sft --out=report

and for two CPU cores, where each seed begins with the pre-trained run of that seed:

  python -m configs.make_stdlib_chat data/stdlib_chat
  python -m sink_jax sweep --config=configs/paper.py --budget=desk --only=default,sigmoid \\
    --seeds=1,2,3 --workdir=runs/desk
  python -m sink_jax sweep --config=configs/sft.py --budget=desk --seeds=1,2,3 \\
    --workdir=runs/sft/paper

Protocol `paper` counts all tokens in the loss, `answers` only the tokens of answers.

The paper states its 1B models with softmax and with sigmoid without normalisation; UltraChat with
200,000 conversations; all parameters; a learning rate of 2e-5 with a cosine; batches of 64 x 2048
tokens; one epoch; and alignment-handbook. The recipe of the latter
(zephyr-7b-beta/sft/config_full.yaml) and the defaults of its trainer give the warm-up of 10 % of
the steps, the zephyr template, a loss of all tokens, AdamW with b2 = 0.999, no weight decay,
gradients clipped at 1, and a cosine down to 0. The steps of an epoch depend on the tokenizer, which
neither names: 2,200 steps are 288 million tokens. data/ultrachat holds ultrachat_200k as .jsonl
files.

The budget `desk` takes the text of configs/make_stdlib_chat.py, 300 steps, and the paper's share of
the pre-training rate, 2e-5 of 4e-4. `sft-unstable` is a positive control: 1,000 times the learning
rate.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import budget as budgets
from configs import paper
from sink_jax.arguments import check_known
from sink_jax.data.chat import ChatJsonl
from sink_jax.data.tokenizer import Bytes
from sink_jax.train.config import as_config_dict, changed
from sink_jax.train.optimizer import AdamW

_WARMUP = 0.1  # of the steps
_TUNING = {
  'steps': 2_200,
  'batch_size': 64,
  'log_every': 1,  # stability shows in single steps
  'optimizer.rule': AdamW(b2=0.999),
  'optimizer.learning_rate': 2e-5,
  'optimizer.final_fraction': 0.0,
  'optimizer.warmup_steps': round(_WARMUP * 2_200),
  'optimizer.weight_decay': 0.0,
  'data.valid_fraction': 0.005,
}
TRIALS = {
  'sft-softmax': _TUNING,
  'sft-sigmoid': _TUNING | paper.SIGMOID,
  'sft-unstable': _TUNING | {'optimizer.learning_rate': 1_000 * 2e-5},
}
_LOSS = {'paper': 'all', 'answers': 'answers'}  # what it counts, by protocol
PROTOCOLS = {protocol: budgets.PROTOCOLS['paper'] for protocol in _LOSS}
_STEPS = 300  # of the budget desk


def _chat(path: str, loss: str) -> ChatJsonl:
  return ChatJsonl(path=path, template='zephyr', loss=loss)


def _full(loss: str) -> dict[str, Any]:
  return {'model.size': '1b', 'data.source': _chat('data/ultrachat', loss)}


def _desk(loss: str) -> dict[str, Any]:
  return {
    'steps': _STEPS,
    'batch_size': 16,
    'optimizer.warmup_steps': round(_WARMUP * _STEPS),
    'data.source': _chat('data/stdlib_chat/train.jsonl', loss),
    'data.valid_source': _chat('data/stdlib_chat/valid.jsonl', loss),
    'data.tokenizer': Bytes(),  # replaced by the tokenizer of the source
    'probe.every': 100,
    'validation.every': 100,
    'checkpoint_every': 100,
  }


# {budget: (what it changes, the runs to begin with, of softmax and of sigmoid)}
_BUDGETS = {
  'full': (_full, 'runs/one_billion/1b-softmax', 'runs/one_billion/1b-sigmoid'),
  'desk': (_desk, 'runs/desk/default-seed-{seed}', 'runs/desk/sigmoid-seed-{seed}'),
}


def get_config(name: str = '', budget: str = 'full', protocol: str = 'paper') -> ConfigDict:
  run = budgets.experiment(TRIALS, name, budget, protocol, PROTOCOLS, task='sft')
  check_known(budget, _BUDGETS, 'Fine-tuning has no budget')
  changes, softmax, sigmoid = _BUDGETS[budget]
  source = sigmoid if name == 'sft-sigmoid' else softmax
  return as_config_dict(changed(run, changes(_LOSS[protocol]) | {'init.source': source}))
