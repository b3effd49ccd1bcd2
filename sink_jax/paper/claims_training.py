"""Claims about optimisation, data and loss (Sections 3 to 6)."""

from __future__ import annotations

from sink_jax.paper.claims import Claim
from sink_jax.paper.criteria import NO_SINK, SINK, Every, Onset, Ordered

_WINDOWS = tuple(f'window-{size}' for size in (32, 64, 128, 256, 512, 1024))
_PREFIXES = tuple(f'prefix-{length}' for length in (2, 3, 4, 5, 10))
_ON_TEXT = ('sink', 'ordinary text')
_POINTS = 2  # points of Sink_k that are a difference
_NATS = 0.1  # of loss that are a difference

CLAIMS = (
    Claim('chain', '3.1', 'The hidden states of the first token involve no attention: they are a '
          'chain of MLPs of its embedding.',
          (Every('chain_difference', ('default',), below=1e-3, exact=True),), ()),
    Claim('emergence', '4', 'The sink is not there from the start: it emerges after a number of '
          'optimisation steps.',
          (Every('first_sink_1', ('default',), below=SINK),
           Every('sink_1', ('default',), at_least=SINK)), ()),
    Claim('learning-rate', '4', 'Smaller learning rates make the sink weaker.',
          (Ordered('sink_1', ('lr-8e-4', 'default', 'lr-2e-4', 'lr-1e-4'), _POINTS),)),
    Claim('learning-rate-steps', 'C.1', 'They do so even where more steps make up for them.',
          (Ordered('sink_1', ('lr-8e-4-10k', 'default', 'lr-2e-4-40k', 'lr-1e-4-80k'), _POINTS),)),
    Claim('learning-rate-delay', '4', 'Smaller learning rates delay the sink.',
          (Ordered('emergence_step', ('lr-8e-4', 'default', 'lr-2e-4', 'lr-1e-4'), 0,
                   falls=False),)),
    Claim('batch-size', '4', 'The batch size does not matter: a sink emerges with each.',
          (Every('sink_1', ('batch-128', 'batch-256', 'batch-1024'), at_least=SINK),)),
    Claim('data-amount', '5', 'With little unique training data there is no sink.',
          (Every('sink_1', ('data-50m', 'data-100m'), below=NO_SINK),)),
    Claim('overfitting', '5', 'With little unique training data the model overfits.',
          (Every('overfitting', ('data-50m', 'data-100m'), at_least=_NATS),
           Ordered('overfitting', ('data-50m', 'data-5b'), _NATS)), ()),
    Claim('random-first', '5', 'A first token drawn at random leaves the sink on the first token.',
          (Every('sink_1', ('random-1',), at_least=SINK),), _ON_TEXT),
    Claim('random-second', '5', 'So does a second token drawn at random.',
          (Every('sink_1', ('random-2',), at_least=SINK),), _ON_TEXT),
    Claim('random-both', '5', 'Two tokens drawn at random move the sink to the second token.',
          (Every('sink_2', ('random-1-2',), at_least=SINK),
           Every('lead_2', ('random-1-2',), at_least=_POINTS)), _ON_TEXT),
    Claim('random-more', '5', 'With more random tokens the sink tends to disappear.',
          (Every('largest_sink', ('random-1-16', 'random-1-64'), below=SINK),), _ON_TEXT),
    Claim('fixed-token', '5', 'A token fixed at one position takes the sink.',
          tuple(check for k in (1, 2, 3) for check in (
              Every(f'sink_{k}', (f'fixed-{k}',), at_least=SINK),
              Every(f'lead_{k}', (f'fixed-{k}',), at_least=_POINTS))), ()),
    Claim('no-weight-decay', '6', 'A sink emerges even without weight decay.',
          (Every('sink_1', ('weight-decay-0',), at_least=SINK),)),
    Claim('weight-decay', '6', 'More weight decay gives more sinks.',
          (Ordered('sink_1', ('default', 'weight-decay-0.5'), _POINTS, falls=False),)),
    Claim('much-weight-decay', '6', 'Too much weight decay hurts the model and removes the sink.',
          (Every('sink_1', ('weight-decay-5',), below=NO_SINK),
           Ordered('valid_loss', ('default', 'weight-decay-5'), _NATS, falls=False))),
    Claim('prefix', '6', 'In a prefix language model a sink emerges within the prefix.',
          (Every('prefix_sink', _PREFIXES, at_least=SINK, some=1),
           Every('prefix_share', _PREFIXES, at_least=90, some=1)), _ON_TEXT),
    Claim('prefix-anywhere', '6', 'There it is not always on the first token.',
          (Every('prefix_first', ('prefix-5',), below=90),), _ON_TEXT),
    Claim('window', '6', 'With window attention the sink is on the absolute first token, not on '
          'the first token of each window.',
          (Every('window_absolute', _WINDOWS, at_least=2, some=1, sinks=True),
           Every('window_relative', _WINDOWS, below=2, some=1, sinks=True)), _ON_TEXT),
    Claim('small-window', '6', 'Small windows prevent the sink.', (Onset(_WINDOWS),)),
)
