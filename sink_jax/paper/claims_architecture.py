"""Claims about the model (Section 7, Appendices C.3 and C.4)."""

from __future__ import annotations

import math

from sink_jax.paper.claims import Claim
from sink_jax.paper.criteria import MASSIVE, NO_SINK, SINK, Every, Near, Ordered, Trains

_POINTS = 2  # points of Sink_k that are a difference
_NATS = 0.1  # of loss that are a difference
_KEY_BIASES = ('sink-token', 'kv-bias', 'k-bias')
_DIMS = tuple(f'learnable-dims-{dims}' for dims in (1, 2, 4, 8, 16, 32, 64))
_FREE = ('sigmoid', 'elu', 'identity', 'mlp')  # of normalisation
_SIGMOIDS = ('sigmoid-wd-0', 'sigmoid-wd-0.5', 'sigmoid-wd-1', 'sigmoid-lr-1e-3', 'sigmoid-lr-1e-4')
_SINK_AND_MASSIVE = ('sink', 'massive')
_COUNTERPART = ('sink', 'counterpart')  # for claims that there is no sink
_WEAKER = math.log(1.25)  # of norm ratios: that much weaker is weaker
_TRAINED = 0.5  # nats above the default's loss up to which a model counts as trained
_values = lambda value: tuple(f'value-{value}-{norm}' for norm in (1, 5, 20))
_p = lambda name, *words: tuple(f'{name}-p-{word}' for word in words)

