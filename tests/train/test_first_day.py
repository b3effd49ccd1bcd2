"""What a first job meets on a cluster, GPUs, a TPU host and a bucket, simulated on a CPU."""

import dataclasses
import json
import os
import re
import signal
import threading
import types

import jax
import numpy as np
import pytest

from sink_jax import devices
from sink_jax.data.batches import read_ahead
from sink_jax.io import compile_cache
from sink_jax.io.process import GPU_MEMORY, use_most_of_a_gpu
from sink_jax.models.sharding import make_mesh
from sink_jax.train import checkpoint, evaluation, loop, multihost
from sink_jax.train.checkpoint import Checkpoints, saved_steps
from sink_jax.train.failures import passes
from sink_jax.train.loop import train
from sink_jax.train.memory import Memory, check_fits, fitting_microbatches, memory
from sink_jax.train.multihost import Interrupted
from tests.train import runs

SLURM = {
  'SLURM_JOB_ID': '123',
  'SLURM_STEP_NODELIST': 'node[1-2]',
  'SLURM_NTASKS': '8',
  'SLURM_STEP_NUM_TASKS': '8',
  'SLURM_STEP_TASKS_PER_NODE': '4(x2)',
  'SLURM_PROCID': '6',
  'SLURM_LOCALID': '2',
  'SLURM_NODEID': '1',
}
ONE_TASK = SLURM | {
  'SLURM_NTASKS': '1',
  'SLURM_STEP_NUM_TASKS': '1',
  'SLURM_STEP_TASKS_PER_NODE': '1',
  'SLURM_PROCID': '0',
  'SLURM_LOCALID': '0',
}
EIGHT = '0,1,2,3,4,5,6,7'


def initialized(monkeypatch, environment):
  """The options with which jax joins the job; None if it is one process."""
  for name in (*os.environ,):
    if name.startswith(('SLURM', 'TPU_', 'MEGASCALE')):
      monkeypatch.delenv(name)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  calls = []
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **options: calls.append(options))
  monkeypatch.setattr(signal, 'signal', lambda *_: None)
  multihost.init_distributed()
  return calls[0] if calls else None


@pytest.mark.parametrize(
  'environment',
  [
    ONE_TASK | {'CUDA_VISIBLE_DEVICES': EIGHT},  # srun --gpus=8 --pty bash, or no --ntasks-per-node
    {'TPU_PROCESS_ADDRESSES': 'local'},  # Kaggle
    {'TPU_WORKER_HOSTNAMES': 'localhost', 'MEGASCALE_NUM_SLICES': '1'},
  ],
  ids=['slurm', 'kaggle', 'one host'],
)
def test_one_process_takes_all_devices_of_its_machine(monkeypatch, environment):
  assert initialized(monkeypatch, environment) is None


@pytest.mark.parametrize(
  'environment, gpus',
  [
    ({}, None),  # no GPUs
    ({'CUDA_VISIBLE_DEVICES': '0,1,2,3'}, [2]),
    ({'CUDA_VISIBLE_DEVICES': EIGHT}, [4, 5]),  # fewer tasks than GPUs: none stays idle
    ({'CUDA_VISIBLE_DEVICES': '0', 'SLURM_GPUS_PER_TASK': '1'}, [0]),
    ({'CUDA_VISIBLE_DEVICES': '5'}, [0]),
    ({'CUDA_VISIBLE_DEVICES': EIGHT, 'SLURM_TRES_PER_TASK': 'gres/gpu:8'}, list(range(8))),
    ({'CUDA_VISIBLE_DEVICES': '0,1', 'SLURM_STEP_TASKS_PER_NODE': '4,3'}, [0, 1]),
  ],
)
def test_a_task_of_slurm_takes_its_gpus(monkeypatch, environment, gpus):
  options = initialized(monkeypatch, SLURM | environment)
  assert options['local_device_ids'] == gpus


def test_open_mpi_within_slurm_starts_the_processes(monkeypatch):
  mpi = {'OMPI_COMM_WORLD_SIZE': '8', 'CUDA_VISIBLE_DEVICES': EIGHT}
  assert initialized(monkeypatch, ONE_TASK | mpi) == dict(
    local_device_ids=None, heartbeat_timeout_seconds=multihost.HEARTBEAT_SECONDS
  )


def test_a_checkpoint_by_the_clock_waits_for_the_next_step(monkeypatch):
  stop = multihost.StopHandler()
  answers = iter([(False, False), (False, True), *[(False, False)] * 3])
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(multihost, '_any', lambda _: next(answers))
  monkeypatch.setattr(multihost, 'collective', lambda call, *arguments: call(*arguments))
  assert stop.poll(save=True) == (False, False)
  assert not stop.poll_to_stop()  # the answer to the poll before, between two batches
  assert not stop.poll_to_stop()
  assert stop.poll() == (False, True)
  assert stop.poll() == (False, False)


