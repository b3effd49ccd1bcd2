"""Every claim of the paper, in its order.

A criterion says what its checks decide, of means over seeds. Learning rates, batch sizes, weight
decays, numbers of heads and data of trials stand in it relative to the default run, since that
holds at every budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sink_jax.arguments import check_known
from sink_jax.paper.claims import Claim
from sink_jax.paper.criteria import (
  MASSIVE,
  NATS,
  NO_SINK,
  NOISE,
  POINTS,
  SINK,
  Every,
  Near,
  Onset,
  Ordered,
  Trains,
)

_WINDOWS = tuple(f'window-{size}' for size in (32, 64, 128, 256, 512, 1024))
_PREFIXES = tuple(f'prefix-{length}' for length in (2, 3, 4, 5, 10))
_KEY_BIASES = ('sink-token', 'kv-bias', 'k-bias')
_DIMS = tuple(f'learnable-dims-{dims}' for dims in (1, 2, 4, 8, 16, 32, 64))
_FREE = ('sigmoid', 'elu', 'identity', 'mlp')  # of normalisation
_SIGMOIDS = ('sigmoid-wd-0', 'sigmoid-wd-0.5', 'sigmoid-wd-1', 'sigmoid-lr-1e-3', 'sigmoid-lr-1e-4')
_ON_TEXT = ('sink', 'ordinary text')
_SINK_AND_MASSIVE = ('sink', 'massive')
_COUNTERPART = ('sink', 'counterpart')  # for claims that there is no sink
_WEAKER = 1.25  # factor between norm ratios: that much weaker is weaker
_TRAINED = 0.5  # nats above the default's loss up to which a model counts as trained
_values = lambda value: tuple(f'value-{value}-{norm}' for norm in (1, 5, 20))
_p = lambda name, *words: tuple(f'{name}-p-{word}' for word in words)
_sink = lambda *trials: Every('sink_1', trials, at_least=SINK)
_no_sink = lambda *trials: Every('sink_1', trials, below=NO_SINK)
_massive = lambda *trials: Every('massive', trials, at_least=MASSIVE)
_not_massive = lambda *trials: Every('massive', trials, below=MASSIVE)

CLAIMS = (
    # Optimisation, data and loss (Sections 3 to 6, Appendix C.1).
    Claim('chain', '3.1', 'The hidden states of the first token involve no attention: they are a '
          'chain of MLPs of its embedding.',
          'In the default run, the largest relative difference between the hidden states of the '
          'first token and those of the chain is below 0.001.',
          (Every('chain_difference', ('default',), below=1e-3, exact=True),), ()),
    Claim('emergence', '4', 'The sink is not there from the start: it emerges after a number of '
          'optimisation steps.',
          f'In the default run, Sink_1 is below {SINK} % before training and at least {SINK} % '
          'after it.',
          (Every('first_sink_1', ('default',), below=SINK), _sink('default')), ()),
    Claim('learning-rate', '4', 'Smaller learning rates make the sink weaker.',
          'From twice the default learning rate to the default, a half and a quarter of it, Sink_1 '
          f'falls by at least {POINTS} points in all, and rises by no more than {NOISE:g} point '
          'from one to the next.',
          (Ordered('sink_1', ('lr-8e-4', 'default', 'lr-2e-4', 'lr-1e-4'), POINTS),)),
    Claim('learning-rate-steps', 'C.1', 'Smaller learning rates make the sink weaker even where '
          'more steps make up for them.',
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
          (_sink('batch-128', 'batch-256', 'batch-1024'),)),
    Claim('data-amount', '5', 'With little unique training data there is no sink.',
          f'Sink_1 is below {NO_SINK} % with 50 million and with 100 million unique training '
          'tokens (at smaller budgets, with the same shares of all tokens seen).',
          (_no_sink('data-50m', 'data-100m'),)),
    Claim('overfitting', '5', 'With little unique training data the model overfits.',
          'With 50 million and with 100 million unique training tokens (at smaller budgets, with '
          'the same shares of all tokens seen) the valid loss minus the training loss is at least '
          f'{NATS} nats; with 5 billion it is at least {NATS} nats below that with 50 million.',
          (Every('overfitting', ('data-50m', 'data-100m'), at_least=NATS),
           Ordered('overfitting', ('data-50m', 'data-5b'), NATS)), ()),
    Claim('random-first', '5', 'A first token drawn at random leaves the sink on the first token.',
          f'Sink_1 is at least {SINK} % where the first token is drawn at random.',
          (_sink('random-1'),), _ON_TEXT),
    Claim('random-second', '5', 'A second token drawn at random leaves the sink on the first '
          'token.',
          f'Sink_1 is at least {SINK} % where the second token is drawn at random.',
          (_sink('random-2'),), _ON_TEXT),
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
          (_sink('weight-decay-0'),)),
    Claim('weight-decay', '6', 'More weight decay gives more sinks.',
          f'Sink_1 with five times the default weight decay is at least {POINTS} points above that '
          'of the default run.',
          (Ordered('sink_1', ('default', 'weight-decay-0.5'), POINTS, falls=False),)),
    Claim('much-weight-decay', '6', 'Too much weight decay hurts the model and removes the sink.',
          f'With 50 times the default weight decay, Sink_1 is below {NO_SINK} % and the valid loss '
          f'at least {NATS} nats above that of the default run.',
          (_no_sink('weight-decay-5'),
           Ordered('valid_loss', ('default', 'weight-decay-5'), NATS, falls=False))),
    Claim('prefix', '6', 'In a prefix language model a sink emerges within the prefix.',
          'In each prefix language model that was measured, at least one (with prefixes of 2, 3, '
          f'4, 5 or 10 tokens), Sink_k summed over the prefix is at least {SINK} %, and the '
          'strongest token of at least 90 % of the heads with a sink is in the prefix.',
          (Every('prefix_sink', _PREFIXES, at_least=SINK, some=True),
           Every('prefix_share', _PREFIXES, at_least=90, some=True)), _ON_TEXT),
    Claim('prefix-anywhere', '6', 'Within a prefix the sink is not always on the first token.',
          'With a prefix of 5 tokens, Sink_1 is below 90 % of Sink_k summed over the prefix.',
          (Every('prefix_first', ('prefix-5',), below=90),), _ON_TEXT),
    Claim('window', '6', 'With window attention the sink is on the absolute first token, not on '
          'the first token of each window.',
          'In each model with a window (of 1/64 to 1/2 of the sequence) that was measured and '
          f'whose Sink_1 is at least {SINK} %, at least one, attention to the absolute first token '
          'is at least 2 times uniform attention, and attention to the first token of the window '
          'below 2 times uniform attention.',
          (Every('window_absolute', _WINDOWS, at_least=2, some=True, sinks=True),
           Every('window_relative', _WINDOWS, below=2, some=True, sinks=True)), _ON_TEXT),
    Claim('small-window', '6', 'Small windows prevent the sink.',
          'Of the windows (of 1/64 to 1/2 of the sequence) that are longer than epsilon times the '
          'probed sequence, since shorter ones cannot show a sink, the smallest has Sink_1 below '
          f'{NO_SINK} %, and the largest at least {SINK} %.',
          (Onset(_WINDOWS),)),
    # The model (Section 7, Appendices C.3 and C.4).
    Claim('position', '7.1', 'The position encoding does not matter: a sink emerges with each.',
          f'Sink_1 is at least {SINK} % with each position encoding: none, sinusoidal, learned, '
          'relative and ALiBi.',
          (_sink('nope', 'absolute', 'learned', 'relative', 'alibi'),)),
    Claim('post-norm', '7.2', 'A sink emerges in a post-norm model too.',
          f'Sink_1 of the post-norm model is at least {SINK} %.',
          (_sink('post-norm'),)),
    Claim('post-norm-massive', '7.2', 'In a post-norm model massive activations are in what enters '
          'the norm, not in the hidden states.',
          'In the post-norm model, the largest norm ratio of the hidden states is below '
          f'{MASSIVE}, and that of what enters the norm at least {MASSIVE}.',
          (_not_massive('post-norm'),
           Every('massive_before_norm', ('post-norm',), at_least=MASSIVE)), _SINK_AND_MASSIVE),
    Claim('key-biases', '7.3', 'A sink token, KV biases and K biases take the sink off the first '
          'token.',
          f'With a sink token, with KV biases and with K biases, Sink_* is at least {SINK} % and '
          f'Sink_1 below {NO_SINK} %.',
          (Every('sink_star', _KEY_BIASES, at_least=SINK), _no_sink(*_KEY_BIASES))),
    Claim('value-biases', '7.3', 'V biases leave the sink on the first token.',
          f'Sink_1 with V biases is at least {SINK} %.',
          (_sink('v-bias'),)),
    Claim('biases-loss', '7.3', 'Neither a sink token nor a bias changes the loss.',
          'The valid loss with a sink token, with KV biases, with K biases and with V biases lies '
          f'within {NATS} nats of that of the default run.',
          (Near('valid_loss', (*_KEY_BIASES, 'v-bias'), NATS),), ()),
    Claim('biases-massive', '7.3', 'With KV biases and K biases there are no massive activations; '
          'with a sink token, on itself, and V biases there are.',
          f'The largest hidden norm ratio is below {MASSIVE} with KV biases and with K biases, and '
          f'at least {MASSIVE} with V biases and, on the sink token itself, with a sink token.',
          (_not_massive('kv-bias', 'k-bias'), _massive('v-bias'),
           Every('massive_sink_token', ('sink-token',), at_least=MASSIVE)), _SINK_AND_MASSIVE),
    Claim('removal', '7.3', 'Without its trained sink token or key bias, a model has no sink on '
          'the first token and a much worse loss.',
          'When the trained sink token, KV biases or K biases of a model are removed, Sink_1 is '
          f'below {NO_SINK} %, and the valid loss rises by at least {NATS} nats.',
          (Every('removed_sink_1', _KEY_BIASES, below=NO_SINK),
           Every('removed_loss', _KEY_BIASES, at_least=NATS))),
    Claim('value-norm', '7.3', 'With a longer fixed value v*, the sink returns from the K bias to '
          'the first token.',
          'From v* of norm 1 to 5 and 20, both along the first axis and along equal components, '
          f'Sink_1 rises by at least {POINTS} points in all, and falls by no more than {NOISE:g} '
          f'point from one to the next; with norm 20 it is at least {SINK} %. Sink_* with the '
          f'largest norm measured is at least {POINTS} points below that with the smallest.',
          (Ordered('sink_1', _values('first'), POINTS, falls=False),
           Ordered('sink_1', _values('uniform'), POINTS, falls=False),
           Ordered('sink_star', _values('first'), POINTS, ends=True),
           Ordered('sink_star', _values('uniform'), POINTS, ends=True),
           _sink('value-first-20', 'value-uniform-20'))),
    Claim('value-massive', '7.3', 'With a longer fixed value v*, massive activations return, too.',
          f'The largest hidden norm ratio is below {MASSIVE} with K biases, whose v* is zero, and '
          f'at least {MASSIVE} with v* of norm 20 along the first axis.',
          (_not_massive('k-bias'), _massive('value-first-20')), _SINK_AND_MASSIVE),
    Claim('learnable-dims', 'C.4', 'A few learnable dimensions of k* are enough for the K bias to '
          'attract attention, and more attract more.',
          f'Sink_* is at least {SINK} % with 1, 2, 4, 8, 16, 32 and 64 learnable dimensions, and '
          f'with the most that were measured at least {POINTS} points above that with the fewest.',
          (Every('sink_star', _DIMS, at_least=SINK),
           Ordered('sink_star', _DIMS, POINTS, falls=False, ends=True))),
    Claim('shared-kv', '7.3', 'KV biases that heads share give a part of the sink back to the '
          'first token.',
          f'With KV biases that heads share, Sink_* is at least {POINTS} points below, and Sink_1 '
          f'at least {POINTS} points above that with KV biases of each head.',
          (Ordered('sink_star', ('kv-bias', 'kv-bias-shared'), POINTS),
           Ordered('sink_1', ('kv-bias', 'kv-bias-shared'), POINTS, falls=False))),
    Claim('shared-k', '7.3', 'K biases that heads share give less of the sink back to the first '
          'token than KV biases that they share.',
          f'Sink_1 with K biases that heads share is at least {POINTS} points below that with KV '
          'biases that heads share.',
          (Ordered('sink_1', ('kv-bias-shared', 'k-bias-shared'), POINTS),)),
    Claim('scale', '7.4', 'Softmax whose rows sum to less has a weaker sink.',
          'From softmax whose rows sum to 2 to the default, whose rows sum to 1, and to sums of '
          f'0.2, 0.1 and 0.05, Sink_1 falls by at least {POINTS} points in all, and rises by no '
          f'more than {NOISE:g} point from one to the next.',
          (Ordered('sink_1', ('scale-2', 'default', 'scale-0.2', 'scale-0.1', 'scale-0.05'),
                   POINTS),)),
    Claim('no-normalisation', '7.4', 'Without normalisation there is no sink.',
          f'Sink_1 is below {NO_SINK} % with sigmoid, elu + 1, the identity kernel and the MLP '
          'kernel, all without normalisation.',
          (_no_sink(*_FREE),), _COUNTERPART),
    Claim('no-normalisation-massive', '7.4', 'Without normalisation there are no massive '
          'activations.',
          f'The largest hidden norm ratio is below {MASSIVE} with sigmoid, elu + 1, the identity '
          'kernel and the MLP kernel, all without normalisation.',
          (_not_massive(*_FREE),), (*_COUNTERPART, 'massive')),
    Claim('no-normalisation-loss', '7.4', 'Sigmoid and elu without normalisation are as good as '
          'softmax.',
          'The valid loss with sigmoid and with elu + 1, both without normalisation, lies within '
          f'{NATS} nats of that of the default run.',
          (Near('valid_loss', ('sigmoid', 'elu'), NATS),), ()),
    Claim('mlp-kernel', '7.4', 'The MLP kernel has no sink with or without normalisation.',
          f'Sink_1 with the MLP kernel is below {NO_SINK} % without normalisation, and with it.',
          (_no_sink('mlp', 'mlp-normalized'),), _COUNTERPART),
    Claim('normalised', '7.4', 'Sigmoid with normalisation has a sink, as has the elu kernel with '
          'it.',
          f'Sink_1 is at least {SINK} % with normalised sigmoid and with the normalised elu + 1 '
          'kernel.',
          (_sink('sigmoid-normalized', 'elu-kernel-normalized'),)),
    Claim('normalised-massive', '7.4', 'Sigmoid with normalisation has massive activations, as has '
          'the elu kernel with it.',
          f'The largest hidden norm ratio is at least {MASSIVE} with normalised sigmoid and with '
          'the normalised elu + 1 kernel.',
          (_massive('sigmoid-normalized', 'elu-kernel-normalized'),), _SINK_AND_MASSIVE),
    Claim('1b', '7.4', 'At 1B too, softmax has a sink and sigmoid without normalisation has none.',
          f'In 1B models, Sink_1 is at least {SINK} % with softmax and below {NO_SINK} % with '
          'sigmoid without normalisation.',
          (_sink('1b-softmax'), _no_sink('1b-sigmoid')), ()),
    Claim('1b-massive', '7.4', 'At 1B too, softmax has massive activations and sigmoid without '
          'normalisation has none.',
          f'In 1B models, the largest hidden norm ratio is at least {MASSIVE} with softmax and '
          f'below {MASSIVE} with sigmoid without normalisation.',
          (_massive('1b-softmax'), _not_massive('1b-sigmoid')), ()),
    Claim('ffn', 'C.3', 'The feed-forward network does not matter: a sink emerges with each.',
          f'Sink_1 is at least {SINK} % with each feed-forward network: ReLU, GeLU, Swish, ReGLU '
          'and GeGLU.',
          (_sink('ffn-relu', 'ffn-gelu', 'ffn-swish', 'ffn-reglu', 'ffn-geglu'),)),
    Claim('heads', 'C.4', 'Neither the number of heads nor adding their outputs matters: a sink '
          'emerges with each.',
          f'Sink_1 is at least {SINK} % with a half, a quarter and an eighth of the heads, and '
          'with heads whose outputs are added.',
          (_sink('heads-4', 'heads-2', 'heads-1', 'heads-added'),)),
    Claim('sigmoid-robust', 'C.4', 'Other learning rates and weight decays give sigmoid without '
          'normalisation no sink either.',
          f'Sink_1 of sigmoid without normalisation is below {NO_SINK} % without weight decay, '
          'with 5 and with 10 times the default weight decay, and with 2.5 times and with a '
          'quarter of the default learning rate.',
          (_no_sink(*_SIGMOIDS),), _COUNTERPART),
    Claim('p-norm-diverges', 'C.4', 'p-normalised softmax with p > 1 diverges.',
          'Every run of p-normalised softmax with p = 2, 3 and 4 diverges.',
          (Trains(_p('softmax', '2', '3', '4'), diverges=True),), ()),
    Claim('p-norm-trains', 'C.4', 'p-normalised softmax with p < 1 trains.',
          'Every run of p-normalised softmax with p = 1/2, 1/3 and 1/4 reaches its last step, and '
          f'the valid loss with each is at most {_TRAINED} nats above that of the default run.',
          (Trains(_p('softmax', 'half', 'third', 'quarter'), within=_TRAINED),), ()),
    Claim('p-norm-massive', 'C.4', 'With p-normalised softmax of p < 1 massive activations are '
          'weaker than with softmax, but stronger than with sigmoid without normalisation.',
          'The largest hidden norm ratio of p-normalised softmax with the smallest p measured, of '
          f'1/2, 1/3 and 1/4, is at least a factor of {_WEAKER} below that of the default run, '
          'where p is 1. That of sigmoid without normalisation is below that with p = 1/4.',
          (Ordered('massive', ('default', *_p('softmax', 'half', 'third', 'quarter')),
                   math.log(_WEAKER), ends=True),
           Ordered('massive', ('softmax-p-quarter', 'sigmoid'), 0)), _SINK_AND_MASSIVE),
    Claim('p-norm-sigmoid', 'C.4', 'p-normalised sigmoid with p > 1 trains and has massive '
          'activations.',
          'Every run of p-normalised sigmoid with p = 2, 3 and 4 reaches its last step. With each, '
          f'the valid loss is at most {_TRAINED} nats above that of the default run, and the '
          f'largest hidden norm ratio at least {MASSIVE}.',
          (Trains(_p('sigmoid', '2', '3', '4'), within=_TRAINED),
           _massive(*_p('sigmoid', '2', '3', '4'))), _SINK_AND_MASSIVE),
    Claim('training-failures', 'C.4', 'Three of the attention operations fail to train.',
          'Every run of normalised elu + 1, of the elu + 1 kernel without normalisation and of the '
          'normalised identity kernel diverges.',
          (Trains(('elu-normalized', 'elu-kernel', 'identity-normalized'), diverges=True),), ()),
)


def trials_of(keys: Sequence[str]) -> list[str]:
  """Names of the trials that some claims need, without repetition, in the order of the keys.

  Raises:
    ValueError: no claim has that key; lists the choices.
  """
  by_key = {claim.key: claim for claim in CLAIMS}
  for key in keys:
    check_known(key, by_key, 'there is no claim')
  return list(dict.fromkeys(trial for key in keys for trial in by_key[key].trials))
