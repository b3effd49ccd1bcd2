"""Claims about optimisation, data and loss (Sections 3 to 6).

A criterion says what its checks decide, of means over seeds. The learning rates, batch sizes and
data of trials stand in it relative to the default run, since that holds at every budget.
"""

from __future__ import annotations

from sink_jax.paper.claims import Claim
from sink_jax.paper.criteria import NATS, NO_SINK, NOISE, POINTS, SINK, Every, Onset, Ordered

_WINDOWS = tuple(f'window-{size}' for size in (32, 64, 128, 256, 512, 1024))
_PREFIXES = tuple(f'prefix-{length}' for length in (2, 3, 4, 5, 10))
_ON_TEXT = ('sink', 'ordinary text')

CLAIMS = (
    Claim('chain', '3.1', 'The hidden states of the first token involve no attention: they are a '
          'chain of MLPs of its embedding.',
          'In the default run, the largest relative difference between the hidden states of the '
          'first token and those of the chain is below 0.001.',
          (Every('chain_difference', ('default',), below=1e-3, exact=True),), ()),
    Claim('emergence', '4', 'The sink is not there from the start: it emerges after a number of '
          'optimisation steps.',
          f'In the default run, Sink_1 is below {SINK} % before training and at least {SINK} % '
          'after it.',
          (Every('first_sink_1', ('default',), below=SINK),
           Every('sink_1', ('default',), at_least=SINK)), ()),
    Claim('learning-rate', '4', 'Smaller learning rates make the sink weaker.',
          'From twice the default learning rate to the default, a half and a quarter of it, Sink_1 '
          f'falls by at least {POINTS} points in all, and rises by no more than {NOISE:g} point '
          'from one to the next.',
          (Ordered('sink_1', ('lr-8e-4', 'default', 'lr-2e-4', 'lr-1e-4'), POINTS),)),
    Claim('learning-rate-steps', 'C.1', 'Smaller learning rates make the sink weaker even '
          'where more steps make up for them.',
          'From twice the default learning rate with half of the steps to the default, half of the '
          'rate with twice the steps and a quarter of it with four times the steps, Sink_1 falls '
          f'by at least {POINTS} points in all, and rises by no more than {NOISE:g} point from one '
          'to the next.',
          (Ordered('sink_1', ('lr-8e-4-10k', 'default', 'lr-2e-4-40k', 'lr-1e-4-80k'), POINTS),)),
    Claim('learning-rate-delay', '4', 'Smaller learning rates delay the sink.',
          'From twice the default learning rate to the default, a half and a quarter of it, the '
          'step at which the sink emerges rises in all, and never falls from one to the next. A '
          'run in which none emerges counts with its last step.',
          (Ordered('emergence_step', ('lr-8e-4', 'default', 'lr-2e-4', 'lr-1e-4'), 0,
                   falls=False),)),
    Claim('batch-size', '4', 'The batch size does not matter: a sink emerges with each.',
          f'Sink_1 is at least {SINK} % with each batch size: a quarter, a half and twice the '
          'default.',
          (Every('sink_1', ('batch-128', 'batch-256', 'batch-1024'), at_least=SINK),)),
    Claim('data-amount', '5', 'With little unique training data there is no sink.',
          f'Sink_1 is below {NO_SINK} % with 50 million and with 100 million unique training '
          'tokens (at smaller budgets, with the same shares of all tokens seen).',
          (Every('sink_1', ('data-50m', 'data-100m'), below=NO_SINK),)),
    Claim('overfitting', '5', 'With little unique training data the model overfits.',
          'With 50 million and with 100 million unique training tokens (at smaller budgets, with '
          'the same shares of all tokens seen) the valid loss minus the training loss is at least '
          f'{NATS} nats; with 5 billion it is at least {NATS} nats below that with 50 million.',
          (Every('overfitting', ('data-50m', 'data-100m'), at_least=NATS),
           Ordered('overfitting', ('data-50m', 'data-5b'), NATS)), ()),
    Claim('random-first', '5', 'A first token drawn at random leaves the sink on the first token.',
          f'Sink_1 is at least {SINK} % where the first token is drawn at random.',
          (Every('sink_1', ('random-1',), at_least=SINK),), _ON_TEXT),
    Claim('random-second', '5', 'A second token drawn at random leaves the sink on the '
          'first token.',
          f'Sink_1 is at least {SINK} % where the second token is drawn at random.',
          (Every('sink_1', ('random-2',), at_least=SINK),), _ON_TEXT),
    Claim('random-both', '5', 'Two tokens drawn at random move the sink to the second token.',
          f'Where the first two tokens are drawn at random, Sink_2 is at least {SINK} %, and at '
          f'least {POINTS} points above the largest Sink_k of the other first 10 tokens.',
          (Every('sink_2', ('random-1-2',), at_least=SINK),
           Every('lead_2', ('random-1-2',), at_least=POINTS)), _ON_TEXT),
    Claim('random-more', '5', 'With more random tokens the sink tends to disappear.',
          f'The largest Sink_k of the first 10 tokens is below {SINK} % where the first 16 tokens '
          'are drawn at random, and where the first 64 are.',
          (Every('largest_sink', ('random-1-16', 'random-1-64'), below=SINK),), _ON_TEXT),
    Claim('fixed-token', '5', 'A token fixed at one position takes the sink.',
          'With a token fixed at the first, the second or the third position k, Sink_k is at least '
          f'{SINK} %, and at least {POINTS} points above the largest of the other first 10 tokens.',
          tuple(check for k in (1, 2, 3) for check in (
              Every(f'sink_{k}', (f'fixed-{k}',), at_least=SINK),
              Every(f'lead_{k}', (f'fixed-{k}',), at_least=POINTS))), ()),
    Claim('no-weight-decay', '6', 'A sink emerges even without weight decay.',
          f'Sink_1 of the run without weight decay is at least {SINK} %.',
          (Every('sink_1', ('weight-decay-0',), at_least=SINK),)),
    Claim('weight-decay', '6', 'More weight decay gives more sinks.',
          f'Sink_1 with five times the default weight decay is at least {POINTS} points above that '
          'of the default run.',
          (Ordered('sink_1', ('default', 'weight-decay-0.5'), POINTS, falls=False),)),
    Claim('much-weight-decay', '6', 'Too much weight decay hurts the model and removes the sink.',
          f'With 50 times the default weight decay, Sink_1 is below {NO_SINK} % and the valid loss '
          f'at least {NATS} nats above that of the default run.',
          (Every('sink_1', ('weight-decay-5',), below=NO_SINK),
           Ordered('valid_loss', ('default', 'weight-decay-5'), NATS, falls=False))),
    Claim('prefix', '6', 'In a prefix language model a sink emerges within the prefix.',
          'In each prefix language model that was measured, at least one (with prefixes of 2, 3, '
          f'4, 5 or 10 tokens), Sink_k summed over the prefix is at least {SINK} %, and the '
          'strongest token of at least 90 % of the heads with a sink is in the prefix.',
          (Every('prefix_sink', _PREFIXES, at_least=SINK, some=1),
           Every('prefix_share', _PREFIXES, at_least=90, some=1)), _ON_TEXT),
    Claim('prefix-anywhere', '6', 'Within a prefix the sink is not always on the first '
          'token.',
          'With a prefix of 5 tokens, Sink_1 is below 90 % of Sink_k summed over the prefix.',
          (Every('prefix_first', ('prefix-5',), below=90),), _ON_TEXT),
    Claim('window', '6', 'With window attention the sink is on the absolute first token, not on '
          'the first token of each window.',
          'In each model with a window (of 1/64 to 1/2 of the sequence) that was measured and '
          f'whose Sink_1 is at least {SINK} %, at least one, attention to the absolute first token '
          'is at least 2 times uniform attention, and attention to the first token of the window '
          'below 2 times uniform attention.',
          (Every('window_absolute', _WINDOWS, at_least=2, some=1, sinks=True),
           Every('window_relative', _WINDOWS, below=2, some=1, sinks=True)), _ON_TEXT),
    Claim('small-window', '6', 'Small windows prevent the sink.',
          'Of the windows (of 1/64 to 1/2 of the sequence) that are longer than epsilon times the '
          'probed sequence, since shorter ones cannot show a sink, the smallest has Sink_1 below '
          f'{NO_SINK} %, and the largest at least {SINK} %.', (Onset(_WINDOWS),)),
)
