"""Claims about the model (Section 7, Appendices C.3 and C.4).

A criterion says what its checks decide, of means over seeds. Weight decays, learning rates and
numbers of heads stand in it relative to the default run, since that holds at every budget.
"""

from __future__ import annotations

import math

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
  Ordered,
  Trains,
)

_KEY_BIASES = ('sink-token', 'kv-bias', 'k-bias')
_DIMS = tuple(f'learnable-dims-{dims}' for dims in (1, 2, 4, 8, 16, 32, 64))
_FREE = ('sigmoid', 'elu', 'identity', 'mlp')  # of normalisation
_SIGMOIDS = ('sigmoid-wd-0', 'sigmoid-wd-0.5', 'sigmoid-wd-1', 'sigmoid-lr-1e-3', 'sigmoid-lr-1e-4')
_SINK_AND_MASSIVE = ('sink', 'massive')
_COUNTERPART = ('sink', 'counterpart')  # for claims that there is no sink
_WEAKER = 1.25  # factor between norm ratios: that much weaker is weaker
_TRAINED = 0.5  # nats above the default's loss up to which a model counts as trained
_values = lambda value: tuple(f'value-{value}-{norm}' for norm in (1, 5, 20))
_p = lambda name, *words: tuple(f'{name}-p-{word}' for word in words)

