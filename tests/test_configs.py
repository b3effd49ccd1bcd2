"""Every trial of every config file builds, traces at full size, has the settings of its name."""

import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs import budget, paper
from sink_jax.data.token_edits import FixedToken, RandomTokens
from sink_jax.models.sizes import parameter_count, parameter_shapes
from sink_jax.models.transformer import Transformer
from sink_jax.sweep.trials import load_trials, read_config_file
from sink_jax.train.config import InitConfig, Label, NotExpressible, changed, differences

CONFIGS = Path(__file__).parents[1] / 'configs'
FILES = sorted(
  path
  for path in CONFIGS.glob('*.py')
  if path.stem not in {'__init__', 'base', 'budget', 'make_stdlib_chat'}
)


@functools.cache
def trials_of(path):
  return load_trials(path)


def of_paper(name, **options):
  return budget.experiment(paper.TRIALS, name, **options)


def test_names_are_unique_and_fit_a_folder():
  names = [name for path in FILES for name in trials_of(path)]
  assert len(names) == len(set(names))
  assert len(paper.TRIALS) == sum(map(len, paper.EXPERIMENTS.values()))
  assert all(re.fullmatch(r'[a-z0-9.-]+', name) for name in names)


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_every_trial_builds_and_carries_its_name(path):
  for name, trial in trials_of(path).items():
    assert trial.label.trial == name and trial.label.task
  contents = {
    dataclasses.replace(trial.experiment, label=Label()) for trial in trials_of(path).values()
  }
  assert len(contents) == len(trials_of(path))  # no two trials are the same run


def traced(model, length):
  """The shape of the final hidden states of two sequences."""
  tokens = jax.ShapeDtypeStruct((2, length), jnp.int32)
  if not model.vocab_size:
    tokens = jax.ShapeDtypeStruct((2, length, model.input_features), jnp.float32)
  apply = lambda params, x: Transformer(model).apply({'params': params}, x, method='hidden')[0]
  return jax.eval_shape(apply, parameter_shapes(model), tokens).shape


def kinds(part):
  """{(field, its value without numbers)} of a dataclass."""
  values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
  without_numbers = lambda value: re.sub(r'\d[\d.e-]*', '', repr(value))
  return {(name, without_numbers(value)) for name, value in values.items() if name != 'attention'}


def test_trials_trace_at_full_size():
  """Every trial that has a component, or another setting, of a kind that none before it has."""
  seen = set()
  for name, trial in (item for path in FILES for item in trials_of(path).items()):
    # A trial that begins with another run has the sizes of that run. Here it gets the sizes of its
    # budget.
    experiment = dataclasses.replace(trial.experiment, init=InitConfig())
    model, context = experiment.model_config(), experiment.data.context
    new = kinds(model) | kinds(model.attention)
    if not new <= seen:
      assert traced(model, context) == (2, context, model.d_model), name
      seen |= new


def counted(name, changes):
  """The number of parameters of a trial of the paper, from the sizes that the paper states."""
  d, layers, ffn, vocabulary = 768, 10, 1536, 50432
  if changes.get('model.size') == '1b':
    d, layers, ffn = 2048, 22, 5632
  heads = changes.get('model.heads', 16 if d == 2048 else 8)
  head = d // heads
  attention = 3 * d * d + (head * d if changes.get('model.combine_heads') == 'add' else d * d)
  matrices = 2 if changes.get('model.ffn') in ('relu', 'gelu', 'swish') else 3
  extra = {
    'kv-bias': 2 * d,
    'k-bias': d,
    'v-bias': d,
    'kv-bias-shared': 2 * head,
    'k-bias-shared': head,
  }.get(name, 0)
  if name.startswith('value-'):
    extra = d
  if name.startswith('learnable-dims-'):
    extra = heads * int(name.rpartition('-')[2])
  if name.startswith('mlp'):
    extra = 2 * head * head
  final_norm = 0 if name == 'post-norm' else d
  outside = {'sink-token': d, 'learned': 2048 * d}.get(name, 0)
  return (
    2 * vocabulary * d
    + layers * (attention + matrices * d * ffn + 2 * d + extra)
    + final_norm
    + outside
  )


def test_parameter_counts_follow_their_formula():
  for name, changes in paper.TRIALS.items():
    assert parameter_count(of_paper(name).model_config()) == counted(name, changes), name


def test_protocols_are_the_paper_s_and_the_release_s():
  said, released = of_paper('default'), of_paper('default', protocol='released')
  settings = lambda run: (run.optimizer.schedule, run.model.init, run.probe.dtype)
  assert settings(said) == ('cosine', 'tinyllama', 'float32')
  assert settings(released) == ('constant', 'torch_default', 'bfloat16')
  assert said.optimizer.final_fraction == 0.1
  assert (said.steps, said.batch_size, said.data.context) == (20_000, 512, 2048)
  update, probe = said.optimizer, said.probe
  assert (update.learning_rate, update.weight_decay, update.clip) == (4e-4, 0.1, 1.0)
  assert (update.warmup_steps, probe.sequences, probe.length, probe.epsilon) == (100, 100, 64, 0.3)
  edits = lambda *args, **options: of_paper(*args, **options).data.interventions
  assert edits('random-1-2', protocol='released') == (RandomTokens(last=2, below=50432),)
  assert edits('random-1-2') == (RandomTokens(last=2),)
  assert edits('fixed-2') == (FixedToken(position=2, token=1),)
  assert edits('random-1-2', protocol='released', budget='desk') == (RandomTokens(last=2),)


