"""Every training experiment of the paper in one table.

Figures 4, 7, 8, 28 and 29 show how these same runs went; they have no trials of their own.
"""

from ml_collections import ConfigDict

from configs import (
    attention_operation,
    batch_size,
    biases,
    budget,
    data_amount,
    default,
    ffn,
    fixed_token,
    fixed_value,
    head_sharing,
    heads,
    learnable_dims,
    learning_rate,
    norm_location,
    normalization_scale,
    one_billion,
    p_norm,
    position,
    prefix,
    random_tokens,
    sigmoid_optimization,
    weight_decay,
    window,
)

# By hand, since a sweep begins them in this order and --shard=2/8 counts in it: a part is to be the
# same trials in every version, and the 1B models are last.
EXPERIMENTS = (
    default, learning_rate, batch_size, weight_decay, data_amount, random_tokens, fixed_token,
    prefix, window, position, norm_location, biases, fixed_value, learnable_dims, heads,
    head_sharing, normalization_scale, attention_operation, sigmoid_optimization, p_norm, ffn,
    one_billion)
TRIALS = {name: changes for experiment in EXPERIMENTS
          for name, changes in experiment.TRIALS.items()}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