CLAIMS = (
    Claim('position', '7.1', 'The position encoding does not matter: a sink emerges with each.',
          f'Sink_1 is at least {SINK} % with each position encoding: none, sinusoidal, learned, '
          'relative and ALiBi.',
          (Every('sink_1', ('nope', 'absolute', 'learned', 'relative', 'alibi'), at_least=SINK),)),
    Claim('post-norm', '7.2', 'A sink emerges in a post-norm model too.',
          f'Sink_1 of the post-norm model is at least {SINK} %.',
          (Every('sink_1', ('post-norm',), at_least=SINK),)),
    Claim('post-norm-massive', '7.2', 'In a post-norm model massive activations are in what enters '
          'the norm, not in the hidden states.',
          'In the post-norm model, the largest norm ratio of the hidden states is below '
          f'{MASSIVE}, and that of what enters the norm at least {MASSIVE}.',
          (Every('massive', ('post-norm',), below=MASSIVE),
           Every('massive_before_norm', ('post-norm',), at_least=MASSIVE)), _SINK_AND_MASSIVE),
    Claim('key-biases', '7.3', 'A sink token, KV biases and K biases take the sink off the first '
          'token.',
          f'With a sink token, with KV biases and with K biases, Sink_* is at least {SINK} % and '
          f'Sink_1 below {NO_SINK} %.',
          (Every('sink_star', _KEY_BIASES, at_least=SINK),
           Every('sink_1', _KEY_BIASES, below=NO_SINK))),
    Claim('value-biases', '7.3', 'V biases leave the sink on the first token.',
          f'Sink_1 with V biases is at least {SINK} %.',
          (Every('sink_1', ('v-bias',), at_least=SINK),)),
    Claim('biases-loss', '7.3', 'Neither a sink token nor a bias changes the loss.',
          'The valid loss with a sink token, with KV biases, with K biases and with V biases lies '
          f'within {NATS} nats of that of the default run.',
          (Near('valid_loss', (*_KEY_BIASES, 'v-bias'), NATS),), ()),
    Claim('biases-massive', '7.3', 'With KV biases and K biases there are no massive activations; '
          'with a sink token, on itself, and V biases there are.',
          f'The largest hidden norm ratio is below {MASSIVE} with KV biases and with K biases, and '
          f'at least {MASSIVE} with V biases and, on the sink token itself, with a sink token.',
          (Every('massive', ('kv-bias', 'k-bias'), below=MASSIVE),
           Every('massive', ('v-bias',), at_least=MASSIVE),
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
           Every('sink_1', ('value-first-20', 'value-uniform-20'), at_least=SINK))),
    Claim('value-massive', '7.3', 'With a longer fixed value v*, massive activations return, '
          'too.',
          f'The largest hidden norm ratio is below {MASSIVE} with K biases, whose v* is zero, and '
          f'at least {MASSIVE} with v* of norm 20 along the first axis.',
          (Every('massive', ('k-bias',), below=MASSIVE),
           Every('massive', ('value-first-20',), at_least=MASSIVE)), _SINK_AND_MASSIVE),
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
    Claim('shared-k', '7.3', 'K biases that heads share give less of the sink back to '
          'the first token than KV biases that they share.',
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
          (Every('sink_1', _FREE, below=NO_SINK),), _COUNTERPART),
    Claim('no-normalisation-massive', '7.4', 'Without normalisation there are no massive '
          'activations.',
          f'The largest hidden norm ratio is below {MASSIVE} with sigmoid, elu + 1, the identity '
          'kernel and the MLP kernel, all without normalisation.',
          (Every('massive', _FREE, below=MASSIVE),), (*_COUNTERPART, 'massive')),
    Claim('no-normalisation-loss', '7.4', 'Sigmoid and elu without normalisation are as good as '
          'softmax.',
          'The valid loss with sigmoid and with elu + 1, both without normalisation, lies within '
          f'{NATS} nats of that of the default run.',
          (Near('valid_loss', ('sigmoid', 'elu'), NATS),), ()),
    Claim('mlp-kernel', '7.4', 'The MLP kernel has no sink with or without normalisation.',
          f'Sink_1 with the MLP kernel is below {NO_SINK} % without normalisation, and with it.',
          (Every('sink_1', ('mlp', 'mlp-normalized'), below=NO_SINK),), _COUNTERPART),
    Claim('normalised', '7.4', 'Sigmoid with normalisation has a sink, as has the elu kernel with '
          'it.',
          f'Sink_1 is at least {SINK} % with normalised sigmoid and with the normalised elu + 1 '
          'kernel.',
          (Every('sink_1', ('sigmoid-normalized', 'elu-kernel-normalized'), at_least=SINK),)),
    Claim('normalised-massive', '7.4', 'Sigmoid with normalisation has massive activations, as '
          'has the elu kernel with it.',
          f'The largest hidden norm ratio is at least {MASSIVE} with normalised sigmoid and with '
          'the normalised elu + 1 kernel.',
          (Every('massive', ('sigmoid-normalized', 'elu-kernel-normalized'), at_least=MASSIVE),),
          _SINK_AND_MASSIVE),
    Claim('1b', '7.4', 'At 1B too, softmax has a sink and sigmoid without normalisation has none.',
          f'In 1B models, Sink_1 is at least {SINK} % with softmax and below {NO_SINK} % with '
          'sigmoid without normalisation.',
          (Every('sink_1', ('1b-softmax',), at_least=SINK),
           Every('sink_1', ('1b-sigmoid',), below=NO_SINK)), ()),
    Claim('1b-massive', '7.4', 'At 1B too, softmax has massive activations and sigmoid without '
          'normalisation has none.',
          f'In 1B models, the largest hidden norm ratio is at least {MASSIVE} with softmax and '
          f'below {MASSIVE} with sigmoid without normalisation.',
          (Every('massive', ('1b-softmax',), at_least=MASSIVE),
           Every('massive', ('1b-sigmoid',), below=MASSIVE)), ()),
    Claim('ffn', 'C.3', 'The feed-forward network does not matter: a sink emerges with each.',
          f'Sink_1 is at least {SINK} % with each feed-forward network: ReLU, GeLU, Swish, ReGLU '
          'and GeGLU.',
          (Every('sink_1', tuple(f'ffn-{ffn}' for ffn in ('relu', 'gelu', 'swish', 'reglu',
                                                          'geglu')), at_least=SINK),)),
    Claim('heads', 'C.4', 'Neither the number of heads nor adding their outputs matters: a sink '
          'emerges with each.',
          f'Sink_1 is at least {SINK} % with a half, a quarter and an eighth of the heads, and '
          'with heads whose outputs are added.',
          (Every('sink_1', ('heads-4', 'heads-2', 'heads-1', 'heads-added'), at_least=SINK),)),
    Claim('sigmoid-robust', 'C.4', 'Other learning rates and weight decays give sigmoid without '
          'normalisation no sink either.',
          f'Sink_1 of sigmoid without normalisation is below {NO_SINK} % without weight decay, '
          'with 5 and with 10 times the default weight decay, and with 2.5 times and with a '
          'quarter of the default learning rate.',
          (Every('sink_1', _SIGMOIDS, below=NO_SINK),), _COUNTERPART),
    Claim('p-norm-diverges', 'C.4', 'p-normalised softmax with p > 1 diverges.',
          'Every run of p-normalised softmax with p = 2, 3 and 4 diverges.',
          (Trains(_p('softmax', '2', '3', '4'), diverges=True),), ()),
    Claim('p-norm-trains', 'C.4', 'p-normalised softmax with p < 1 trains.',
          'Every run of p-normalised softmax with p = 1/2, 1/3 and 1/4 reaches its last step, and '
          f'the valid loss with each is at most {_TRAINED} nats above that of the default run.',
          (Trains(_p('softmax', 'half', 'third', 'quarter'), within=_TRAINED),), ()),
    Claim('p-norm-massive', 'C.4', 'With p-normalised softmax of p < 1 massive activations are '
          'weaker than with softmax, but stronger than with '
          'sigmoid without normalisation.',
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
           Every('massive', _p('sigmoid', '2', '3', '4'), at_least=MASSIVE)), _SINK_AND_MASSIVE),
    Claim('training-failures', 'C.4', 'Three of the attention operations fail to train.',
          'Every run of normalised elu + 1, of the elu + 1 kernel without normalisation and of the '
          'normalised identity kernel diverges.',
          (Trains(('elu-normalized', 'elu-kernel', 'identity-normalized'), diverges=True),), ()),
)