@pytest.mark.parametrize('name', budget.BUDGETS)
def test_budgets_keep_the_ratios_of_what_is_swept(name):
  at = functools.partial(of_paper, budget=name)
  default, short, long = at('default'), at('lr-8e-4-10k'), at('lr-1e-4-80k')
  assert short.steps * 2 == default.steps and long.steps == default.steps * 4
  assert at('lr-8e-4').optimizer.learning_rate == pytest.approx(2 * default.optimizer.learning_rate)
  assert at('batch-128').batch_size * 4 == default.batch_size
  assert at('weight-decay-0').optimizer.weight_decay == 0
  decay = default.optimizer.weight_decay
  assert at('weight-decay-1').optimizer.weight_decay == pytest.approx(10 * decay)
  assert at('window-1024').attention.mask.size / default.data.context == 1024 / 2048
  for trial, epochs in (('data-5b', 20_000 * 2**20 / 5e9), ('data-50m', 20_000 * 2**20 / 5e7)):
    data = at(trial)
    seen = data.steps * data.batch_size * data.data.context
    assert seen / data.data.max_tokens == pytest.approx(epochs, rel=0.01)


def test_grafts_share_a_source_and_a_control():
  trials = load_trials(CONFIGS / 'graft.py')
  inits = {name: trial.experiment.init for name, trial in trials.items()}
  assert {init.source for init in inits.values()} == {'SmolLM2-135M-Instruct'}
  controls = [name for name, init in inits.items() if not init.graft]
  assert controls == ['continued', 'random-continued']
  partial = {name for name, init in inits.items() if init.train == 'new'}
  assert partial == {'only-k-bias', 'only-kv-bias', 'only-sink-logit', 'only-gate'}


@pytest.mark.parametrize('name', budget.BUDGETS)
def test_remedies_have_the_length_of_the_budget_and_b2_of_the_task(name):
  trials = load_trials(CONFIGS / 'remedies.py', {'budget': name})
  of_text = {trial: found.experiment for trial, found in trials.items()}
  for trial, run in of_text.items():
    softmax = of_text[trial.partition('-')[0] + '-softmax']
    assert run.optimizer.rule.b2 == softmax.optimizer.rule.b2
  length = of_text['lm-softmax'].data.context
  assert of_text['lm-pseudo-mask'].attention.kv_bias.context == length
  assert of_text['lm-sink-logit-window'].attention.mask.size == length // 4
  assert of_text['lm-sigmoid-bias'].attention.similarity.bias == pytest.approx(-math.log(length))


def test_a_grid_tries_five_rates_at_the_product_of_the_paper():
  full, desk = of_paper('default'), of_paper('default', budget='desk')
  product = lambda run: run.optimizer.learning_rate * run.optimizer.weight_decay * run.steps
  tried = [trial.experiment for trial in load_trials(CONFIGS / 'grid.py').values()]
  assert [product(run) for run in (full, desk, *tried)] == pytest.approx([0.8] * 7)
  assert len({run.optimizer.learning_rate for run in tried}) == 5
  for run in (desk, *tried):
    assert run.optimizer.warmup_steps == full.optimizer.warmup_steps
    assert run.optimizer.clip == full.optimizer.clip
    assert (run.steps, run.batch_size, run.data.context) == (20_000, 16, 64)


def test_a_budget_says_what_it_cannot_express():
  for name in ('learnable-dims-64', 'heads-1', 'random-1-64'):
    with pytest.raises(NotExpressible):
      paper.get_config(name, 'desk')
  trials = load_trials(CONFIGS / 'paper.py', {'budget': 'desk'})
  assert trials['learnable-dims-64'].experiment is None
  for trial in ('learnable-dims-64', 'learnable-dims-1'):
    assert trials[trial].label == Label(trial, 'paper', 'desk', 'paper')
  with pytest.raises(ValueError, match="Unknown ExtraKeyValue 'KBais'") as error:
    budget.config({'mine': {'attention.kv_bias': 'KBais()'}}, 'mine', 'desk')
  assert not isinstance(error.value, NotExpressible)


@pytest.mark.parametrize(
  'argument, words',
  [
    ('default,budget=tiny', "Unknown budget 'tiny'.*desk"),
    ('default,protocol=mine', "Unknown protocol 'mine'.*released"),
    ('nothing', "Unknown trial 'nothing'.*lr-8e-4"),
    ('default,sed=1', "no option 'sed'.*budget, protocol"),
  ],
)
def test_bad_arguments_list_the_choices(argument, words):
  with pytest.raises(ValueError, match=words):
    read_config_file(f'{CONFIGS}/paper.py:{argument}', {})


def test_fine_tuning_begins_with_the_run_of_its_seed_and_takes_a_share_of_its_rate():
  trials = load_trials(CONFIGS / 'sft.py', {'budget': 'desk', 'protocol': 'answers'}, [1, 2])
  for kind, name in (('default', 'sft-softmax'), ('sigmoid', 'sft-sigmoid')):
    tuned, pretrained = trials[f'{name}-seed-2'].experiment, of_paper(kind, budget='desk')
    assert tuned.init.source == f'runs/desk/{kind}-seed-{{seed}}'
    assert tuned.data.source.answers_only and tuned.log_every == 1
    assert tuned.optimizer.learning_rate == pytest.approx(pretrained.optimizer.learning_rate / 20)
    tuned = changed(tuned, {'model.vocab_size': 512})
    assert tuned.model_config() == pretrained.model_config()
  unstable, softmax = (
    trials[f'{name}-seed-1'].experiment for name in ('sft-unstable', 'sft-softmax')
  )
  assert differences(unstable, softmax) == ['optimizer.learning_rate: 0.4 -> 0.0004']
  full = load_trials(CONFIGS / 'sft.py')['sft-softmax'].experiment
  assert full.model_config() == of_paper('1b-softmax').model_config()
