"""A search for the cheapest training in which the paper's baseline is there, on two CPU cores.

Wanted is a softmax model with (a) a sink on the first token and (b) massive activations, while (c)
normalised sigmoid has a sink as well, (d) sigmoid without normalisation has none, by raw mass too,
and (e) a K bias takes the sink: sink_jax/paper/baseline.py has the levels. The budget is 100
core-minutes, in three rounds; a sweep that was stopped goes on with the same command.

  python -m sink_jax sweep --config=configs/baseline.py --workdir=runs/baseline --processes=2 \\
    --only=NAMES

1. NAMES=SETTING-softmax of every setting in `SETTINGS`, seed 0, at most 3 core-minutes each.
2. The settings of `ROUND_2` with the other kinds of attention, seed 0; and what of them looked
   best twice more, --only=bpe-2-softmax --seeds=4,5, before anything was built on it.
3. The one that was chosen, bpe-2, is the budget `desk` (sink_jax/paper/budgets.py), which
   configs/desk.py trains with seeds 1, 2 and 3: no number that is reported comes from a seed that
   chose. A second look at other kinds than softmax may take seeds 4 and 5.

With three seeds of ten claims, bpe-2 showed what no criterion had asked for: unnormalised sigmoid
learned next to nothing in four seeds of five, so that its lack of a sink proves little there. Of
the settings in which it learns, wide-2 meets (a), (c), (d) and (e), and takes two and a half
minutes; so the last two of `SETTINGS`, beyond the twelve that were planned, were tried with all
four kinds on seed 0. middle-2 met (a), (c), (d) and (e) there, and with seeds 1, 2 and 3, which did
not choose it, softmax had a sink in one of three: one seed had decided, and bpe-2, whose softmax
has a sink in six seeds of six, stayed.

Every sequence begins with a fixed token, without which no sink emerges at this cost. `LARGE` are
settings for a GPU. `MASSIVE` are models of another task, Bigram-Backcopy, in which unnormalised
sigmoid has a sink too, so that they are no baseline: they are searched for (b) alone. The page:

  python -m sink_jax report --kind=baseline --runs=runs/baseline --out=results/baseline
"""

from typing import Any

from ml_collections import ConfigDict

from configs import attention_operation, base, biases, budget, quickstart

_COMMON = budget.PROTOCOLS['paper'] | {
    'model.size': 'tiny',  # width 64, 4 heads, FFN 128
    'model.dtype': 'float32',
    'data.context': 64,
    'data.interventions': 'FixedToken(position=1)',
    'batch_size': 16,
    'optimizer.weight_decay': 0.5,
    'probe.every': 50,
    'validation.every': 500,
    'validation.batches': 20,
    'checkpoint_every': 1000,
    'checkpoints_kept': 1,
}
_WIDE = {'model.d_model': 128, 'model.heads': 8, 'model.ffn_hidden': 256}
_MIDDLE = {'model.d_model': 96, 'model.heads': 6, 'model.ffn_hidden': 192}


def _bytes(blocks: int, rate: float, steps: int) -> dict[str, Any]:
  return {'model.layers': blocks, 'optimizer.learning_rate': rate, 'steps': steps}


def _bpe(blocks: int, rate: float, steps: int, vocabulary: int = 512) -> dict[str, Any]:
  return _bytes(blocks, rate, steps) | {
      'data.tokenizer': f'TrainedBpe(vocab_size={vocabulary})'}


SETTINGS = {  # the first six were tried before the others were chosen
    'bytes-2': _bytes(2, 2e-2, 4000),
    'bytes-3': _bytes(3, 2e-2, 3500),
    'bytes-4': _bytes(4, 1e-2, 3000),
    'bytes-6': _bytes(6, 5e-3, 1500),
    'bpe-2': _bpe(2, 2e-2, 4000),
    'wide-2': _WIDE | _bytes(2, 1e-2, 2500),
    'bpe-3': _bpe(3, 2e-2, 3500),
    'bpe-4': _bpe(4, 1e-2, 3000),
    'bpe-2-slow': _bpe(2, 1e-2, 4000),
    'bpe-2-heavy': _bpe(2, 2e-2, 4000) | {'optimizer.weight_decay': 1.0},
    'bpe-2-fast': _bpe(2, 3e-2, 3000),
    'bpe-1024-2': _bpe(2, 2e-2, 3000, vocabulary=1024),
    # Between bytes-2 and wide-2, which costs too much: tried last, see above.
    'middle-2': _MIDDLE | _bytes(2, 1e-2, 2500),
    'wide-2-short': _WIDE | _bytes(2, 1e-2, 1700),
}
ROUND_2 = ('bpe-2', 'bpe-4', 'wide-2', 'bytes-3', 'bpe-2-slow', 'middle-2', 'wide-2-short')
LARGE = {
    'wide-4': _WIDE | _bytes(4, 1e-2, 8000),
    'wide-bpe-4': _WIDE | _bpe(4, 1e-2, 8000),
    '256-bpe-6': _bpe(6, 5e-3, 12000, vocabulary=2048) | {
        'model.d_model': 256, 'model.heads': 8, 'model.ffn_hidden': 512, 'batch_size': 32},
}
_BACKCOPY = {'data.source': 'BigramBackcopy()', 'data.interventions': '', 'model.layers': 3,
             'model.heads': 1, 'batch_size': 64, 'attention.position': 'Learned(max_length=64)',
             'optimizer.schedule': 'constant', 'optimizer.weight_decay': 1e-4}
# Those of the quickstart learn the task with other initial weights and another network.
_RELU = quickstart.TRIALS['backcopy-softmax'] | {'model.layers': 3, 'steps': 4000}
MASSIVE = {'backcopy-3': _BACKCOPY | {'optimizer.learning_rate': 1e-3, 'steps': 4000},
           'backcopy-3-relu': _RELU,
           'backcopy-3-relu-fast': _RELU | {'optimizer.learning_rate': 5e-3}}
_KINDS = {
    'softmax': {},
    'sigmoid': attention_operation.TRIALS['sigmoid'],
    'sigmoid-normalized': attention_operation.TRIALS['sigmoid-normalized'],
    'k-bias': biases.TRIALS['k-bias'],
}
TRIALS = {f'{setting}-{kind}': _COMMON | changes | attention
          for setting, changes in (SETTINGS | LARGE | MASSIVE).items()
          for kind, attention in _KINDS.items()
          if kind == 'softmax' or setting in ROUND_2 or setting in LARGE}


def get_config(name: str = '') -> ConfigDict:
  return base.trial(TRIALS, name)
