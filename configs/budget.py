"""Trials of the paper: its data, its protocols, and the budgets at which they can be trained.

`full`: everything as in the paper.

`tenth`: models, batches, learning rates, weight decays and windows as in the paper; a tenth of the
steps and of the unique tokens, so that epochs stay the same; a warm-up of 100 steps, as there.

`desk`, for one CPU core, five to ten minutes a trial; `python -m configs.budget` prints it next to
the paper. These rules were written down before its runs:

  Steps, warm-up and clip are the paper's: 20,000 updates, of 16 x 64 tokens.
  The learning rate is that of five with the least validation loss of softmax (configs/grid.py).
  Sinks play no part in the choice.
  Weight decay is what keeps the paper's product of rate, decay and steps, 0.8. The trial
  weight-decay-0.5 says what more of it does.
  Unique tokens, if a trial limits them: the paper's share of all tokens seen. Windows: the paper's
  share of the sequence (32 of 2048 becomes 1 of 64).
  A trial that changes the rate, decay, steps or batch changes it by the paper's factor.
  Positions of fixed and random tokens, prefixes, norms of fixed values, learnable dimensions of k*:
  as in the paper, if they fit.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import base
from sink_jax.arguments import check_known
from sink_jax.attention.extra_key_value import KBias
from sink_jax.attention.mask import Window
from sink_jax.attention.position import Learned
from sink_jax.attention.spec import AttentionSpec
from sink_jax.data.sources import Jsonl
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.token_edits import FixedToken, RandomTokens, TokenEdit
from sink_jax.data.tokenizer import HuggingFace, TrainedBpe
from sink_jax.io.terminal import text_table
from sink_jax.models.sizes import parameter_count
from sink_jax.train.config import Experiment, NotExpressible, as_config_dict, changed

_VOCABULARY = 50432  # padded
# The Pile sample of the paper and the tokenizer of GPT-NeoX-20B; docs/experiments.md says how to
# get them.
_PAPER_DATA = {
  'data.source': Jsonl('data/pile'),
  'data.tokenizer': HuggingFace('data/gpt-neox-20b/tokenizer.json'),
  'data.valid_fraction': 0.01,  # which leaves 5B of its 5.1B tokens for training
  'model.vocab_size': _VOCABULARY,
}
_UNIQUE_TOKENS = 5_000_000_000  # of every trial that does not limit them further
PROTOCOLS = {
  'paper': {  # as the paper says
    'optimizer.schedule': 'cosine',
    'model.init': 'tinyllama',
    'probe.dtype': 'float32',
  },
  'released': {  # as the official implementation (sail-sg/Attention-Sink) does
    'optimizer.schedule': 'constant',
    'model.init': 'torch_default',
    'probe.dtype': 'bfloat16',
  },
}


def config(
  trials: base.Trials, name: str, budget: str = 'full', protocol: str = 'paper', task: str = 'paper'
) -> ConfigDict:
  """The config of a trial at a budget, by a protocol; see `experiment`."""
  return as_config_dict(experiment(trials, name, budget, protocol, task=task))


def experiment(
  trials: base.Trials,
  name: str,
  budget: str = 'full',
  protocol: str = 'paper',
  protocols: base.Trials = PROTOCOLS,
  task: str = 'paper',
) -> Experiment:
  """A trial at a budget, by a protocol.

  protocols: {name: changes}, for a file with other protocols than the paper's. task: the task in
  the label.

  Raises:
    ValueError: unknown trial, budget or protocol; lists the choices.
    NotExpressible: the trial has no counterpart at the budget.
  """
  check_known(protocol, protocols, 'Unknown protocol')
  check_known(budget, BUDGETS, 'Unknown budget')
  default = changed(Experiment(), _PAPER_DATA | dict(protocols[protocol]))
  run = base.experiment(trials, name, task, default)
  run = changed(run, {'label.budget': budget, 'label.protocol': protocol})
  if protocol == 'released':  # which draws random tokens from the padded vocabulary
    run = changed(run, {'data.interventions': _drawn_below(_VOCABULARY, run.data.interventions)})
  try:
    return BUDGETS[budget](run)
  except NotExpressible as error:
    error.label = run.label  # a sweep records it where the trial would be
    raise


def _drawn_below(size: int, edits: tuple[TokenEdit, ...]) -> tuple[TokenEdit, ...]:
  """The edits with random tokens of ids below a size; 0: those of the text."""
  return tuple(
    dataclasses.replace(edit, below=size) if isinstance(edit, RandomTokens) else edit
    for edit in edits
  )


def _tenth(run: Experiment) -> Experiment:
  steps = round(run.steps / 10)
  # About twenty points make a curve, if the paper's interval does not give more.
  often = lambda section: min(section.every, steps // 20)
  return changed(
    run,
    {
      'steps': steps,
      'checkpoint_every': min(run.checkpoint_every, steps // 10),
      'probe.every': often(run.probe),
      'validation.every': often(run.validation),
      'data.max_tokens': round((run.data.max_tokens or _UNIQUE_TOKENS) / 10),
    },
  )


@dataclasses.dataclass(frozen=True)
class Small:
  """A budget for a CPU: how it scales the paper's default, and its replacements for the rest.

  batch: divisor of the paper's. rate: factor of its learning rate. heads: divisor of a number of
  heads that a trial states. edits: edits of the sequences, if a trial has none. large: sizes of the
  1B models.
  """

  batch: int
  rate: float
  context: int
  heads: int
  settings: Mapping[str, Any]
  edits: tuple[TokenEdit, ...] = ()
  large: Mapping[str, int] | None = None

  def __call__(self, run: Experiment) -> Experiment:
    data, optimizer = run.data, run.optimizer
    batch = round(run.batch_size / self.batch)
    rate = optimizer.learning_rate * self.rate
    # The paper's product of rate, decay and steps.
    decay = optimizer.weight_decay / self.rate
    if rate * decay >= 1:  # decoupled weight decay multiplies every weight by 1 - rate * decay
      raise NotExpressible(f'a step would take away {rate * decay:.0%} of every weight')
    seen = run.steps * run.batch_size * data.context
    changes = (
      _SMALL
      | dict(self.settings)
      | {
        'batch_size': batch,
        'data.context': self.context,
        'optimizer.learning_rate': rate,
        'optimizer.weight_decay': decay,
        'data.max_tokens': round(data.max_tokens / seen * run.steps * batch * self.context),
        'data.interventions': self._edits(data.interventions),
      }
    )
    return changed(run, changes | self._model(run) | self._attention(run.attention, data.context))

  def _model(self, run: Experiment) -> dict[str, Any]:
    """Sizes that a trial states."""
    changes, heads = {}, run.model.heads
    if run.model.size == '1b':
      if self.large is None:
        raise NotExpressible('the 1B models')
      changes |= {f'model.{key}': value for key, value in self.large.items()}
    if heads:
      if heads < self.heads:
        raise NotExpressible(f"{heads} of the paper's 8 heads would be less than one head")
      changes['model.heads'] = heads // self.heads
    return changes

  def _attention(self, attention: AttentionSpec, context: int) -> dict[str, Any]:
    """Components whose numbers mean something else in shorter sequences and narrower heads."""
    changes, mask, extra = {}, attention.mask, attention.kv_bias
    if isinstance(mask, Window):
      size = mask.size * self.context / context
      if size < 1:
        raise NotExpressible(
          f'a window of {mask.size} of {context} tokens would be {size:g} of {self.context}'
        )
      changes['attention.mask'] = Window(round(size))
    if isinstance(attention.position, Learned):
      changes['attention.position'] = Learned(self.context)
    # Equal is refused, too: with all channels learned, a row of Table 13 would be the plain K bias.
    if isinstance(extra, KBias) and (extra.learnable_dims or 0) >= _HEAD_DIM:
      raise NotExpressible(f'{extra.learnable_dims} learnable dimensions; heads have {_HEAD_DIM}')
    return changes

  def _edits(self, edits: tuple[TokenEdit, ...]) -> tuple[TokenEdit, ...]:
    """Edits of the sequences, for shorter ones and for the vocabulary of the small model."""
    for edit in edits:
      if isinstance(edit, RandomTokens) and edit.last >= self.context:
        raise NotExpressible(f'{edit.last} random tokens; sequences have {self.context} tokens')
    return _drawn_below(0, edits) or self.edits


_HEAD_DIM = 16
_SMALL = {
  'model.size': 'tiny',
  'model.vocab_size': None,  # that of the tokenizer, and not the padded one of the paper
  'model.dtype': 'float32',
  'checkpoints_kept': 1,
  'checkpoint_every': 2000,
  'validation.every': 200,
  'validation.batches': 20,
}
# Two blocks, d = 64, 4 heads, FFN 128. A fixed token begins every sequence if the trial edits none.
DESK = Small(
  batch=32,
  rate=20,
  context=64,
  heads=2,
  edits=(FixedToken(1),),
  settings={
    'data.source': Stdlib(),
    'data.tokenizer': TrainedBpe(512),
    'data.valid_fraction': 0.05,
    'probe.every': 200,
  },
  large={'layers': 4, 'd_model': 128, 'heads': 8, 'ffn_hidden': 352},
)
BUDGETS: dict[str, Callable[[Experiment], Experiment]] = {
  'full': lambda run: run,
  'tenth': _tenth,
  'desk': DESK,
}


def main() -> None:
  """Prints the rules and the default trial of each budget."""
  columns = []
  for name in BUDGETS:
    run = experiment({'default': {}}, 'default', name)
    model, optimizer = run.model_config(), run.optimizer
    weights, tokens = parameter_count(model, embeddings=False), run.steps * run.tokens_per_step
    product = optimizer.learning_rate * optimizer.weight_decay * run.steps
    columns.append(
      {
        'budget': name,
        'million weights without embeddings': f'{weights / 1e6:.2f}',
        'blocks, width, heads': f'{model.layers}, {model.d_model}, {model.heads}',
        'steps': f'{run.steps:,}',
        'sequences, tokens of each': f'{run.batch_size}, {run.data.context}',
        'million tokens': f'{tokens / 1e6:,.1f}',
        'tokens per weight': f'{tokens / weights:.0f}',
        'learning rate': f'{optimizer.learning_rate:g}',
        'weight decay': f'{optimizer.weight_decay:g}',
        'rate x decay x steps': f'{product:.3g}',
        'warm-up': f'{optimizer.warmup_steps / run.steps:.2%}',
        'clip': f'{optimizer.clip:g}',
      }
    )
  print(__doc__)
  head, *rows = [[key, *(column[key] for column in columns)] for key in columns[0]]
  print(*text_table(head, rows), sep='\n')


if __name__ == '__main__':
  main()
