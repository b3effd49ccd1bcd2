"""Every key of an experiment, with the paper's defaults (Section 4).

An experiment of the paper is a table of changes to this one: see `trial`.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from ml_collections import ConfigDict, config_dict

from sink_jax.arguments import check_known

Trials: TypeAlias = Mapping[str, Mapping[str, Any]]  # {trial: {dotted key: value}}


def get_config(name: str = '') -> ConfigDict:
  """The defaults; this file has no trials to name."""
  if name:
    raise ValueError(f'configs/base.py has no trials, so none that is called {name!r}.')
  config = ConfigDict()

  config.seed = 0  # of the parameters and of the order of the data
  config.steps = 20_000
  config.batch_size = 512  # sequences per step
  config.microbatches = 1  # slices of a batch whose gradients are accumulated
  # When those are summed over the devices of mesh.data: 'step' (and where it is empty), once after
  # the last slice, or 'microbatch', after each.
  config.gradient_reduction = config_dict.placeholder(str)
  # Most logits that a device computes at a time; empty: 2**28 on a GPU or TPU, else 2**26.
  config.loss_logits = config_dict.placeholder(int)
  config.log_every = 20  # steps between training metrics
  config.checkpoint_every = 1_000  # steps; 0: only after the last one
  config.checkpoints_kept = 2  # the newest ones

  # Parameters of another model to begin with, in the place of those that the seed draws. In
  # init.source {seed} is the seed of the run, and beside it in data.tokenizer {seed} and {source}.
  config.init = ConfigDict()
  config.init.source = ''  # a workdir, or a folder or name as load_pretrained takes it; '': none
  config.init.keep = 'params'  # of the source; the optimizer starts fresh
  # '': attention, norm and sink tokens are the source's. What the config changes of their defaults
  # takes their place with identity (new parameters start where the function is the same, if they
  # can) or random.
  config.init.graft = ''
  config.init.train = 'all'  # what updates change: all, new (the source lacks it), attention
  config.init.distill = 0.0  # so much of the divergence KL(source || model) beside the loss
  # Components that a graft keeps of the source; empty: all that the config leaves at its default;
  # '': none. 'attention.position, model.norm'
  config.init.kept = config_dict.placeholder(str)
  # As they were found when the run began; empty: the newest good checkpoint of a run. A source
  # that lacks the step, or has another hash, is refused.
  config.init.step = config_dict.placeholder(int)
  config.init.hash = config_dict.placeholder(str)
  config.init.new = config_dict.placeholder(str)  # parameters that a graft has added

  config.model = ConfigDict()
  # tiny, 60m, 1b, 7b, 13b, or with init.source that of the source. The next keys override it where
  # set; with init.source they have to be the source's.
  config.model.size = '60m'
  config.model.layers = config_dict.placeholder(int)
  config.model.d_model = config_dict.placeholder(int)
  config.model.heads = config_dict.placeholder(int)
  config.model.kv_heads = config_dict.placeholder(int)  # fewer than heads: grouped queries
  config.model.head_dim = config_dict.placeholder(int)  # empty: d_model / heads
  config.model.ffn_hidden = config_dict.placeholder(int)
  config.model.vocab_size = config_dict.placeholder(int)  # empty: the tokenizer's
  config.model.input_features = config_dict.placeholder(int)  # of tasks without tokens
  config.model.output_features = config_dict.placeholder(int)
  # Blocks that differ, one period: 'Layer(mask=Window(size=128)); Layer(position=Nope())'. Empty:
  # all are alike.
  config.model.pattern = config_dict.placeholder(str)
  # relu, gelu, swish, reglu, geglu, swiglu, none (Table 11); gelu_tanh, tanh_geglu, clamped_swiglu
  config.model.ffn = 'swiglu'
  config.model.norm = 'rmsnorm'  # rmsnorm, layernorm, single, dyt, none
  config.model.norm_eps = 1e-5
  config.model.norm_location = 'pre'  # pre (Eq. 2), post (Eq. 3), sandwich, after, protected
  config.model.parallel_residual = config_dict.placeholder(bool)  # empty: one after the other
  config.model.biases = config_dict.placeholder(str)  # 'qkv, out, ffn, unembed'; empty: none
  config.model.embedding_dim = config_dict.placeholder(int)  # of projected embeddings
  config.model.tied = config_dict.placeholder(bool)  # whether the unembedding is the embedding
  config.model.logit_cap = config_dict.placeholder(float)  # c of c tanh(logits / c); empty: none
  config.model.linear = 'plain'  # of blocks: plain, sigma_reparam
  config.model.combine_heads = 'concat'  # concat, add (Table 12 left)
  config.model.sink_tokens = 0  # learned tokens before every sequence (Table 4); several: registers
  config.model.init = 'torch_default'  # torch_default, tinyllama
  config.model.dtype = 'bfloat16'  # of activations: bfloat16, float32
  # Of attention: reference, chunked, linear, pallas, cudnn, splash; empty: the platform's best.
  config.model.implementation = config_dict.placeholder(str)
  # What the backward pass recomputes: none, save_matmuls, save_attention, blocks (all); empty:
  # none where that fits a device and leaves no loop over the blocks, or on a CPU; else the first
  # of the others that fits, or blocks.
  config.model.remat = config_dict.placeholder(str)
  # Blocks that are compiled one after another, where nothing is recomputed; empty: all of at most
  # 24 on a GPU or TPU, else 1.
  config.model.unroll = config_dict.placeholder(int)

  # One variant of attention. docs/attention.md has a table of all values of every component, and
  # the error about an unknown one lists them.
  config.attention = ConfigDict()
  config.attention.similarity = 'Exp()'  # f, of a score
  config.attention.normalizer = 'RowSum()'  # Z, of a row of similarities
  config.attention.feature_map = 'Identity()'  # of queries and keys
  config.attention.position = 'Rope()'
  config.attention.mask = 'Causal()'  # the keys that a query sees
  config.attention.kv_bias = 'NoBias()'  # an extra key or value
  config.attention.qk_norm = 'NoQKNorm()'
  config.attention.temperature = 'Fixed()'  # the factor of a query's scores
  config.attention.value = 'PlainValue()'  # what becomes of values before attention mixes them
  config.attention.head = 'PlainOutput()'  # gates and norms of the heads' outputs

  config.data = ConfigDict()
  # Stdlib, TextFolder, Jsonl, Tfds, HubDataset, PackedDataset, InstalledPackages; conversations, of
  # which the loss may count only the answers: ChatJsonl; or a synthetic task.
  config.data.source = 'Stdlib()'
  # Bytes, HuggingFace, TrainedBpe; with init.source that of the source, where its folder has one.
  config.data.tokenizer = 'Bytes()'
  config.data.context = 2048  # C: tokens per sequence, predicted from the second on
  config.data.bos = False  # put BOS before every document
  config.data.eos = True  # put EOS after every document
  config.data.domain_weights = ''  # 'code=2, docs=1'; empty: in proportion to size
  config.data.max_tokens = 0  # amount of training data (Figure 5 right); 0: all
  config.data.interventions = ''  # 'FixedToken(position=1); RandomTokens(first=2, last=2)'
  config.data.valid_fraction = 0.05  # of the documents
  config.data.valid_source = ''  # another source for validation; empty: hold documents out
  config.data.cache_dir = ''  # of packed chunks; empty: $SINK_JAX_CACHE or ~/.cache/sink_jax

  config.optimizer = ConfigDict()
  # How gradients are scaled; the error about an unknown rule lists all. Runs are compared by this
  # text, so trials that change it write all arguments, as the repr of the rule has them.
  config.optimizer.rule = 'AdamW(b1=0.9, b2=0.95, eps=1e-08)'
  config.optimizer.learning_rate = 4e-4
  # cosine (the paper), constant (the official implementation, sail-sg/Attention-Sink)
  config.optimizer.schedule = 'cosine'
  config.optimizer.final_fraction = 0.1  # of the learning rate, after the cosine
  config.optimizer.warmup_steps = 100
  config.optimizer.weight_decay = 0.1  # decoupled: times the learning rate
  config.optimizer.decay = 'all'  # all (the official implementation), matrices
  config.optimizer.clip = 1.0  # largest global gradient norm; 0: none

  config.probe = ConfigDict()  # Sink_k during training
  config.probe.every = 100  # steps; 0: only before the first and after the last
  config.probe.sequences = 100
  config.probe.length = 64
  config.probe.epsilon = 0.3  # a head is a sink head above it
  config.probe.dtype = 'float32'  # the official implementation probes in bfloat16

  config.validation = ConfigDict()
  config.validation.every = 1_000  # steps; 0: only before the first and after the last
  config.validation.batches = 50  # at most, per validation set

  config.mesh = ConfigDict()
  config.mesh.data = -1  # devices that split the batch; -1: all that remain
  config.mesh.fsdp = 1  # devices that also split the parameters
  config.mesh.tensor = 1  # devices that split heads and hidden units, not the batch

  config.label = ConfigDict()  # where this config is from; sweeps, plans and reports read it
  config.label.trial = ''
  config.label.budget = ''
  config.label.protocol = ''

  config.lock()
  return config


def trial(trials: Trials, name: str, config: ConfigDict | None = None) -> ConfigDict:
  """The config of one trial of a table: the defaults with the trial's changes.

  Args:
    config: in place of the defaults; it is changed.

  Raises:
    ValueError: no trial is named, or an unknown one; lists the choices.
  """
  if not name:
    raise ValueError('Name a trial of the config file, as in --config=FILE:TRIAL. Choices: '
                     f'{", ".join(trials)}.')
  if name not in trials and ',' in name:
    raise ValueError(f'{name!r}: the trials of this file have neither budgets nor protocols.')
  check_known(name, trials, 'Unknown trial')
  config = config or get_config()
  config.update_from_flattened_dict({**trials[name], 'label.trial': name})
  return config