def test_hosts_of_a_slice_and_slices_of_one_host_find_each_other(monkeypatch):
  assert initialized(monkeypatch, {'TPU_WORKER_HOSTNAMES': 'a,b'}) is not None
  slices = {'TPU_WORKER_HOSTNAMES': 'a', 'MEGASCALE_NUM_SLICES': '2'}
  assert initialized(monkeypatch, slices) is not None


class Gpu:
  """What `make_mesh` reads of a GPU."""

  platform, device_kind = 'gpu', 'NVIDIA H100 80GB HBM3'

  def __init__(self, number, per_machine):
    self.id = self.process_index = number
    self.slice_index = number // per_machine  # JAX calls a machine with NVLink a slice


@pytest.mark.parametrize(
  'machines, per_machine, sizes',
  [(2, 8, (1, 16, 1)), (4, 1, (1, 4, 1)), (2, 8, (2, 8, 1)), (2, 4, (1, 8, 1))],
)
def test_fsdp_reaches_over_machines_with_gpus(machines, per_machine, sizes):
  devices = [Gpu(i, per_machine) for i in range(machines * per_machine)]
  mesh = make_mesh(*sizes, devices=devices)
  assert tuple(mesh.shape.values()) == sizes
  # Neighbours along fsdp are on one machine as long as that is large enough.
  numbers = np.vectorize(lambda device: device.id)(mesh.devices).ravel()
  np.testing.assert_array_equal(numbers, np.arange(len(devices)))


@pytest.mark.parametrize(
  'environment, expected',
  [
    ({}, ('0.92', None)),
    ({GPU_MEMORY[0]: '0.5'}, ('0.5', None)),
    ({GPU_MEMORY[1]: '0.5'}, (None, '0.5')),  # both names together are an error of jaxlib
  ],
)
def test_jax_takes_most_of_a_gpu_unless_told(monkeypatch, environment, expected):
  with monkeypatch.context() as patch:
    patch.setattr(os, 'environ', environment)
    use_most_of_a_gpu()
  assert tuple(map(environment.get, GPU_MEMORY)) == expected


def test_a_shared_compile_cache_takes_only_programs_that_take_long(monkeypatch):
  values = {'jax_compilation_cache_dir': None}
  config = types.SimpleNamespace(jax_compilation_cache_dir=None, update=values.__setitem__)
  monkeypatch.setattr(jax, 'config', config)
  monkeypatch.setenv('SINK_JAX_COMPILE_CACHE', 'gs://bucket/runs/compiled')
  compile_cache.enable()
  assert values['jax_compilation_cache_dir'] == 'gs://bucket/runs/compiled'
  assert values['jax_persistent_cache_min_compile_time_secs'] == 1


def test_a_bucket_that_refuses_is_named_before_the_first_step(tmp_path, monkeypatch):
  def refuse(*_, **__):
    raise PermissionError('403 storage.buckets.get denied')

  monkeypatch.setattr(checkpoint, 'is_local', lambda path: False)
  monkeypatch.setattr(checkpoint.ocp, 'CheckpointManager', refuse)
  with pytest.raises(ValueError, match='roles/storage.legacyBucketReader'):
    Checkpoints(tmp_path).open()
  assert not list(tmp_path.iterdir())  # the object that was tried out is gone


def test_checkpoints_are_saved_by_the_clock_too(tmp_path, monkeypatch):
  ticks = iter(range(0, 10**6, 20))  # seconds: a step and a save ask a few times
  clock = types.SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda _: None)
  monkeypatch.setattr(checkpoint, 'time', clock)
  saved = []
  save = Checkpoints.save
  monkeypatch.setattr(
    Checkpoints, 'save', lambda self, step, state: saved.append(step) or save(self, step, state)
  )
  options = dict(checkpoint_every=0, probe__every=0, validation__every=0)
  train(runs.config(checkpoint_minutes=1.0, **options), tmp_path / 'a', show_progress=False)
  assert saved[-1] == 8 and len(saved) > 2
  saved.clear()
  train(runs.config(checkpoint_minutes=0.0, **options), tmp_path / 'b', show_progress=False)
  assert saved == [8]


def test_a_request_to_stop_ends_a_validation(tmp_path, monkeypatch):
  config = runs.config(checkpoint_every=8, validation__batches=3, probe__every=0)
  make, calls, stop_at = evaluation.make_validation_step, [], []

  def counted(*arguments, **options):
    step = make(*arguments, **options)

    def validate(*inputs):
      calls.append(None)
      if len(calls) in stop_at:
        signal.raise_signal(signal.SIGTERM)
      return step(*inputs)

    return validate

  with monkeypatch.context() as patch:
    patch.setattr(evaluation, 'make_validation_step', counted)
    train(config, tmp_path / 'whole', show_progress=False)
    first = len(calls) // 3 + 1  # of three validations: the first batch after step 4
    stop_at.append(first)
    calls.clear()
    with pytest.raises(Interrupted, match='at step 4 of 8'):
      train(config, tmp_path / 'cut', show_progress=False)
  assert len(calls) == first and saved_steps(tmp_path / 'cut') == [4]
  train(config, tmp_path / 'cut', show_progress=False)
  whole, cut = (
    {row['step']: row for row in runs.rows(tmp_path / name, 'valid')} for name in ('whole', 'cut')
  )
  assert whole == cut and len(cut) == 3


