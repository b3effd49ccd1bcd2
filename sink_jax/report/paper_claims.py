"""The paper's claims: a row for each.

To add one, write a row: its key, which pages print as words, the section of the paper, the
sentence, and the comparisons of trials that decide it, joined by `+`. `needs` are preconditions,
without which it is not testable; `headline=True` shows it on the first screen. A trial is a name of
configs/paper.py, a published model (it begins with a capital), or `untrained`, the default run
before its first step. A metric is a column of `runs.table` or `paper.open_models`;
`edited_sequences` is 1 where a token of every sequence was replaced.

Levels, written down before the runs: a sink from 10 % on, none below 5 %; 2 points and 0.1 nats are
a difference; massive by Sun et al. from 1 on.
"""

from __future__ import annotations

from sink_jax.report.claims import Claim
from sink_jax.report.conditions import (
  above,
  below,
  diverges,
  equal,
  greater,
  less,
  ordered,
  trains,
)

# Preconditions.
SINK = above('sink_1', 'default', 10)
NORMALIZED_SINK = above('sink_1', 'sigmoid-normalized', 10)
MASSIVE = above('massive', 'default', 1)
UNEDITED = below('edited_sequences', 'default', 0.5)
# Trials and models.
OPEN_MODELS = ['GPT2-XL', 'Mistral-7B', 'LLaMA2-7B Base', 'LLaMA3-8B Base']
MODELS_WITH_ANGLES = ['LLaMA3-8B Base', 'LLaMA2-7B Base', 'Mistral-7B', 'GPT2-Large']
KEY_BIASES = ['sink-token', 'kv-bias', 'k-bias']
UNNORMALIZED = ['sigmoid', 'elu', 'identity', 'mlp']
PREFIXES = ['prefix-2', 'prefix-3', 'prefix-4', 'prefix-5', 'prefix-10']
WINDOWS = ['window-256', 'window-512', 'window-1024']
NORMALIZED = ['sigmoid-normalized', 'elu-kernel-normalized']
SMALL_P = ['softmax-p-half', 'softmax-p-third', 'softmax-p-quarter']
LARGE_P = ['sigmoid-p-2', 'sigmoid-p-3', 'sigmoid-p-4']

