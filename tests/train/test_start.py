"""Training from a checkpoint: what it begins with, resumes with, and refuses."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import sink_jax as sj
from sink_jax.component import from_string
from sink_jax.data.tokenizer import Tokenizer
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained import source
from sink_jax.pretrained.export import export_workdir
from sink_jax.sweep.batched import run_batched
from sink_jax.sweep.cost import cost_of
from sink_jax.sweep.runner import run_trial
from sink_jax.sweep.trials import Trial
from sink_jax.train import distillation, loop
from sink_jax.train.checkpoint import saved_steps, step_folder
from sink_jax.train.config import from_dict
from sink_jax.train.metrics import read_metrics
from sink_jax.train.outcome import Interrupted
from sink_jax.train.placeholders import filled_in
from sink_jax.train.prepare import prepare_run
from sink_jax.train.workdir import read_config
from sink_jax.train.sharding import make_mesh, state_shardings
from sink_jax.train.start import parameter_paths, with_sizes
from tests.models.test_transformer import numpy_model
from tests.random_params import random_params
from tests.train import runs
from tests.train.test_loop import stop_after
from tests.train.test_step import batch, plain_cross_entropy, small_model

FIXTURES = Path(__file__).parents[1] / 'pretrained' / 'fixtures'
QUIET = dict(steps=4, checkpoint_every=2, probe__every=0, validation__every=0)


def go(config, workdir):
  return loop.train(config, workdir, show_progress=False, open_source=source.open_source)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """Changes of a config to a small text, in bytes."""
  folder = tmp_path_factory.mktemp('text')
  for i in range(20):
    (folder / f'{i}.txt').write_text(f'{i} a quick brown fox jumps over the lazy dog. ' * 8)
  return dict(data__source=f'TextFolder(path={str(folder)!r})', data__tokenizer='Bytes()',
              data__valid_fraction=0.2, data__cache_dir=str(folder / 'cache'))


@pytest.fixture(scope='module')
def first(text, tmp_path_factory):
  """The workdir of the run that others begin with."""
  workdir = tmp_path_factory.mktemp('first') / 'run'
  go(runs.config(**QUIET, **text), workdir)
  return workdir


def fine(first, text, **changes):
  """A run that begins with `first`, with all sizes of the model left to it."""
  sizes = dict.fromkeys(('model__d_model', 'model__ffn_hidden'))
  return runs.config(**QUIET | text | sizes | dict(
      seed=1, model__size='60m', init__source=str(first)) | changes)


@pytest.fixture(scope='module')
def whole(first, text, tmp_path_factory):
  """A run of four steps that is drawn to its source, in one go."""
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  return workdir, go(fine(first, text, init__distill=0.5, init__train='attention'), workdir)


def test_a_run_begins_where_its_source_ended(first, text, tmp_path):
  go(fine(first, text), tmp_path / 'run')
  last, begun = runs.rows(first, 'valid')[-1], runs.rows(tmp_path / 'run', 'valid')[0]
  assert (last['step'], begun['step']) == (4, 0)
  assert begun['valid'] == pytest.approx(last['valid'], rel=1e-6)
  saved = read_config(tmp_path / 'run')
  assert saved['init']['step'] == 4 and len(saved['init']['hash']) == 64
  assert saved['model'] | {'size': 'tiny'} == read_config(first)['model'] | dict(
      layers=2, heads=4, d_model=16, ffn_hidden=24)
  # Sweeps know the size, and so what a trial costs, before it begins.
  assert cost_of(fine(first, text)).parameters == sj.parameter_count(sj.load_run(first).config)
  # Killed before its first checkpoint it begins with its source again.
  shutil.rmtree(tmp_path / 'run' / 'checkpoints')
  rows = runs.rows(tmp_path / 'run')
  go(fine(first, text), tmp_path / 'run')
  assert runs.rows(tmp_path / 'run') == rows
  # The export of the source is another folder of the same parameters, here that of a seed.
  export_workdir(first, tmp_path / 'exported-1')
  go(fine(tmp_path / 'exported-{seed}', text), tmp_path / 'other')
  assert runs.rows(tmp_path / 'other') == runs.rows(tmp_path / 'run')
  init = read_config(tmp_path / 'other')['init']
  assert (init['step'], init['source']) == (None, str(tmp_path / 'exported-1'))
  # A run with a checkpoint goes on without its source.
  shutil.rmtree(tmp_path / 'exported-1')
  shutil.rmtree(tmp_path / 'other' / 'checkpoints' / '4')
  go(fine(tmp_path / 'exported-{seed}', text), tmp_path / 'other')
  assert runs.rows(tmp_path / 'other') == runs.rows(tmp_path / 'run')


def test_stopped_and_resumed_equals_in_one_go(whole, first, text, tmp_path, monkeypatch):
  config = fine(first, text, init__distill=0.5, init__train='attention')
  for step in (1, 3):
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
      stop_after(patch, step)
      go(config, tmp_path)
  go(config, tmp_path)
  assert runs.rows(tmp_path) == runs.rows(whole[0])
  jax.tree.map(np.testing.assert_array_equal, sj.load_run(tmp_path).params, whole[1].params)


@pytest.mark.full
def test_killed_at_random_and_resumed_equals_in_one_go(first, text, tmp_path):
  changes = QUIET | text | dict(seed=1, steps=300, checkpoint_every=10, init__source=str(first))
  whole = runs.start(tmp_path / 'whole', **changes)
  assert whole.wait() == 0, whole.communicate()
  rng = np.random.default_rng(0)
  for step in sorted(rng.integers(1, 200, 4)):
    process = runs.start(tmp_path / 'killed', **changes)
    runs.wait_for_step(tmp_path / 'killed', step, [process])
    time.sleep(rng.uniform(0, 0.2))
    process.kill()
    process.communicate()
    assert not (tmp_path / 'killed' / 'checkpoints' / '300').exists()
  last = runs.start(tmp_path / 'killed', **changes)
  assert last.wait() == 0, last.communicate()
  assert runs.rows(tmp_path / 'killed') == runs.rows(tmp_path / 'whole')
  params = (sj.load_run(tmp_path / name).params for name in ('killed', 'whole'))
  jax.tree.map(np.testing.assert_array_equal, *params)


def test_what_is_not_trained_stays_and_has_no_state(whole, first):
  before, after = sj.load_run(first).params, sj.load_run(whole[0]).params
  moved = {path for path, a, b in zip(
      parameter_paths(whole[1].config), jax.tree.leaves(before), jax.tree.leaves(after),
      strict=True) if np.any(a != b)}
  assert moved == {f'blocks/attention/{name}/kernel' for name in ('query', 'key', 'value', 'out')}
  saved = json.loads((step_folder(whole[0], 4) / 'state' / '_METADATA').read_text())
  moments = {name for name in saved['tree_metadata'] if "'mu'" in name}
  assert len(moments) == 4 and all("'attention'" in name for name in moments)
  rows = read_metrics(whole[0], 'train')
  assert abs(rows[0]['kl']) < 1e-7 < rows[-1]['kl']


def test_a_source_that_is_gone_or_changed_stops_a_run_that_needs_it(whole, first, text, tmp_path):
  copy, workdir = tmp_path / 'source', tmp_path / 'run'
  shutil.copytree(first, copy)
  shutil.copytree(whole[0], workdir)
  shutil.rmtree(step_folder(workdir, 4))
  config = json.loads((workdir / 'config.json').read_text())
  was = config['init']['hash']
  config['init']['source'] = str(copy)
  (workdir / 'config.json').write_text(json.dumps(config))
  again = fine(copy, text, init__distill=0.5, init__train='attention')
  file = next(path for path in (step_folder(copy, 4)).rglob('*') if path.parent.name == 'd')
  file.write_bytes(file.read_bytes()[:-1] + b'?')
  now = source.open_source(str(copy), 4).digest()
  with pytest.raises(ValueError, match=f'init.step = 3: the run .*{copy}.* has no such .* 2, 4'):
    source.open_source(str(copy), 3)
  with pytest.raises(ValueError, match=f'{copy}.*{was} at step 4.*{now} at step 4'):
    go(again, workdir)
  shutil.rmtree(copy)
  with pytest.raises(ValueError, match=f'{copy}.*{was}.*cannot be opened'):
    go(again, workdir)
  assert saved_steps(workdir) == [2]


@pytest.mark.parametrize('changes, words', [
    (dict(model__ffn='gelu', model__d_model=32, attention__position='Alibi()'),
     r"model.d_model: 32 in the config, 16 .*model.ffn: 'gelu' in the config, 'swiglu'"
     r'.*attention.position: Alibi.*--config.model.d_model=16 --config.model.ffn=swiglu'),
    (dict(model__vocab_size=300), 'model.vocab_size: 300 in the config, 258 in the source'),
    (dict(model__tied=True), 'model.tied: True in the config, False in the source'),
    (dict(model__pattern='Layer(mask=Window(size=4)); Layer()'), 'model.pattern'),
    (dict(data__tokenizer='TrainedBpe(vocab_size=258)'), 'another tokenizer'),
    (dict(data__tokenizer='TrainedBpe(vocab_size=270)'), '258 tokens, and the data have 2'),
    (dict(init__train='new'), "train = 'new'.*nothing would be trained"),
    (dict(init__source='not/a/model/here'), "init.source = 'not/a/model/here' cannot be opened: "
     '.*neither a folder nor a known model'),
    (dict(init__hash='0' * 64), 'has changed: .*0000'),
    (dict(init__source='runs/{name}'), r"init.source = 'runs/\{name\}': \{name\} .*\{seed\}\."),
    (dict(data__tokenizer="HuggingFace(path='{}')"), r'data.tokenizer = .*\{seed\}, \{source\}\.'),
    (dict(init__keep='state'), 'init.keep.*choices: params'),
    (dict(init__train='norms'), 'init.train.*choices: all, new, attention'),
    (dict(init__distill=-1.0), 'init.distill must be >= 0'),
    (dict(init__source='', init__distill=1.0), 'init.distill.*name it by init.source')], ids=str)
def test_what_is_refused(first, text, tmp_path, changes, words):
  with pytest.raises(ValueError, match=f'(?s){words}'):
    go(fine(first, text, **changes), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_the_tokenizer_is_that_of_the_source(text, tmp_path):
  first = tmp_path / 'first'
  go(runs.config(**QUIET | text | dict(data__tokenizer='TrainedBpe(vocab_size=270)')), first)
  export_workdir(first, tmp_path / 'exported')
  for folder in (first, tmp_path / 'exported'):
    of_source = f'HuggingFace(path={str(folder)!r})'
    spelled = filled_in(fine(folder, text, data__tokenizer="HuggingFace(path='{source}')"))
    assert filled_in(fine(folder, text))['data'] == spelled['data']
    assert from_dict(spelled).data.tokenizer == from_string(Tokenizer, of_source)
    go(fine(folder, text), tmp_path / f'from-{folder.name}')
    last, begun = runs.rows(first, 'valid')[-1], runs.rows(tmp_path / f'from-{folder.name}', 'valid')[0]
    assert begun['valid'] == pytest.approx(last['valid'], rel=1e-6)


def test_what_is_refused_before_the_data_are_opened(first, text, tmp_path):
  other = tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0, '</s>': 1}, 'a'))
  other.add_special_tokens(['</s>'])
  other.save(str(tmp_path / 'tokenizer.json'))
  for changes, words in (
      (dict(data__source='BigramBackcopy(length=16)'), 'a model of text, and the data are a task'),
      (dict(data__tokenizer=f'HuggingFace(path={str(tmp_path)!r})'), 'another tokenizer')):
    with pytest.raises(ValueError, match=words):
      prepare_run(fine(first, text, **changes), tmp_path / 'run', lambda _: pytest.fail('opened'),
                  source.open_source)


def as_imported(there, **changes):
  """A config whose keys are those of a source where a config has them by default."""
  config = runs.config(init__source=there.name, model__d_model=None, model__ffn_hidden=None,
                       **changes)
  for key in ('ffn', 'norm', 'norm_eps', 'norm_location'):
    config['model'][key] = getattr(there.model, key)
  for field in dataclasses.fields(there.model.attention):
    config['attention'][field.name] = repr(getattr(there.model.attention, field.name))
  return config


@pytest.mark.parametrize('folder', [f.name for f in sorted(FIXTURES.iterdir())])
def test_every_family_is_a_config(folder):
  there = source.open_source(str(FIXTURES / folder))
  config = as_imported(there)
  filled = json.loads(json.dumps(with_sizes(config, there, 'x')))
  model = from_dict(filled).model_config()
  assert dataclasses.replace(model, dtype='bfloat16') == there.model


@pytest.mark.full
@pytest.mark.parametrize('case', ['gpt_oss', 'gemma2', 'olmo2'])
def test_an_imported_model_is_trained(case, tmp_path):
  """Windows, experts, sinks, biases, caps and norms of whole projections; in part bfloat16."""
  there = source.open_source(str(FIXTURES / case))
  run = go(as_imported(there, init__train='attention', **QUIET | dict(steps=1)), tmp_path)
  before = sj.load_pretrained(FIXTURES / case).params
  moved = {path for path, a, b in zip(parameter_paths(run.config), jax.tree.leaves(before),
                                      jax.tree.leaves(run.params), strict=True) if np.any(a != b)}
  assert moved == {path for path in parameter_paths(run.config) if '/attention/' in path}
  assert {x.dtype for x in jax.tree.leaves(run.params)} == {np.dtype(np.float32)}
  assert sj.load_run(tmp_path).config == run.config


def assert_close(workdir, other):
  """The training rows of two runs that are computed in another order."""
  rows, others = runs.rows(workdir, 'train'), runs.rows(other, 'train')
  numbers = lambda row: {key: x for key, x in row.items() if key != 'kind'}
  for here, there in zip(rows, others, strict=True):
    assert numbers(here) == pytest.approx(numbers(there), rel=1e-5, abs=1e-7)


@pytest.mark.full
def test_eight_devices_begin_as_one_does(whole, first, text, tmp_path):
  changes = {key.replace('__', '.'): value for key, value in (QUIET | text).items()} | {
      'init.source': str(first), 'init.distill': 0.5, 'init.train': 'attention', 'seed': 1,
      'mesh.fsdp': 2, 'mesh.tensor': 2}
  process = runs.start(tmp_path / 'run', devices=8, **changes)
  assert process.wait(300) == 0, process.communicate()
  assert_close(tmp_path / 'run', whole[0])


@pytest.mark.full
def test_a_group_begins_with_a_source(first, text, tmp_path):
  named = lambda distill: {str(seed): Trial(str(seed), fine(
      first, text, seed=seed, init__train='attention', init__distill=distill)) for seed in (0, 1)}
  done = dict.fromkeys('01', 'done')
  assert dict(run_batched(named(0.0), tmp_path / 'group')) == done
  assert run_trial(named(0.0)['1'], tmp_path / 'alone') == 'done'
  assert_close(tmp_path / 'group' / '1', tmp_path / 'alone' / '1')
  assert dict(run_batched(named(1.0), tmp_path / 'distilled')) == done  # one after the other
  assert not list((tmp_path / 'distilled').glob('*.group.json'))


def test_parameters_lie_as_those_of_a_checkpoint(first):
  mesh = make_mesh()
  for name in (str(first), str(FIXTURES / 'opt')):
    there = source.open_source(name)
    params = there.read(mesh)
    wanted = state_shardings(mesh, parameter_shapes(there.model))
    assert jax.tree.map(lambda x: x.sharding, params) == wanted


def test_the_objective_of_distillation():
  nope = dict(attention=sj.AttentionSpec(position=sj.Nope()))
  config = small_model(**nope, layers=1, tied=True, logit_cap=1.5)
  other = small_model(**nope, layers=1, d_model=8, logit_cap=2.5)
  params, source_params, data = random_params(config), random_params(other, 1), batch(2, 7)
  settings = distillation.Distillation(0.7, other)
  # 2 models x 2 sequences x 11 logits x 3 positions at a time, of 7
  f = lambda p: distillation.distilled_loss(config, p, settings, source_params, data, data.weights,
                                            132)
  (value, parts), grads = jax.jit(jax.value_and_grad(f, has_aux=True))(params)

  logs = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))
  p, q = (logs(numpy_model(*model, data.tokens)) for model in
          ((config, params), (other, source_params)))
  kl = np.sum((np.exp(q) * (q - p)).sum(-1) * data.weights)
  loss = -np.sum(np.take_along_axis(p, data.targets[..., None], -1)[..., 0] * data.weights)
  np.testing.assert_allclose([value, parts['loss'], parts['kl']], [loss + 0.7 * kl, loss, kl],
                             rtol=1e-5)

  def dense(p):
    logits, wanted = sj.Run(config, p).logits(data.tokens), jax.nn.log_softmax(
        sj.Run(other, source_params).logits(data.tokens))
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - jax.nn.log_softmax(logits)), -1)
    return plain_cross_entropy(logits, jnp.eye(11), data.targets, data.weights) + 0.7 * jnp.sum(
        divergence * data.weights)

  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(b).max()),
               grads, jax.jit(jax.grad(dense))(params))


def test_distillation_keeps_no_logits_of_all_positions():
  h, kernel, all_logits = jnp.zeros((4, 512, 8)), jnp.zeros((8, 8192)), 4 * 512 * 8192
  f = lambda h, kernel, most: distillation.distilled_cross_entropy(
      h, kernel, h, kernel, jnp.zeros((4, 512), jnp.int32), jnp.ones((4, 512)), 1.0, most)[0]
  size = lambda most: jax.jit(jax.grad(f, (0, 1)), static_argnums=2).lower(
      h, kernel, most).compile().memory_analysis().temp_size_in_bytes
  assert size(2**19) < 4 * all_logits < size(2**30)  # the second has logits of all positions
