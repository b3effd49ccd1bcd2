"""Another attention for the default run, which is trained on with it: does the sink move?

  python -m sink_jax sweep --config=configs/paper.py --budget=desk --only=default --seeds=1,2,3 \\
    --workdir=runs/desk
  python -m sink_jax sweep --config=configs/graft.py --budget=desk --seeds=1,2,3 --workdir=runs/graft

A trial begins with the parameters of the default run of its seed, runs/BUDGET/default-seed-SEED,
and takes as many steps as that has had, with a schedule of its own; `continued` is the default
itself, trained on for as long. A variant from scratch is to be given the steps of both:

  python -m sink_jax sweep --config=configs/remedies.py --seeds=1,2,3 --config.steps=8000 \\
    --only=desk-head-gate,desk-sink-logit,desk-k-bias,desk-zero-sink --workdir=runs/graft
  python -m sink_jax report --runs=runs/graft --out=report
"""

from ml_collections import ConfigDict

from configs import budget


def _graft(start: str = 'identity', **components: str) -> dict[str, str]:
  return {'init.graft': start} | {f'attention.{name}': value for name, value in components.items()}


TRIALS = {
    'continued': {},
    'graft-gate': _graft(head='HeadGate(scale=2.0)'),  # gates that start at one
    'graft-gate-random': _graft('random', head='HeadGate()'),  # as published: they start around 1/2
    'graft-sink-logit': _graft(kv_bias='SinkLogit()'),
    'graft-k-bias': _graft(kv_bias='KBias()'),
    'graft-k-bias-window': _graft(kv_bias='KBias()', mask='Window(size=512)'),
    'graft-zero-sink': _graft(kv_bias='ZeroSink()'),
}


def get_config(argument: str = '') -> ConfigDict:
  config = budget.config(TRIALS, argument, task='graft')
  name = config.to_dict()['label']['budget']
  config.update_from_flattened_dict({'init.source': f'runs/{name}/default-seed-{{seed}}'})
  return config