CLAIMS = (
  Claim(
    'chain',
    '3.1',
    'The hidden states of the first token involve no attention: they are a chain of MLPs of '
    'its embedding.',
    below('chain_difference', 'default', 0.001),
  ),
  Claim(
    'massive-open',
    '3.1',
    'The first token of LLaMA3-8B has hidden states much longer than those of the others.',
    above('norms_hidden_states_ratio', 'LLaMA3-8B Base', 10),
  ),
  Claim(
    'value-norms',
    '3.1',
    'Keys and values of the first token are shorter than those of the others.',
    below('norms_keys_ratio', 'LLaMA3-8B Base', 1)
    + below('norms_values_ratio', 'LLaMA3-8B Base', 1),
  ),
  Claim(
    'angles',
    '3.1',
    'Angles between queries and the first key make the sink, and not the product of their norms.',
    above('angles_cosine_lead', MODELS_WITH_ANGLES, 0)
    + below('angles_norm_product_lead', MODELS_WITH_ANGLES, 0),
  ),
  Claim(
    'domains',
    '3.3',
    'The domain of the text hardly matters.',
    below('domains_sink_1_range', OPEN_MODELS, 10),
  ),
  Claim(
    'random-tokens-keep-the-sink',
    '3.3',
    'Random tokens keep the sink that open models have on text.',
    above('kinds_natural_sink_1', OPEN_MODELS, 10) + above('kinds_random_sink_1', OPEN_MODELS, 10),
    headline=True,
  ),
  Claim(
    'repeated-tokens',
    '3.3',
    'One token repeated leaves no sink in Mistral and LLaMA, and leaves it in GPT2.',
    below('kinds_repeat_sink_1', ['Mistral-7B', 'LLaMA2-7B Base', 'LLaMA3-8B Base'], 5)
    + above('kinds_repeat_sink_1', 'GPT2-XL', 10),
  ),
  Claim(
    'position-swap',
    'B.1',
    'The first position vector of GPT2, moved to a later token, takes the sink with it.',
    below('positions_swapped_sink_1', 'GPT2-XL', 5)
    + above('positions_swapped_sink_t', 'GPT2-XL', 10),
  ),
  Claim(
    'chat',
    '3.4',
    'Chat models have about as much of a sink as their base models.',
    equal('kinds_natural_sink_1', 'Mistral-7B Instruct', 'Mistral-7B', within=10)
    + equal('kinds_natural_sink_1', 'LLaMA2-7B Chat', 'LLaMA2-7B Base', within=10)
    + equal('kinds_natural_sink_1', 'LLaMA2-13B Chat', 'LLaMA2-13B Base', within=10)
    + equal('kinds_natural_sink_1', 'LLaMA3-8B Instruct', 'LLaMA3-8B Base', within=10),
  ),
  Claim(
    'model-scale',
    '3.4',
    'Small models have a sink, too; in the Pythia family larger ones have more.',
    above('kinds_natural_sink_1', 'Pythia-14M', 10)
    + greater('kinds_natural_sink_1', 'Pythia-12B', 'Pythia-14M', by=2),
  ),
  Claim(
    'a-sink-emerges-in-training',
    '4',
    'The sink is not there from the start: it emerges after a number of optimisation steps.',
    above('sink_1', 'default', 10) + below('sink_1', 'untrained', 10),
    headline=True,
  ),
  Claim(
    'small-learning-rates-weaken-it',
    '4',
    'Smaller learning rates make the sink weaker.',
    ordered('sink_1', ['lr-8e-4', 'default', 'lr-2e-4', 'lr-1e-4'], by=2),
    needs=SINK,
    headline=True,
  ),
  Claim(
    'learning-rate-steps',
    'C.1',
    'Smaller learning rates make the sink weaker even where more steps make up for them.',
    ordered('sink_1', ['lr-8e-4-10k', 'default', 'lr-2e-4-40k', 'lr-1e-4-80k'], by=2),
    needs=SINK,
  ),
  Claim(
    'learning-rate-delay',
    '4',
    'Smaller learning rates delay the sink.',
    ordered('emergence_step', ['lr-8e-4', 'default', 'lr-2e-4', 'lr-1e-4'], rising=True),
    needs=SINK,
  ),
  Claim(
    'batch-size',
    '4',
    'The batch size does not matter: a sink emerges with each.',
    above('sink_1', ['batch-128', 'batch-256', 'batch-1024'], 10),
    needs=SINK,
  ),
  Claim(
    'little-data-gives-no-sink',
    '5',
    'With little unique training data there is no sink.',
    below('sink_1', ['data-50m', 'data-100m'], 5),
    needs=SINK,
    headline=True,
  ),
  Claim(
    'overfitting',
    '5',
    'With little unique training data the model overfits.',
    above('overfitting', ['data-50m', 'data-100m'], 0.1)
    + greater('overfitting', 'data-50m', 'data-5b', by=0.1),
  ),
  Claim(
    'random-first',
    '5',
    'A first token drawn at random leaves the sink on the first token.',
    above('sink_1', 'random-1', 10),
    needs=SINK + UNEDITED,
  ),
  Claim(
    'random-second',
    '5',
    'A second token drawn at random leaves the sink on the first token.',
    above('sink_1', 'random-2', 10),
    needs=SINK + UNEDITED,
  ),
  Claim(
    'random-both',
    '5',
    'Two tokens drawn at random move the sink to the second token.',
    above('sink_2', 'random-1-2', 10) + above('lead_2', 'random-1-2', 2),
    needs=SINK + UNEDITED,
  ),
  Claim(
    'random-more',
    '5',
    'With more random tokens the sink tends to disappear.',
    below('largest_sink', ['random-1-16', 'random-1-64'], 10),
    needs=SINK + UNEDITED,
  ),
  Claim(
    'a-fixed-token-takes-the-sink',
    '5',
    'A token fixed at one position takes the sink.',
    above('sink_1', 'fixed-1', 10)
    + above('lead_1', 'fixed-1', 2)
    + above('sink_2', 'fixed-2', 10)
    + above('lead_2', 'fixed-2', 2)
    + above('sink_3', 'fixed-3', 10)
    + above('lead_3', 'fixed-3', 2),
    headline=True,
  ),
  Claim(
    'no-weight-decay',
    '6',
    'A sink emerges even without weight decay.',
    above('sink_1', 'weight-decay-0', 10),
    needs=SINK,
  ),
  Claim(
    'weight-decay-strengthens-it',
    '6',
    'More weight decay gives more sinks.',
    greater('sink_1', 'weight-decay-0.5', 'default', by=2),
    needs=SINK,
    headline=True,
  ),
  Claim(
    'much-weight-decay',
    '6',
    'Too much weight decay hurts the model and removes the sink.',
    below('sink_1', 'weight-decay-5', 5)
    + greater('valid_loss', 'weight-decay-5', 'default', by=0.1),
    needs=SINK,
  ),
  Claim(
    'prefix',
    '6',
    'In a prefix language model a sink emerges within the prefix.',
    above('prefix_sink', PREFIXES, 10) + above('prefix_share', PREFIXES, 90),
    needs=SINK + UNEDITED,
  ),
  Claim(
    'prefix-anywhere',
    '6',
    'Within a prefix the sink is not always on the first token.',
    below('prefix_first', 'prefix-5', 90),
    needs=SINK + UNEDITED,
  ),
  Claim(
    'window',
    '6',
    'With window attention the sink is on the absolute first token, not on the first token of '
    'each window.',
    above('window_absolute', WINDOWS, 2) + below('window_relative', WINDOWS, 2),
    needs=SINK + above('sink_1', WINDOWS, 10) + UNEDITED,
  ),
  Claim(
    'small-window',
    '6',
    'Small windows prevent the sink.',
    below('sink_1', 'window-32', 5) + above('sink_1', 'window-1024', 10),
    needs=SINK,
  ),
  Claim(
    'any-position-encoding-has-it',
    '7.1',
    'The position encoding does not matter: a sink emerges with each.',
    above('sink_1', ['nope', 'absolute', 'learned', 'relative', 'alibi'], 10),
    needs=SINK + below('untrained_sink_1', 'relative', 10),
    headline=True,
  ),
  Claim(
    'post-norm-has-it',
    '7.2',
    'A sink emerges in a post-norm model too.',
    above('sink_1', 'post-norm', 10),
    needs=SINK,
    headline=True,
  ),
  Claim(
    'post-norm-massive',
    '7.2',
    'In a post-norm model massive activations are in what enters the norm, not in the hidden '
    'states.',
    below('massive', 'post-norm', 1) + above('massive_before_norm', 'post-norm', 2),
    needs=SINK + MASSIVE,
  ),
  Claim(
    'key-biases-take-the-sink',
    '7.3',
    'A sink token, KV biases and K biases take the sink off the first token.',
    above('sink_star', KEY_BIASES, 10) + below('sink_1', KEY_BIASES, 5),
    needs=SINK,
    headline=True,
  ),
  Claim(
    'V-biases-leave-it',
    '7.3',
    'V biases leave the sink on the first token.',
    above('sink_1', 'v-bias', 10),
    needs=SINK,
    headline=True,
  ),
  Claim(
    'biases-keep-the-loss',
    '7.3',
    'Neither a sink token nor a bias changes the loss.',
    equal('valid_loss', ['sink-token', 'kv-bias', 'k-bias', 'v-bias'], 'default', within=0.1),
    needs=SINK + above('sink_star', KEY_BIASES, 10),
    headline=True,
  ),
  Claim(
    'biases-massive',
    '7.3',
    'With KV biases and K biases there are no massive activations; with a sink token, on '
    'itself, and V biases there are.',
    below('massive', ['kv-bias', 'k-bias'], 1)
    + above('massive', 'v-bias', 1)
    + above('massive_sink_token', 'sink-token', 2),
    needs=SINK + MASSIVE,
  ),
  Claim(
    'removal',
    '7.3',
    'Without its trained sink token or key bias, a model has no sink on the first token and a '
    'much worse loss.',
    below('removed_sink_1', KEY_BIASES, 5) + above('removed_loss', KEY_BIASES, 0.1),
    needs=SINK,
  ),
  Claim(
    'long-values-return-it',
    '7.3',
    'With a longer fixed value v*, the sink returns from the K bias to the first token.',
    ordered('sink_1', ['value-first-20', 'value-first-5', 'value-first-1'], by=2)
    + ordered('sink_1', ['value-uniform-20', 'value-uniform-5', 'value-uniform-1'], by=2)
    + above('sink_1', ['value-first-20', 'value-uniform-20'], 10)
    + greater('sink_star', 'value-first-1', 'value-first-20', by=2)
    + greater('sink_star', 'value-uniform-1', 'value-uniform-20', by=2),
    needs=SINK,
    headline=True,
  ),
  Claim(
    'value-massive',
    '7.3',
    'With a longer fixed value v*, massive activations return, too.',
    below('massive', 'k-bias', 1) + above('massive', 'value-first-20', 1),
    needs=SINK + MASSIVE,
  ),
  Claim(
    'learnable-dims',
    'C.4',
    'A few learnable dimensions of k* are enough for the K bias to attract attention, and '
    'more attract more.',
    above(
      'sink_star',
      [
        'learnable-dims-1',
        'learnable-dims-2',
        'learnable-dims-4',
        'learnable-dims-8',
        'learnable-dims-16',
        'learnable-dims-32',
        'learnable-dims-64',
      ],
      10,
    )
    + greater('sink_star', ['learnable-dims-64', 'learnable-dims-8'], 'learnable-dims-1', by=2),
    needs=SINK,
  ),
  Claim(
    'shared-kv',
    '7.3',
    'KV biases that heads share give a part of the sink back to the first token.',
    greater('sink_star', 'kv-bias', 'kv-bias-shared', by=2)
    + greater('sink_1', 'kv-bias-shared', 'kv-bias', by=2),
    needs=SINK,
  ),
  Claim(
    'shared-k',
    '7.3',
    'K biases that heads share give less of the sink back to the first token than KV biases '
    'that they share.',
    greater('sink_1', 'kv-bias-shared', 'k-bias-shared', by=2),
    needs=SINK,
  ),
  Claim(
    'scale',
    '7.4',
    'Softmax whose rows sum to less has a weaker sink.',
    ordered('sink_1', ['scale-2', 'default', 'scale-0.2', 'scale-0.1', 'scale-0.05'], by=2),
    needs=SINK,
  ),
  Claim(
    'no-sink-without-normalisation',
    '7.4',
    'Without normalisation there is no sink.',
    below('sink_1', UNNORMALIZED, 5),
    needs=SINK + NORMALIZED_SINK,
    headline=True,
  ),
  Claim(
    'no-normalisation-massive',
    '7.4',
    'Without normalisation there are no massive activations.',
    below('massive', UNNORMALIZED, 1),
    needs=SINK + NORMALIZED_SINK + MASSIVE,
  ),
  Claim(
    'no-normalisation-loss',
    '7.4',
    'Sigmoid and elu without normalisation are as good as softmax.',
    equal('valid_loss', ['sigmoid', 'elu'], 'default', within=0.1),
    needs=SINK,
  ),
  Claim(
    'mlp-kernel',
    '7.4',
    'The MLP kernel has no sink with or without normalisation.',
    below('sink_1', ['mlp', 'mlp-normalized'], 5),
    needs=SINK + NORMALIZED_SINK,
  ),
  Claim(
    'normalised-kernels-have-it',
    '7.4',
    'Sigmoid with normalisation has a sink, as has the elu kernel with it.',
    above('sink_1', NORMALIZED, 10),
    needs=SINK,
    headline=True,
  ),
  Claim(
    'normalised-massive',
    '7.4',
    'Sigmoid with normalisation has massive activations, as has the elu kernel with it.',
    above('massive', NORMALIZED, 1),
    needs=SINK + MASSIVE,
  ),
  Claim(
    '1b',
    '7.4',
    'At 1B too, softmax has a sink and sigmoid without normalisation has none.',
    above('sink_1', '1b-softmax', 10) + below('sink_1', '1b-sigmoid', 5),
  ),
  Claim(
    '1b-massive',
    '7.4',
    'At 1B too, softmax has massive activations and sigmoid without normalisation has none.',
    above('massive', '1b-softmax', 1) + below('massive', '1b-sigmoid', 1),
  ),
  Claim(
    'any-feed-forward-network-has-it',
    'C.3',
    'The feed-forward network does not matter: a sink emerges with each.',
    above('sink_1', ['ffn-relu', 'ffn-gelu', 'ffn-swish', 'ffn-reglu', 'ffn-geglu'], 10),
    needs=SINK,
    headline=True,
  ),
  Claim(
    'heads',
    'C.4',
    'Neither the number of heads nor adding their outputs matters: a sink emerges with each.',
    above('sink_1', ['heads-4', 'heads-2', 'heads-1', 'heads-added'], 10),
    needs=SINK,
  ),
  Claim(
    'sigmoid-robust',
    'C.4',
    'Other learning rates and weight decays give sigmoid without normalisation no sink either.',
    below(
      'sink_1',
      ['sigmoid-wd-0', 'sigmoid-wd-0.5', 'sigmoid-wd-1', 'sigmoid-lr-1e-3', 'sigmoid-lr-1e-4'],
      5,
    ),
    needs=SINK + NORMALIZED_SINK,
  ),
  Claim(
    'p-norm-diverges',
    'C.4',
    'p-normalised softmax with p > 1 diverges.',
    diverges('softmax-p-2', 'softmax-p-3', 'softmax-p-4'),
  ),
  Claim(
    'p-norm-trains',
    'C.4',
    'p-normalised softmax with p < 1 trains.',
    trains(*SMALL_P) + less('valid_loss', SMALL_P, 'default', plus=0.5),
  ),
  Claim(
    'p-norm-massive',
    'C.4',
    'With p-normalised softmax of p < 1 massive activations are weaker than with softmax, but '
    'stronger than with sigmoid without normalisation.',
    greater('massive', 'default', 'softmax-p-quarter', times=1.25)
    + greater('massive', 'softmax-p-quarter', 'sigmoid'),
    needs=SINK + MASSIVE,
  ),
  Claim(
    'p-norm-sigmoid',
    'C.4',
    'p-normalised sigmoid with p > 1 trains and has massive activations.',
    trains(*LARGE_P)
    + less('valid_loss', LARGE_P, 'default', plus=0.5)
    + above('massive', LARGE_P, 1),
    needs=SINK + MASSIVE,
  ),
  Claim(
    'training-failures',
    'C.4',
    'Three of the attention operations fail to train.',
    diverges('elu-normalized', 'elu-kernel', 'identity-normalized'),
  ),
)
