"""Runs from the outside: resuming, stopping, diverging, refusing."""

import errno
import fcntl
import json
import resource
import shutil
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import sink_jax as sj
from sink_jax.data.dataset import open_data
from sink_jax.models.sharding import make_mesh
from sink_jax.train import checkpoint, evaluation, loop, prepare
from sink_jax.train.checkpoint import CheckpointError, Checkpoints, saved_steps, step_folder, verify
from sink_jax.train.config import from_dict
from sink_jax.train.loop import train
from sink_jax.train.evaluation import Diverged
from sink_jax.train.memory import memory
from sink_jax.train.metrics import read_metrics
from sink_jax.train.multihost import Interrupted, Unsaved
from sink_jax.train.optimizer import learning_rate
from sink_jax.train.step import init_state, make_train_step
from sink_jax.train.workdir import Workdir, WorkdirLocked, read_config, read_status
from tests.random_params import next_token_losses
from tests.train import runs


def go(config, workdir):
  return train(config, workdir, show_progress=False)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The small run without a stop. Tests copy it before they change it."""
  workdir = tmp_path_factory.mktemp('whole')
  run = go(runs.config(), workdir)
  return workdir, run


@pytest.fixture
def workdir(whole, tmp_path):
  """A copy of the small run, to be changed."""
  return shutil.copytree(whole[0], tmp_path / 'copy')


def assert_same_run(workdir, whole):
  other, run = whole
  assert runs.rows(workdir) == runs.rows(other)
  ours, theirs = sj.load_run(workdir), sj.load_run(other)
  assert ours.step == theirs.step == 8
  for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_run_is_a_loop_over_steps_and_leaves_a_full_record(whole):
  workdir, run = whole
  kinds = [(row['kind'], row['step']) for row in runs.rows(workdir)]
  assert [s for k, s in kinds if k == 'train'] == list(range(1, 9))
  assert [s for k, s in kinds if k == 'probe'] == [0, 4, 8]
  assert [s for k, s in kinds if k == 'valid'] == [0, 4, 8]
  status = read_status(workdir)
  assert status['status'] == 'done' and status['step'] == 8 and status['jax'] == jax.__version__
  assert saved_steps(workdir) == [8, 4]
  assert verify(workdir, 8) is None and (workdir / 'checksums' / '8.0.json').exists()
  assert list((workdir / 'tensorboard').iterdir())
  losses = [row['loss'] for row in runs.rows(workdir, 'train')]
  assert losses[-1] < losses[0]
  loaded = sj.load_run(workdir)
  assert loaded.config == run.config
  np.testing.assert_array_equal(loaded.logits(run.probe_tokens), run.logits(run.probe_tokens))
  measured = sj.probe(loaded, loaded.probe_tokens).summary()['largest_importance']
  assert measured == pytest.approx(runs.rows(workdir, 'probe')[-1]['largest_importance'])
  # Training equals this loop over steps.
  experiment = runs.config()
  data, mesh, settings = open_data(experiment.data), make_mesh(), experiment.optimizer
  update = make_train_step(run.config, settings, mesh)
  state = init_state(run.config, settings, experiment.seed, mesh)
  for step in range(8):
    batch = data.batch(step, experiment.batch_size, experiment.seed)
    state, _ = update(state, batch, learning_rate(settings, 8, step))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, run.params)


def test_probes_and_gradients_have_the_dtype_of_the_config(whole, tmp_path):
  go(runs.config(steps=1, probe__dtype='bfloat16', gradient_dtype='bfloat16'), tmp_path)
  for kind, key in (('probe', 'largest_importance'), ('train', 'grad_norm')):
    ours, exact = (runs.rows(workdir, kind)[0][key] for workdir in (tmp_path, whole[0]))
    # Rounded to 8 bits, 2^-9 each; errors of a dozen of roundings in the probe.
    assert ours != exact and ours == pytest.approx(exact, rel=0.02)


def stop_after(monkeypatch, step):
  """Sends SIGTERM to this process during an update."""
  make_train_step = loop.make_train_step

  def make(*args, **options):
    update = make_train_step(*args, **options)

    def update_and_stop(state, *inputs):
      if int(state.step) + 1 == step:
        signal.raise_signal(signal.SIGTERM)
      return update(state, *inputs)

    return update_and_stop

  monkeypatch.setattr(loop, 'make_train_step', make)


QUIET = dict(probe__every=0, validation__every=0)
RESUMED = {
  'as it is': {},
  'with rotations': QUIET | dict(optimizer__rule='OrthoAdam(longest=16)'),
  'of a part': QUIET | dict(init__source='WHOLE', init__train='attention'),
}


@pytest.mark.parametrize('changes', RESUMED.values(), ids=RESUMED)
def test_stopped_and_resumed_equals_in_one_go(changes, whole, tmp_path, monkeypatch):
  workdir = tmp_path / 'stopped'
  if 'init__source' in changes:
    changes = changes | dict(init__source=str(whole[0]))
  config = runs.config(**changes)
  if changes:
    whole = tmp_path / 'whole', go(config, tmp_path / 'whole')
  for step in (6, 7):  # between two checkpoints, then right after resuming
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match='same command resumes'):
      stop_after(patch, step)
      go(config, workdir)
    status = read_status(workdir)
    assert (status['status'], status['step']) == ('interrupted', step)
  go(config, workdir)
  assert_same_run(workdir, whole)


def test_a_workdir_of_another_config_is_refused_and_kept(whole, workdir, monkeypatch):
  before = (workdir / 'status.json').read_bytes()
  go(runs.config(), workdir)  # a finished run is not changed
  assert (workdir / 'status.json').read_bytes() == before
  # Cadences and paths may change.
  go(runs.config(log_every=3, checkpoint_every=2, data__cache_dir='elsewhere'), workdir)
  monkeypatch.setattr(prepare, 'open_data', lambda config: pytest.fail('the data were opened'))
  other = runs.config(optimizer__learning_rate=1e-3, model__d_model=None)
  with pytest.raises(ValueError) as error:
    go(other, workdir)
  for line in ('learning_rate: 0.01 -> 0.001', 'model.d_model: 16 -> None', '--workdir'):
    assert line in str(error.value)
  assert_same_run(workdir, whole)
  (workdir / 'config.json').unlink()
  with pytest.raises(ValueError, match='its config.json is missing'):
    go(runs.config(optimizer__learning_rate=0.5), workdir)
  with pytest.raises(ValueError, match='Cannot use .*owner/run as a workdir'):
    go(runs.config(), workdir / 'owner' / 'run')
  assert saved_steps(workdir) == [8, 4] and not (workdir / 'config.json').exists()


def damage(folder, how):
  arrays = max((p for p in folder.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
  if how == 'flipped bit':
    data = bytearray(arrays.read_bytes())
    data[len(data) // 2] ^= 1
    arrays.write_bytes(bytes(data))
  elif how == 'missing file':
    arrays.unlink()
  else:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize('how', ['missing file', 'empty folder'])
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(whole, workdir, how, caplog):
  damage(step_folder(workdir, 8), how)
  assert sj.load_run(workdir).step == 4
  assert 'checkpoint 8 is damaged' in caplog.text
  caplog.clear()
  go(runs.config(), workdir)
  assert 'checkpoint 8 is damaged' in caplog.text and 'resuming from step 4' in caplog.text
  assert (workdir / 'damaged' / '8').is_dir()
  assert_same_run(workdir, whole)


def test_all_checkpoints_damaged_starts_again(whole, workdir, caplog):
  for step in (4, 8):
    damage(step_folder(workdir, step), 'flipped bit')
  with pytest.raises(RuntimeError, match='No usable checkpoint'):
    sj.load_run(workdir)
  go(runs.config(), workdir)
  assert 'checkpoint 4 is damaged' in caplog.text and 'resuming' not in caplog.text
  assert_same_run(workdir, whole)


def test_a_saved_parameter_that_is_not_finite_is_named(workdir):
  checkpoints = Checkpoints(workdir)
  checkpoints.save(9, {'params': jax.tree.map(lambda x: x * np.nan, sj.load_run(workdir).params)})
  checkpoints.close()
  with pytest.raises(
    ValueError, match='at step 9 the parameter .* is not finite: remove checkpoints/9'
  ):
    sj.load_run(workdir)


def test_too_little_memory_is_not_damage(whole, workdir, monkeypatch):
  def restore(*_, **__):
    raise MemoryError

  with monkeypatch.context() as patch, pytest.raises(MemoryError):
    patch.setattr(ocp.PyTreeCheckpointHandler, 'restore', restore)
    go(runs.config(), workdir)
  assert saved_steps(workdir) == [8, 4] and not (workdir / 'damaged').exists()


def test_a_run_that_was_killed_before_its_status_has_its_last_numbers(whole, workdir):
  before = read_status(workdir)
  (workdir / 'status.json').write_text('{"status": "running"}')
  go(runs.config(), workdir)
  after = read_status(workdir)
  for key in ('status', 'sink_1', 'valid'):
    assert after[key] == before[key]
  assert_same_run(workdir, whole)


def test_a_validation_set_in_which_no_token_counts_is_left_out(tmp_path):
  go(runs.config(data__source='BigramBackcopy(length=16, boost=0.0)', steps=1), tmp_path)
  assert 'backcopy' not in runs.rows(tmp_path, 'valid')[-1]


DIVERGING = dict(
  QUIET,
  optimizer__learning_rate=1e6,
  optimizer__rule='Sgd()',
  optimizer__clip=0.0,
  optimizer__warmup_steps=0,
  steps=60,
  checkpoint_every=1,
  model__norm='none',
)


def test_divergence_is_recorded_and_the_last_good_checkpoint_is_on_the_disk(tmp_path):
  process = runs.start(tmp_path, **DIVERGING)
  _, error = process.communicate(timeout=120)
  assert process.returncode == 1 and 'diverged' in error and 'Traceback' not in error
  assert 'attention: ' not in error and 'WARNING' not in error
  status = read_status(tmp_path)
  assert status['status'] == 'diverged' and status['step'] > 1
  assert status['last_good_checkpoint'] == status['step'] - 1 == sj.load_run(tmp_path).step
  losses = [row['loss'] for row in runs.rows(tmp_path, 'train')]
  assert np.isfinite(losses).all() and len(losses) == status['step'] - 1


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(optimizer__learning_rate=3e38), ''),  # the loss of step 1 is finite, but not its update
    (dict(optimizer__learning_rate=3e38, checkpoint_every=0, probe__every=1), 'its loss is'),
    (
      dict(optimizer__learning_rate=1e30, checkpoint_every=0, probe__every=1),
      'its parameters are, so activations overflow',
    ),
  ],
)
def test_parameters_that_are_not_finite_are_neither_saved_nor_probed(tmp_path, changes, words):
  with pytest.raises(Diverged, match=f'Step 1 diverged: .*{words}'):
    go(runs.config(**DIVERGING | changes, optimizer__weight_decay=10.0), tmp_path)
  assert saved_steps(tmp_path) == []
  assert {row['step'] for row in runs.rows(tmp_path, 'probe')} <= {0}
  assert read_status(tmp_path)['status'] == 'diverged'


def test_a_run_does_not_go_on_with_other_data(tmp_path):
  corpus = tmp_path / 'corpus'
  corpus.mkdir()
  write = lambda word: [(corpus / f'{i}.txt').write_text(f'{word} {i} ' * 40) for i in range(30)]
  config = runs.config(
    data__source=f'TextFolder(path={str(corpus)!r})',
    steps=2,
    data__cache_dir=str(tmp_path / 'cache'),
    data__valid_fraction=0.3,
  )
  write('some')
  go(config, tmp_path / 'run')
  probe_tokens = (tmp_path / 'run' / 'probe_tokens.npy').read_bytes()
  write('some')  # the same text with other file times is not a change
  go(config, tmp_path / 'run')
  write('other')
  with pytest.raises(ValueError, match='the content of the data'):
    go(config, tmp_path / 'run')
  assert (tmp_path / 'run' / 'probe_tokens.npy').read_bytes() == probe_tokens


@pytest.mark.parametrize(
  'place, name', [(loop, 'state_layout'), (evaluation.Evaluation, '__call__')]
)
def test_a_stop_before_the_first_step_compiles_no_step(tmp_path, monkeypatch, place, name):
  original = getattr(place, name)

  def stopped(*arguments, **options):
    signal.raise_signal(signal.SIGTERM)
    return original(*arguments, **options)

  monkeypatch.setattr(place, name, stopped)
  monkeypatch.setattr(loop, 'make_train_step', lambda *_, **__: lambda *_: pytest.fail('compiled'))
  with pytest.raises(Interrupted, match='at step 0 of 8'):
    go(runs.config(), tmp_path)
  assert read_status(tmp_path)['status'] == 'interrupted'


def test_a_stored_config_is_read_once(workdir, monkeypatch):
  read = []
  monkeypatch.setattr('sink_jax.train.workdir.from_dict', lambda c: read.append(c) or from_dict(c))
  shutil.rmtree(workdir / 'checkpoints' / '8')
  go(runs.config(), workdir)
  assert len(read) == 1


def test_two_processes_cannot_train_in_one_workdir(tmp_path, monkeypatch):
  monkeypatch.setattr('sink_jax.train.workdir._PATIENCE', 1)
  process = runs.start(tmp_path, steps=100000)
  try:
    runs.wait_for((tmp_path / 'metrics.jsonl').exists, process)
    with pytest.raises(ValueError, match=f'Another process .*process {process.pid}'):
      go(runs.config(steps=100000), tmp_path)
  finally:
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
  'name, change, words',
  [
    ('config.json', lambda text: text[:99], 'config.json is damaged'),
    ('probe_tokens.npy', lambda text: text[:6], 'probe_tokens.npy is damaged'),
    (
      'config.json',
      lambda text: text.replace(b'"layers": null', b'"layers": 2.0'),
      'model.layers = 2.0 must be int',
    ),
  ],
)
def test_a_damaged_file_is_named_before_anything_is_made(workdir, name, change, words):
  (workdir / name).write_bytes(change((workdir / name).read_bytes()))
  with pytest.raises(ValueError, match=words):
    sj.load_run(workdir)
  assert saved_steps(workdir) == [8, 4]


@pytest.mark.parametrize(
  'name, content',
  [
    ('status.json', b'\xff\xfe'),
    ('metrics.jsonl', b'\xff[1]\n{"kind'),
    ('checksums/8.0.json', b''),
    ('data.json', b'{'),
    ('checkpoints/00009/file', b'x'),
  ],
)
def test_damage_that_matters_little_stops_nothing(workdir, name, content):
  (workdir / name).parent.mkdir(exist_ok=True)
  (workdir / name).write_bytes(content)
  go(runs.config(), workdir)
  assert sj.load_run(workdir).step == 8


NO_DATA = dict(data__source='Stdlib()')


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(data__source="TextFolder(path='no/such/folder')"), 'no/such/folder'),
    (dict(data__context=17), 'length'),
    (dict(model__vocab_size=10), 'raise model.vocab_size'),
    # Checks without data come before data are opened.
    (dict(NO_DATA, model__d_model=12), 'even head dimension'),
    (dict(NO_DATA, model__implementation='splash'), 'needs a TPU'),
    (dict(NO_DATA, attention__position='Learned(max_length=8)'), 'max_length'),
    (dict(NO_DATA, mesh__fsdp=5), 'do not fit'),
    (dict(NO_DATA, wandb='sinks'), 'pip install wandb'),
  ],
)
def test_bad_configs_are_refused_before_anything_is_written(tmp_path, monkeypatch, changes, words):
  config = runs.config(**changes)
  if NO_DATA.items() <= changes.items():
    monkeypatch.setattr(prepare, 'open_data', lambda config: pytest.fail('the data were opened'))
  with pytest.raises(ValueError, match=words):
    go(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_the_loss_of_answers_alone_is_their_weighted_mean(tmp_path):
  with open(tmp_path / 'talks.jsonl', 'w') as file:
    for i in range(200):
      question = {'role': 'user', 'content': f'What is {i} + {i}?' * (1 + i % 7)}
      answer = {'role': 'assistant', 'content': f'{2 * i}. ' * (1 + i % 11)}
      file.write(json.dumps({'messages': [question, answer]}) + '\n')
  config = runs.config(
    steps=2,
    data__valid_fraction=0.3,
    validation__batches=3,
    data__source=f"ChatJsonl(path='{tmp_path}/talks.jsonl', loss='answers')",
    optimizer__learning_rate=1e-30,  # float32 parameters do not change: one model has all losses
  )
  run = go(config, tmp_path)
  data = open_data(from_dict(read_config(tmp_path)).data)

  def mean(batches):
    total = weight = 0.0
    for batch in batches:
      row = np.hstack([batch.tokens, batch.targets[:, -1:]])
      total += (batch.weights * next_token_losses(run.logits(batch.tokens), row)).sum()
      weight += batch.weights.sum()
    assert 0 < weight < sum(batch.weights.size for batch in batches)
    return total / weight

  for step, row in enumerate(runs.rows(tmp_path, 'train')):
    # Logits are in float32, and sums are over a few hundred tokens: 1e-6.
    assert row['loss'] == pytest.approx(mean([data.batch(step, 8, 0)]), rel=1e-6)
  valid = runs.rows(tmp_path, 'valid')[-1]['valid']
  assert valid == pytest.approx(mean(data.validation(8, 3)['valid']), rel=1e-6)


def test_squared_errors_of_continuous_targets_train_too(tmp_path):
  small = dict(model__layers=1, model__heads=1, model__ffn='none', steps=3)
  task = dict(data__source='TriggerAveraging()', probe__every=3, validation__every=3)
  run = go(runs.config(**small, **task), tmp_path)
  assert np.isfinite([row['loss'] for row in runs.rows(tmp_path, 'train')]).all()
  assert sj.load_run(tmp_path).config == run.config and not run.config.vocab_size


def test_a_step_that_is_saved_again_is_not_judged_by_its_old_checksums(workdir, caplog):
  damage(step_folder(workdir, 8), 'flipped bit')
  with pytest.MonkeyPatch.context() as patch:  # killed between the commit and the checksums
    patch.setattr(checkpoint, '_hash', lambda *_: None)
    go(runs.config(), workdir)
  assert saved_steps(workdir) == [8, 4] and not (workdir / 'checksums' / '8.0.json').exists()
  caplog.clear()
  assert sj.load_run(workdir).step == 8 and 'damaged' not in caplog.text


# The failure cancels coroutines of the writer, about which asyncio warns.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_save_that_fails_in_the_background_is_named_and_the_run_resumes(
  whole, tmp_path, monkeypatch
):
  limit, save = resource.getrlimit(resource.RLIMIT_FSIZE), Checkpoints.save

  def full(self, step, state):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limit[1]))  # bytes of a file
    save(self, step, state)

  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  try:
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match='Checkpoint 4 '):
      patch.setattr(Checkpoints, 'save', full)
      go(runs.config(), tmp_path)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    signal.signal(signal.SIGXFSZ, handler)
  assert saved_steps(tmp_path) == [] and read_status(tmp_path)['status'] == 'failed'
  go(runs.config(), tmp_path)
  assert_same_run(tmp_path, whole)


def test_a_job_that_another_one_has_displaced_writes_nothing_more(tmp_path, monkeypatch):
  check = Workdir.check_owner

  def displaced(lock):
    (tmp_path / 'owner').write_text('another')
    (tmp_path / 'status.json').write_text('{"status": "running", "of": "another"}')
    check(lock)

  monkeypatch.setattr(Workdir, 'check_owner', displaced)
  with pytest.raises(WorkdirLocked, match='Another job .another. has begun'):
    go(runs.config(), tmp_path)
  assert saved_steps(tmp_path) == []
  assert json.loads((tmp_path / 'status.json').read_text())['of'] == 'another'


@pytest.mark.parametrize('code', [errno.ENOSYS, errno.ENOLCK])
def test_without_locks_the_file_of_a_killed_run_locks_out_nobody(tmp_path, monkeypatch, code):
  def refuse(*_):
    raise OSError(code, 'no locks')

  monkeypatch.setattr(fcntl, 'flock', refuse)
  config = runs.config()
  with Workdir(tmp_path, config, {}) as killed, Workdir(tmp_path, config, {}) as newest:
    newest.check_owner()
    with pytest.raises(WorkdirLocked, match='has begun'):
      killed.check_owner()


def test_what_a_kill_left_unprobed_is_probed_when_the_run_goes_on(whole, tmp_path, monkeypatch):
  call = evaluation.Evaluation.__call__

  def killed(self, step, *arguments, **options):
    if step == 4:  # after the save of this step, before its probe
      raise Unsaved
    return call(self, step, *arguments, **options)

  with monkeypatch.context() as patch, pytest.raises(Unsaved):
    patch.setattr(evaluation.Evaluation, '__call__', killed)
    go(runs.config(), tmp_path)
  runs.wait_for(lambda: saved_steps(tmp_path) == [4])  # a thread writes it
  assert [row['step'] for row in runs.rows(tmp_path, 'probe')] == [0]
  go(runs.config(), tmp_path)
  assert_same_run(tmp_path, whole)


def test_a_request_to_stop_saves_before_it_measures(tmp_path, monkeypatch):
  stop_after(monkeypatch, 4)  # the probe and the validation are due here
  with pytest.raises(Interrupted):
    go(runs.config(checkpoint_every=0), tmp_path)
  assert saved_steps(tmp_path) == [4]
  assert [row['step'] for row in runs.rows(tmp_path, 'probe')] == [0]


def test_a_trace_of_a_few_steps_is_written(tmp_path):
  go(runs.config(profile__first=2, profile__steps=2, **QUIET), tmp_path)
  assert list((tmp_path / 'profile').rglob('*.xplane.pb'))
  steps = [row['step'] for row in read_metrics(tmp_path) if row['kind'] == 'time']
  assert steps == [2, 3, 4, 5, 6, 7, 8]  # the first step compiles


def test_a_training_prints_what_its_step_needs_of_the_device(tmp_path, monkeypatch, caplog):
  needed, limit = [], 2**40
  monkeypatch.setattr(loop, 'device_memory', lambda: limit)
  monkeypatch.setattr(loop, 'memory', lambda program: needed.append(memory(program)) or needed[0])
  with jax.log_compiles():
    run = go(runs.config(loss_logits=limit // 8), tmp_path)  # a step that no other test compiles
  state = 3 * sum(x.nbytes for x in jax.tree.leaves(run.params))  # with both moments of AdamW
  assert state < needed[0].total < 100 * state
  assert 'GiB of a device' in caplog.text
  # The training uses the program of the check.
  assert caplog.text.count('Compiling jit(update)') == 1
