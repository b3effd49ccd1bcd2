"""What a person can choose for the commands about models that exist, trained here or published."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import tyro

from sink_jax.analyses import options as analyses
from sink_jax.arguments import check_least
from sink_jax.cli.parser import CommandOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(CommandOptions):
  """What commands about one model have."""

  #: a published model: its folder, a name such as Pythia-160M, or 'owner/name' on the Hugging Face
  #: hub.
  checkpoint: str | None = None
  workdir: str | None = None  # folder of a training run instead.
  #: of activations, and of a published model's parameters.
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  fsdp: int = 1  # devices to split the parameters of a published model over.

  def __post_init__(self):
    if (self.checkpoint is None) == (self.workdir is None):
      raise ValueError('name a model: either --checkpoint or --workdir.')
    check_least(self, fsdp=1)
    if self.workdir is not None:
      self.unused('is for published models: a run is loaded onto one device.', 'fsdp')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(Model, analyses.InputOptions):
  """Probes a model for attention sinks: a run trained here, or a published model.

      python -m sink_jax evaluate --workdir=runs/quickstart/text-softmax
      python -m sink_jax evaluate --checkpoint=Pythia-160M

  A run is probed on the inputs stored with it, a published model on text, random tokens or one
  repeated token. Writes sink_report.json and pictures (importance per head, attention maps, norm
  ratios, and the training curves of a run).
  """

  #: folder of a run instead. All tokens that it stores are probed, in the dtype of its own probes,
  #: where --sequences, --length and --dtype do not say otherwise.
  workdir: str | None = None
  #: folder to write to. By default WORKDIR/evaluation, or evaluation-NAME in this folder for a
  #: published model.
  out: str | None = None
  epsilon: float | None = None  # threshold of the sink rate; by default the run's own, or 0.3.

  def __post_init__(self):
    Model.__post_init__(self)
    analyses.InputOptions.__post_init__(self)
    if self.epsilon is not None and not 0 < self.epsilon < 1:
      raise ValueError(f'--epsilon={self.epsilon:g}: importance lies between 0 and 1; the paper '
                       'uses 0.3.')
    given = self.given_of(analyses.InputOptions)
    if self.workdir is not None:
      self.unused('is for published models: a run is probed on the inputs stored with it. Other '
                  'inputs: python -m sink_jax analyses.',
                  *sorted(given.keys() - {'sequences', 'length', 'dtype'}))
    else:
      analyses.check_given(given, (*analyses.INPUTS, 'dtype', 'fsdp'),
                           'a probe of a published model', self.inputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(Model):
  """Continues a text, word after word, beyond the length that a model was trained on.

      python -m sink_jax generate --checkpoint=Pythia-160M --prompt='Once upon a time'

  The prompt is --prompt, --prompt_file, or what is piped in. With --cache_size a cache keeps the
  first tokens and the most recent ones (StreamingLLM), so that the text may become longer than
  anything the model was trained on.
  """

  prompt: str | None = None  # the text to continue.
  prompt_file: str | None = None  # a file with it, UTF-8.
  #: whether it begins with BOS: as the tokenizer does it, or the training of a run did; never;
  #: always.
  bos: Literal['tokenizer', 'none', 'force'] = 'tokenizer'
  length: int = 128  # tokens to generate.
  cache_size: int | None = None  # tokens that the cache keeps; by default all.
  sinks: int = 4  # how many of them are the first tokens of the text; 0 is a sliding window.
  #: what positions count: the tokens in the cache, or in the text.
  positions: Literal['cache', 'text'] = 'cache'
  temperature: float = 0.0  # 0: the most likely token. 1: a sample.
  top_k: int | None = None  # sample among so many most likely tokens; by default among all.
  #: sample among the fewest most likely tokens whose probabilities sum to it; by default all.
  top_p: float | None = None
  eos: bool = True  # whether the text ends with an end-of-text token of the tokenizer.
  seed: int = 0  # of the sampling.

  def __post_init__(self):
    super().__post_init__()
    check_least(self, length=1, cache_size=1, sinks=0, temperature=0, top_k=1, seed=0)
    if not self.temperature < math.inf:
      raise ValueError(f'--temperature={self.temperature:g}: write a number, such as 1.')
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f'--top_p={self.top_p:g} must be greater than 0 and at most 1.')
    if self.cache_size is not None and self.cache_size <= self.sinks:
      raise ValueError(f'--cache_size={self.cache_size} must be greater than --sinks={self.sinks}, '
                       'the first tokens among those that the cache keeps.')
    if self.seed >= 2**32:
      raise ValueError(f'--seed={self.seed} must be less than 2**32.')
    if self.prompt is not None and self.prompt_file is not None:
      raise ValueError('--prompt and --prompt_file exclude each other.')
    if self.cache_size is None:
      self.unused('is for a cache that does not keep all: add --cache_size.', 'sinks', 'positions')
    if not self.temperature:
      self.unused('is for sampling: add --temperature, such as 1.', 'top_k', 'top_p', 'seed')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analyses(analyses.Options, CommandOptions):
  """Carries out one analysis of published models, or of runs trained with sink_jax.

      python -m sink_jax analyses lengths --checkpoint=Pythia-14M,GPT2 --out=analyses

  It writes NAME.json and NAME.png, and replaces those of an earlier call. Of several models one
  that fails does not stop the others: NAME.json lists it as 'failed', and the exit code is 1.
  `python -m sink_jax analyses --list` names all analyses, with the defaults that are not those
  below.
  """

  name: tyro.conf.Positional[str] = ''  # of the analysis.
  list: bool = False  # print the names of the analyses and stop.
  #: published models: folders, names such as Pythia-14M, or 'owner/name' on the Hugging Face hub.
  checkpoint: tuple[str, ...] = ()
  workdir: tuple[str, ...] = ()  # runs trained with sink_jax.
  out: str | None = None  # folder to write to.
  layers: tuple[int, ...] | None = None  # blocks to look at, from 1, such as 1,3.
  heads: tuple[int, ...] | None = None  # heads to look at, from 1.

  def __post_init__(self):
    super().__post_init__()
    if not (self.name or self.list):
      raise ValueError('name one analysis, such as: python -m sink_jax analyses lengths '
                       '--checkpoint=Pythia-14M --out=analyses. --list names all.')
    if self.list:
      self.unused('is not used: --list names the analyses and stops.',
                  *sorted(self.given - {'list', 'name'}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmEval(Model, analyses.TaskOptions):
  """Carries out tasks of lm-evaluation-harness on one model, in JAX.

      python -m sink_jax lm_eval --checkpoint=Pythia-160M --tasks=lambada_openai --out=scores
      python -m sink_jax lm_eval --workdir=runs/text --tasks=mine.yaml --out=scores

  Log-likelihoods, rolling ones and generated texts. Prints the metrics with their standard errors,
  and writes them with the model, the options and the versions to OUT/lm_eval.json. Needs the extra
  `evaluation`, and no torch.
  """

  #: of lm-evaluation-harness: tasks, groups, patterns such as 'mmlu_*', or YAML files.
  tasks: tuple[str, ...] = ()
  include_path: str | None = None  # a folder with tasks and groups of your own.
  out: str | None = None  # folder to write to, a new or an empty one.

  def __post_init__(self):
    Model.__post_init__(self)
    analyses.TaskOptions.__post_init__(self)