CLAIMS = (
    Claim('position', '7.1', 'The position encoding does not matter: a sink emerges with each.',
          (Every('sink_1', ('nope', 'absolute', 'learned', 'relative', 'alibi'), at_least=SINK),)),
    Claim('post-norm', '7.2', 'A sink emerges in a post-norm model too.',
          (Every('sink_1', ('post-norm',), at_least=SINK),)),
    Claim('post-norm-massive', '7.2', 'There massive activations are in what enters the norm, not '
          'in the hidden states.',
          (Every('massive', ('post-norm',), below=MASSIVE),
           Every('massive_before_norm', ('post-norm',), at_least=MASSIVE)), _SINK_AND_MASSIVE),
    Claim('key-biases', '7.3', 'A sink token, KV biases and K biases take the sink off the first '
          'token.',
          (Every('sink_star', _KEY_BIASES, at_least=SINK),
           Every('sink_1', _KEY_BIASES, below=NO_SINK))),
    Claim('value-biases', '7.3', 'V biases do not.',
          (Every('sink_1', ('v-bias',), at_least=SINK),)),
    Claim('biases-loss', '7.3', 'None of them changes the loss.',
          (Near('valid_loss', (*_KEY_BIASES, 'v-bias'), 'default', _NATS),), ()),
    Claim('biases-massive', '7.3', 'With KV biases and K biases there are no massive activations; '
          'with a sink token, on itself, and V biases there are.',
          (Every('massive', ('kv-bias', 'k-bias'), below=MASSIVE),
           Every('massive', ('v-bias',), at_least=MASSIVE),
           Every('massive_sink_token', ('sink-token',), at_least=MASSIVE)), _SINK_AND_MASSIVE),
    Claim('removal', '7.3', 'Without its trained sink token or key bias, a model has no sink on '
          'the first token and a much worse loss.',
          (Every('removed_sink_1', _KEY_BIASES, below=NO_SINK),
           Every('removed_loss', _KEY_BIASES, at_least=_NATS))),
    Claim('value-norm', '7.3', 'With a longer fixed value v*, the sink returns from the K bias to '
          'the first token.',
          (Ordered('sink_1', _values('first'), _POINTS, falls=False),
           Ordered('sink_1', _values('uniform'), _POINTS, falls=False),
           Ordered('sink_star', _values('first'), _POINTS, ends=True),
           Ordered('sink_star', _values('uniform'), _POINTS, ends=True),
           Every('sink_1', ('value-first-20', 'value-uniform-20'), at_least=SINK))),
    Claim('value-massive', '7.3', 'And massive activations come back with it.',
          (Every('massive', ('k-bias',), below=MASSIVE),
           Every('massive', ('value-first-20',), at_least=MASSIVE)), _SINK_AND_MASSIVE),
    Claim('learnable-dims', 'C.4', 'A few learnable dimensions of k* are enough for the K bias to '
          'attract attention, and more attract more.',
          (Every('sink_star', _DIMS, at_least=SINK),
           Ordered('sink_star', _DIMS, _POINTS, falls=False, ends=True))),
    Claim('shared-kv', '7.3', 'KV biases that heads share give a part of the sink back to the '
          'first token.',
          (Ordered('sink_star', ('kv-bias', 'kv-bias-shared'), _POINTS),
           Ordered('sink_1', ('kv-bias', 'kv-bias-shared'), _POINTS, falls=False))),
    Claim('shared-k', '7.3', 'Shared K biases do so less.',
          (Ordered('sink_1', ('kv-bias-shared', 'k-bias-shared'), _POINTS),)),
    Claim('scale', '7.4', 'Softmax whose rows sum to less has a weaker sink.',
          (Ordered('sink_1', ('scale-2', 'default', 'scale-0.2', 'scale-0.1', 'scale-0.05'),
                   _POINTS),)),
    Claim('no-normalisation', '7.4', 'Without normalisation there is no sink.',
          (Every('sink_1', _FREE, below=NO_SINK),), _COUNTERPART),
    Claim('no-normalisation-massive', '7.4', 'Nor are there massive activations.',
          (Every('massive', _FREE, below=MASSIVE),), (*_COUNTERPART, 'massive')),
    Claim('no-normalisation-loss', '7.4', 'Sigmoid and elu without normalisation are as good as '
          'softmax.',
          (Near('valid_loss', ('sigmoid', 'elu'), 'default', _NATS),), ()),
    Claim('mlp-kernel', '7.4', 'The MLP kernel has no sink with or without normalisation.',
          (Every('sink_1', ('mlp', 'mlp-normalized'), below=NO_SINK),), _COUNTERPART),
    Claim('normalised', '7.4', 'Sigmoid with normalisation has a sink, as has the elu kernel with '
          'it.',
          (Every('sink_1', ('sigmoid-normalized', 'elu-kernel-normalized'), at_least=SINK),)),
    Claim('normalised-massive', '7.4', 'And massive activations.',
          (Every('massive', ('sigmoid-normalized', 'elu-kernel-normalized'), at_least=MASSIVE),),
          _SINK_AND_MASSIVE),
    Claim('1b', '7.4', 'At 1B too, softmax has a sink and sigmoid without normalisation has none.',
          (Every('sink_1', ('1b-softmax',), at_least=SINK),
           Every('sink_1', ('1b-sigmoid',), below=NO_SINK)), ()),
    Claim('1b-massive', '7.4', 'At 1B too, softmax has massive activations and sigmoid without '
          'normalisation has none.',
          (Every('massive', ('1b-softmax',), at_least=MASSIVE),
           Every('massive', ('1b-sigmoid',), below=MASSIVE)), ()),
    Claim('ffn', 'C.3', 'The feed-forward network does not matter: a sink emerges with each.',
          (Every('sink_1', tuple(f'ffn-{ffn}' for ffn in ('relu', 'gelu', 'swish', 'reglu',
                                                          'geglu')), at_least=SINK),)),
    Claim('heads', 'C.4', 'Neither the number of heads nor adding their outputs matters: a sink '
          'emerges with each.',
          (Every('sink_1', ('heads-4', 'heads-2', 'heads-1', 'heads-added'), at_least=SINK),)),
    Claim('sigmoid-robust', 'C.4', 'Other learning rates and weight decays give sigmoid without '
          'normalisation no sink either.',
          (Every('sink_1', _SIGMOIDS, below=NO_SINK),), _COUNTERPART),
    Claim('p-norm-diverges', 'C.4', 'p-normalised softmax with p > 1 diverges.',
          (Trains(_p('softmax', '2', '3', '4'), diverges=True),), ()),
    Claim('p-norm-trains', 'C.4', 'With p < 1 it trains.',
          (Trains(_p('softmax', 'half', 'third', 'quarter'), within=_TRAINED),), ()),
    Claim('p-norm-massive', 'C.4', 'There massive activations are weaker, but stronger than with '
          'sigmoid without normalisation.',
          (Ordered('massive', ('default', *_p('softmax', 'half', 'third', 'quarter')),
                   _WEAKER, ends=True),
           Ordered('massive', ('softmax-p-quarter', 'sigmoid'), 0)), _SINK_AND_MASSIVE),
    Claim('p-norm-sigmoid', 'C.4', 'p-normalised sigmoid with p > 1 trains and has massive '
          'activations.',
          (Trains(_p('sigmoid', '2', '3', '4'), within=_TRAINED),
           Every('massive', _p('sigmoid', '2', '3', '4'), at_least=MASSIVE)), _SINK_AND_MASSIVE),
    Claim('training-failures', 'C.4', 'Three of the attention operations fail to train.',
          (Trains(('elu-normalized', 'elu-kernel', 'identity-normalized'), diverges=True),), ()),
)
