"""The 60M model on one GPU, in hours: where sinks emerge, where not, and where they go.

Batches of 64k tokens, sixteen times fewer than the paper's, for 6,000 steps, on the sources
of the installed packages: no download. That is little text, seen many times over, and too
little data hides the sink (Figure 5 right), so the report says how often.
"""

from configs import attention_operation, base, biases, budget, fixed_token, window

_SHORT = budget.PROTOCOLS['paper'] | {
    'data.source': 'InstalledPackages()',
    'data.tokenizer': 'TrainedBpe(vocab_size=8192)',
    'batch_size': 32,
    'steps': 6000,
    'checkpoint_every': 250,
    'checkpoints_kept': 1,
    'probe.every': 50,
    'validation.every': 500,
    'validation.batches': 20,
}
_TRIALS = {
    'default': {},
    'sigmoid': attention_operation.TRIALS['sigmoid'],
    'k-bias': biases.TRIALS['k-bias'],
    'window-32': window.TRIALS['window-32'],
    'fixed-1': fixed_token.TRIALS['fixed-1'],
}
TRIALS = {f'emergence-{name}': _SHORT | changes for name, changes in _TRIALS.items()}


def get_config(argument=''):
  return base.trial(TRIALS, argument)