def test_a_job_saves_by_the_clock_of_its_first_process(tmp_path):
  options = dict(steps=100000, checkpoint_every=0, probe__every=0, validation__every=0)
  job = runs.start_job(tmp_path, devices=1, checkpoint_minutes=0.02, **options)
  runs.wait_for(lambda: len(saved_steps(tmp_path)) > 1, *job)
  job[1].send_signal(signal.SIGTERM)
  said = [process.communicate(timeout=60)[1] for process in job]
  assert [process.returncode for process in job] == [42, 42], said
  assert json.loads((tmp_path / 'status.json').read_text())['status'] == 'interrupted'


GIB = 2**30


@pytest.mark.parametrize(
  'needed, microbatches, sequences, fitting',
  [
    (Memory(10 * GIB, 30 * GIB, 0), 1, 32, 8),  # 30 in 5 GiB: 6 at least, which does not divide 32
    (Memory(10 * GIB, 30 * GIB, 0), 2, 32, 16),
    (Memory(14 * GIB, 30 * GIB, 0), 1, 32, 32),
    (Memory(14 * GIB, 40 * GIB, 0), 1, 32, None),  # not even single sequences
    (Memory(15 * GIB, 1 * GIB, 0), 1, 32, None),  # the state alone
  ],
)
def test_a_step_that_does_not_fit_says_what_would(needed, microbatches, sequences, fitting):
  limit = 15 * GIB
  assert fitting_microbatches(needed, limit, microbatches, sequences) == fitting
  with pytest.raises(ValueError) as refused:
    check_fits(needed, limit, microbatches, sequences)
  said = str(refused.value)
  assert 'of the 15.0 GiB of a device' in said
  assert (f'--config.microbatches={fitting} ' in said) if fitting else ('mesh.fsdp' in said)
  assert not passes(refused.value)


def test_micro_batches_that_are_named_do_fit(tmp_path, monkeypatch):
  """By the compiled step of the small run, on a device that has less memory than it needs."""
  config = runs.config(batch_size=64, model__d_model=8, steps=1)
  wants = []

  def measured(program):
    wants.append(memory(program))
    return wants[-1]

  monkeypatch.setattr(loop, 'memory', measured)
  monkeypatch.setattr(loop, 'device_memory', lambda: 2**40)
  train(config, tmp_path / 'a', show_progress=False)
  limit = wants[0].arguments + wants[0].outputs + wants[0].temporaries // 3
  monkeypatch.setattr(loop, 'device_memory', lambda: limit)
  with pytest.raises(ValueError, match='config.microbatches=') as refused:
    train(config, tmp_path / 'b', show_progress=False)
  number = int(re.search(r'microbatches=(\d+)', str(refused.value))[1])
  assert 1 < number < 64
  train(dataclasses.replace(config, microbatches=number), tmp_path / 'c', show_progress=False)
  assert wants[-1].total <= limit


def test_other_machines_need_a_corpus_that_they_can_reach():
  for source in ('TextFolder(path="data/pile")', 'PackedDataset(path="tokens")'):
    with pytest.raises(ValueError, match='data_build --out=gs://'):
      runs.config(data__source=source).data.check_remote()
  for source in ('Stdlib()', 'PackedDataset(path="gs://bucket/tokens")', 'Tfds(name="a")'):
    runs.config(data__source=source).data.check_remote()


def test_a_validation_reads_ahead():
  """While the caller works on the first batch, the next one is read."""
  read = threading.Event()

  class Batches(list):
    def __getitem__(self, index):
      if index == 1:
        read.set()
      return super().__getitem__(index)

  batches = read_ahead(Batches([np.zeros(1), np.ones(1), np.full(1, 2)]))
  assert next(batches) == 0
  assert read.wait(10)
  assert [int(batch[0]) for batch in batches] == [1, 2]


@pytest.mark.parametrize('capability, emulated', [('7.5', True), ('8.0', False)])
def test_a_gpu_before_ampere_says_that_it_emulates_bfloat16(monkeypatch, capability, emulated):
  gpu = types.SimpleNamespace(
    platform='gpu',
    compute_capability=capability,
    client=types.SimpleNamespace(platform_version='PJRT C API cuda 13000'),
  )
  monkeypatch.setattr(jax, 'devices', lambda *_: [gpu])
  assert devices.emulates_bfloat16() == emulated
