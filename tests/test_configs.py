"""Every trial of every config file: it builds, traces at full size, and is what it says."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base, budget, desk, paper, sft
from sink_jax.data.dataset import open_data
from sink_jax.data.sources import TextFolder
from sink_jax.data.token_edits import RandomTokens
from sink_jax.models.sizes import parameter_count, parameter_shapes
from sink_jax.models.transformer import Transformer
from sink_jax.paper.all_claims import trials_of as trials_of_claims
from sink_jax.paper.budgets import BUDGETS
from sink_jax.sweep.summary import cost_of
from sink_jax.sweep.trials import load_trials
from sink_jax.train.config import NotExpressible, differences, from_dict

CONFIGS = Path(__file__).parents[1] / 'configs'
NOT_TABLES = {'__init__', 'base', 'budget', 'desk', 'make_stdlib_chat'}  # desk: the paper's, at a budget of its own
FILES = sorted(path for path in CONFIGS.glob('*.py') if path.stem not in NOT_TABLES)


@functools.cache
def trials_of(path):
  return load_trials(path)


def of_paper(name, **options):
  text = ','.join([name, *(f'{key}={value}' for key, value in options.items())])
  return from_dict(paper.get_config(text).to_dict())


def test_names_are_unique_and_fit_a_folder():
  names = [name for path in FILES if path.stem != 'paper' for name in trials_of(path)]
  assert len(names) == len(set(names)) and len(names) > 150
  assert all(re.fullmatch(r'[a-z0-9.-]+', name) for name in names)  # they name folders
  assert set(paper.TRIALS) == {
      name for path in FILES
      if path.stem not in ('paper', 'quickstart', 'synthetic', 'emergence', 'baseline', 'remedies',
                           'graft', 'sft')
      for name in trials_of(path)}


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_every_trial_builds_and_carries_its_name(path):
  for name, trial in trials_of(path).items():
    assert trial.config['label']['trial'] == name
  contents = {json.dumps(trial.config | {'label': None}) for trial in trials_of(path).values()}
  assert len(contents) == len(trials_of(path))  # no two are the same run


@functools.cache
def traced(model, length):
  """Shape of the final hidden states of two sequences; equal models are traced once."""
  tokens = jax.ShapeDtypeStruct((2, length), jnp.int32) if model.vocab_size else (
      jax.ShapeDtypeStruct((2, length, model.input_features), jnp.float32))
  apply = lambda params, x: Transformer(model).apply({'params': params}, x, unembed=False)
  return jax.eval_shape(apply, parameter_shapes(model), tokens).shape


def model_of(config):
  # A trial that begins with another run has that one's sizes: here those of its budget.
  experiment = from_dict(config | {'init': base.get_config().to_dict()['init']})
  source = experiment.data.source
  vocabulary = getattr(source, 'vocab_size', None) or 50432
  return experiment, experiment.model_config(vocabulary)


@pytest.mark.full
@pytest.mark.parametrize('path', [path for path in FILES if path.stem != 'paper'],
                         ids=lambda path: path.stem)  # paper.py is the union of others
def test_every_trial_traces_at_full_size(path):
  for name, trial in trials_of(path).items():
    experiment, model = model_of(trial.config)
    context = experiment.data.context
    assert traced(model, context) == (2, context, model.d_model), name


def counted(name, changes):
  """Parameters of a trial of the paper, from the sizes that the paper states."""
  d, layers, ffn, vocabulary = 768, 10, 1536, 50432
  if changes.get('model.size') == '1b':
    d, layers, ffn = 2048, 22, 5632
  heads = changes.get('model.heads', 16 if d == 2048 else 8)
  head = d // heads
  attention = 3 * d * d + (head * d if changes.get('model.combine_heads') == 'add' else d * d)
  matrices = 2 if changes.get('model.ffn') in ('relu', 'gelu', 'swish') else 3
  extra = {'kv-bias': 2 * d, 'k-bias': d, 'v-bias': d, 'kv-bias-shared': 2 * head,
           'k-bias-shared': head}.get(name, 0)
  if name.startswith('value-'):
    extra = d
  if name.startswith('learnable-dims-'):
    extra = heads * int(name.rpartition('-')[2])
  if name.startswith('mlp'):
    extra = 2 * head * head
  final_norm = 0 if name == 'post-norm' else d
  outside = {'sink-token': d, 'learned': 2048 * d}.get(name, 0)
  return (2 * vocabulary * d + layers * (attention + matrices * d * ffn + 2 * d + extra)
          + final_norm + outside)


@pytest.mark.every(4)
@pytest.mark.parametrize('name', paper.TRIALS)
def test_parameter_count_follows_its_formula(name):
  model = of_paper(name).model_config(50432)
  assert parameter_count(model) == counted(name, paper.TRIALS[name])


def test_the_default_has_the_paper_s_sizes():
  model = of_paper('default').model_config(50432)
  assert parameter_count(model) == 136_462_080
  assert parameter_count(model, embeddings=False) == 58_998_528
  assert parameter_count(of_paper('1b-softmax').model_config(50432)) == 1_337_026_560


def test_protocols_are_the_paper_s_and_the_release_s():
  said, released = of_paper('default'), of_paper('default', protocol='released')
  assert (said.optimizer.schedule, said.optimizer.final_fraction, said.model.init,
          said.probe.dtype) == ('cosine', 0.1, 'tinyllama', 'float32')
  assert (released.optimizer.schedule, released.model.init, released.probe.dtype) == (
      'constant', 'torch_default', 'bfloat16')
  assert (said.steps, said.batch_size, said.data.context) == (20_000, 512, 2048)


def test_the_release_draws_random_tokens_below_its_padded_vocabulary():
  edits = lambda *args, **options: of_paper(*args, **options).data.interventions
  assert edits('random-1-2', protocol='released') == (RandomTokens(last=2, below=50432),)
  assert edits('random-1-2') == (RandomTokens(last=2),)
  # The smoke model has another vocabulary. The text of the config stays that of older runs.
  smoke = edits('random-1-2', protocol='released', budget='smoke')
  assert smoke == (RandomTokens(last=2),)
  fixed = paper.get_config('fixed-1,protocol=released').data.interventions
  assert fixed == 'FixedToken(position=1)'


@pytest.mark.parametrize('name', BUDGETS)
def test_budgets_keep_the_ratios_of_what_is_swept(name):
  at = functools.partial(of_paper, budget=name)
  default, short, long = at('default'), at('lr-8e-4-10k'), at('lr-1e-4-80k')
  assert short.steps * 2 == default.steps and long.steps == default.steps * 4
  assert at('lr-8e-4').optimizer.learning_rate == pytest.approx(
      2 * default.optimizer.learning_rate)
  assert at('batch-128').batch_size * 4 == default.batch_size
  assert at('weight-decay-0').optimizer.weight_decay == 0
  assert at('weight-decay-1').optimizer.weight_decay == pytest.approx(
      10 * default.optimizer.weight_decay)
  share = at('window-1024').attention.mask.size / default.data.context
  assert share == 1024 / 2048
  for trial, epochs in (('data-5b', 20_000 * 2**20 / 5e9), ('data-50m', 20_000 * 2**20 / 5e7)):
    data = at(trial)
    seen = data.steps * data.batch_size * data.data.context
    assert seen / data.data.max_tokens == pytest.approx(epochs, rel=0.01)


def test_desk_has_the_papers_trials_and_begins_with_the_claims_that_carry_the_paper():
  trials = load_trials(CONFIGS / 'desk.py')
  assert set(trials) == set(paper.TRIALS)
  assert list(trials)[:3] == ['default', 'sink-token', 'kv-bias']
  needed = trials_of_claims(desk.FIRST)
  assert list(trials)[:len(needed)] == needed
  default = from_dict(trials['default'].config)
  assert default.label.budget == 'desk' and default.steps == 4000
  smoke = desk.get_config('default,budget=smoke')
  assert smoke.label.budget == 'smoke' and smoke.steps == 1000
  # The setting of the search that was chosen: what a run of it is stays the same.
  chosen = from_dict(load_trials(CONFIGS / 'baseline.py')['bpe-2-softmax'].config)
  assert chosen.model_config(512) == default.model_config(512)
  for name in ('optimizer', 'steps', 'batch_size'):
    assert getattr(chosen, name) == getattr(default, name)
  assert chosen.data == default.data


def test_grafts_begin_with_the_default_run_and_take_its_steps():
  trials = load_trials(CONFIGS / 'graft.py', {'budget': 'desk'})
  default = paper.get_config('default,budget=desk').to_dict()
  continued = trials['continued'].config
  assert continued | {name: default[name] for name in ('init', 'label')} == default
  assert {trial.config['init']['source'] for trial in trials.values()} == {
      'runs/desk/default-seed-{seed}'}
  assert [name for name, trial in trials.items() if not trial.config['init']['graft']] == [
      'continued']
  # The source is recorded with the run, and no other budget.
  given = load_trials(CONFIGS / 'graft.py', {'budget': 'desk'}, [1], {'init.source': 'runs/mine'})
  config = given['graft-gate-seed-1'].config
  assert (config['init']['source'], config['label']['budget']) == ('runs/mine', 'desk')


def test_the_cost_of_a_run_whose_source_is_missing_names_the_option():
  config = load_trials(CONFIGS / 'graft.py', {'budget': 'desk'})['continued'].config
  sizes = dict.fromkeys(('layers', 'd_model', 'heads', 'ffn_hidden'))
  config = config | {'init': config['init'] | {'source': 'no/such/run'},
                     'model': config['model'] | sizes}
  with pytest.raises(ValueError, match="init.source = 'no/such/run' cannot be opened: .*a folder"):
    cost_of(config)


def test_a_budget_says_what_it_cannot_express():
  for name, words in (('learnable-dims-64', 'heads have 16'), ('heads-1', '0.5 of 4'),
                      ('random-1-64', '64 tokens'), ('weight-decay-10', '100%')):
    with pytest.raises(NotExpressible, match=words):
      paper.get_config(f'{name},budget=smoke')
  trials = load_trials(CONFIGS / 'learnable_dims.py', {'budget': 'smoke'})
  assert trials['learnable-dims-64'].config is None
  assert trials['learnable-dims-1'].config['label'] == {
      'trial': 'learnable-dims-1', 'budget': 'smoke', 'protocol': 'paper'}


def test_a_misspelt_component_is_an_error_at_a_budget_and_not_beyond_it():
  with pytest.raises(ValueError, match="Unknown ExtraKeyValue 'KBais'") as error:
    budget.config({'mine': {'attention.kv_bias': 'KBais()'}}, 'mine,budget=smoke')
  assert not isinstance(error.value, NotExpressible)


@pytest.mark.parametrize('argument, words', [
    ('default,budget=tiny', "Unknown budget 'tiny'.*smoke"),
    ('default,protocol=mine', "Unknown protocol 'mine'.*released"),
    ('nothing', "Unknown trial 'nothing'.*lr-8e-4"),
    ('default,sed=1', "Unknown option 'sed'")])
def test_bad_arguments_list_the_choices(argument, words):
  with pytest.raises(ValueError, match=words):
    budget.config(paper.TRIALS, argument)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """A corpus of letters: ids 99 and above, so that interventions stand out."""
  folder, random = tmp_path_factory.mktemp('text'), np.random.default_rng(0)
  for i in range(300):
    letters = random.integers(97, 123, 2000).astype(np.uint8)
    (folder / f'{i:03}.txt').write_bytes(letters.tobytes())
  return folder


def batches(text, name, count=3):
  """The first batches of a trial at the smoke budget, of another text."""
  config = paper.get_config(f'{name},budget=smoke')
  config.data.update(source=repr(TextFolder(path=str(text))), tokenizer='Bytes()', eos=False,
                     cache_dir=str(text.parent / 'cache'))
  experiment = from_dict(config.to_dict())
  stream = open_data(experiment.data).batches(0, experiment.batch_size, 0)
  return experiment, [next(stream) for _ in range(count)]


@pytest.mark.parametrize('name', [n for n in paper.TRIALS if n.startswith('fixed-')])
def test_fixed_tokens_are_in_the_batch(text, name):
  position = int(name[-1])
  for batch in batches(text, name)[1]:
    fixed = (np.asarray(batch.tokens) == 1).all(0)
    assert fixed.tolist() == [i == position - 1 for i in range(batch.tokens.shape[1])]
    assert ((np.asarray(batch.targets) == 1).all(0).tolist()
            == [i == position - 2 for i in range(batch.targets.shape[1])])


@pytest.mark.parametrize('name', ['random-1', 'random-2', 'random-1-2', 'random-1-4',
                                  'random-1-16'])
def test_random_tokens_are_in_the_batch(text, name):
  first, last = {'random-1': (1, 1), 'random-2': (2, 2)}.get(name) or map(
      int, name.split('-')[1:])
  tokens = np.concatenate([np.asarray(b.tokens) for b in batches(text, name, 12)[1]])
  letters = ((tokens >= 99) & (tokens < 125)).mean(0)  # 26 of 258 ids
  drawn = np.zeros(tokens.shape[1], bool)
  drawn[first - 1:last] = True
  assert (letters[~drawn] == 1).all() and (letters[drawn] < 0.3).all()
  assert tokens[:, drawn].max() > 200 and tokens[:, drawn].min() < 60  # of the whole vocabulary


@pytest.mark.parametrize('name', ['data-50m', 'data-500m'])
def test_data_amounts_limit_what_is_seen(text, name):
  experiment, seen = batches(text, name, 60)
  sequences = {row.tobytes() for batch in seen for row in np.asarray(batch.tokens)}
  allowed = experiment.data.max_tokens // (experiment.data.context + 1)
  assert len(sequences) == min(allowed, 60 * experiment.batch_size)
  if name == 'data-50m':
    assert allowed < 60 * experiment.batch_size  # the test sees them more than once


@pytest.mark.parametrize('name', [n for n in paper.TRIALS if n.startswith('batch-')])
def test_batch_sizes_are_in_the_batch(text, name):
  experiment, (batch,) = batches(text, name, 1)
  assert batch.tokens.shape == (int(name.split('-')[1]) // 32, 64)


def test_fine_tuning_begins_with_the_run_of_its_seed_and_takes_a_share_of_its_rate():
  trials = load_trials(CONFIGS / 'sft.py', {'budget': 'desk', 'protocol': 'answers'}, [1, 2])
  assert list(trials)[2:4] == ['sft-sigmoid-seed-1', 'sft-sigmoid-seed-2']
  for kind, name in (('default', 'sft-softmax'), ('sigmoid', 'sft-sigmoid')):
    config, pretrained = trials[f'{name}-seed-2'].config, from_dict(
        desk.get_config(kind).to_dict())
    assert config['init']['source'] == f'runs/desk/{kind}-seed-{{seed}}'
    assert config['data']['tokenizer'] == 'Bytes()'  # which stands for that of the source
    tuned = from_dict(config)
    assert tuned.data.source.answers_only and tuned.log_every == 1
    assert tuned.optimizer.learning_rate == pytest.approx(pretrained.optimizer.learning_rate / 20)
    assert tuned.model_config(512) == pretrained.model_config(512)
    assert (tuned.data.context, tuned.data.interventions, tuned.batch_size) == (
        pretrained.data.context, pretrained.data.interventions, pretrained.batch_size)
  unstable, softmax = (trials[f'{name}-seed-1'].config for name in ('sft-unstable', 'sft-softmax'))
  assert softmax['steps'] == 300 and softmax['optimizer']['warmup_steps'] == 30
  assert differences(unstable, softmax) == ['optimizer.learning_rate: 1.0 -> 0.001']
  full = from_dict(sft.get_config('sft-softmax').to_dict())
  assert full.model_config(50432) == of_paper('1b-softmax').model_config(50432)
  assert (full.batch_size, full.data.context, full.optimizer.learning_rate) == (64, 2048, 2e-5)
  assert full.optimizer.warmup_steps == 0.1 * full.steps and not full.data.source.answers_only
  with pytest.raises(ValueError, match="no budget 'tenth'.*full, desk, smoke"):
    sft.get_config('sft-softmax,budget=tenth')
