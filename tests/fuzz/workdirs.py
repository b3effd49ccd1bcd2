"""The folder of a training run: its JSON files, probe tokens, checksums, and Orbax's own files."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from tests.fuzz import mutate
from tests.fuzz.arrays import changed_npy
from tests.fuzz.inputs import File, Input, Kind

_OURS = ('config.json', 'data.json', 'status.json', 'metrics.jsonl', 'probe_tokens.npy')


def _prepare(folder):
  """A run of a few steps, as {'run': files}; what training keeps for itself is left out."""
  from sink_jax.train.loop import train
  from tests.train import runs
  folder.mkdir(parents=True, exist_ok=True)
  workdir = folder / 'run'
  train(runs.config(steps=2, checkpoint_every=1, model__layers=1), workdir, show_progress=False)
  files = {str(p.relative_to(workdir)): p.read_bytes() for p in workdir.rglob('*') if p.is_file()
           and p.relative_to(workdir).parts[0] not in ('tensorboard', 'lock')}
  input = Input(base='run')
  for run in (_run_files, _run_load):
    input.write(folder / 'copy', files)
    run(None, input, folder / 'copy')
  return {'run': files}


def _prepare_files(folder):
  """The same files without training: the names of a run's folder."""
  import numpy as np

  from sink_jax.train.probe_tokens import write_probe_tokens
  from tests.train import runs
  folder.mkdir(parents=True, exist_ok=True)
  write_probe_tokens(folder, np.arange(64, dtype=np.int32).reshape(4, 16))
  files = {
      'config.json': json.dumps(runs.config()).encode(),
      'data.json': b'{"content": "abc", "vocab_size": 64, "context": 16}',
      'status.json': b'{"status": "done", "step": 2, "last_good_checkpoint": 2}',
      'metrics.jsonl': b'{"kind": "train", "step": 1, "loss": 2.5}\n'
                       b'{"kind": "probe", "step": 2, "sink_1": 0.5, "rates": [1, 2]}\n',
      'probe_tokens.npy': (folder / 'probe_tokens.npy').read_bytes(),
      'checkpoints/2/state/manifest.ocdbt': b'x', 'checkpoints/2/_METADATA': b'{}',
      'checksums/2.json': json.dumps({'_METADATA': 'ab' * 32, 'state/manifest.ocdbt': ''}).encode()}
  input = Input(base='run')
  input.write(folder / 'copy', files)
  _run_files(None, input, folder / 'copy')
  return {'run': files}


def _content(name, data):
  """Changes that suit a file: JSON values, array headers, or any byte."""
  if name.endswith('.npy'):
    return changed_npy(data)
  try:
    value = json.loads(data)
  except ValueError:
    return mutate.changed_bytes([data])
  if name.startswith('checksums/'):
    sums = st.dictionaries(st.sampled_from(mutate.PATHS) | st.text(mutate.LETTERS, max_size=5),
                           st.text(mutate.LETTERS, max_size=5) | mutate.hostile_values(),
                           max_size=3)
    return mutate.changed_json([value]) | sums.map(lambda x: json.dumps(value | x).encode())
  return mutate.changed_json([value])


def _inputs(prepared):
  own = prepared['run']
  one = st.one_of([st.tuples(st.just(name), st.one_of(
      _content(name, own[name]).map(File), mutate.changed_bytes([own[name]]).map(File),
      st.sampled_from([File(), File(mutate.nested()), File(b'', 1 << 28), File(link='/dev/zero'),
                       File(link='.'), File(link='/nowhere')])))
                   for name in sorted(own)])
  return st.builds(lambda pairs, gone: Input('', dict(pairs), gone, 'run'),
                   st.lists(one, min_size=1, max_size=2),
                   st.sampled_from([(), (), *[(name,) for name in sorted(own)],
                                    tuple(n for n in own if n.startswith('checksums/'))]))


def _run_files(prepared, input, folder):
  """Everything that reads a run's own files, without its arrays."""
  from sink_jax.train import checksums, metrics_log, probe_tokens, run_dir
  from sink_jax.train.config import from_dict
  from tests.train import runs
  refused = []
  for read in (lambda: run_dir.read_status(folder), lambda: run_dir.read_data_summary(folder),
               lambda: metrics_log.read_metrics(folder),
               lambda: probe_tokens.read_probe_tokens(folder),
               lambda: [checksums.verify(folder, s) for s in checksums.saved_steps(folder)],
               lambda: run_dir.has_ended(folder, runs.config()),
               lambda: from_dict(run_dir.read_config(folder))):
    try:
      read()
    except (ValueError, OSError) as error:
      refused.append(error)
  if refused:
    raise refused[0]


def _run_load(prepared, input, folder):
  from sink_jax.models.sizes import parameter_shapes
  from sink_jax.pretrained.load import load_run
  parameter_shapes.cache_clear()
  load_run(folder)


def _sizes(prepared):
  """Sizes in config.json that no machine holds, or that are none."""
  config = json.loads(prepared['run']['config.json'])
  keys = [('model', key) for key in ('layers', 'd_model', 'heads', 'kv_heads', 'ffn_hidden',
                                     'vocab_size', 'sink_tokens')]
  keys += [('data', 'context'), ('data', 'max_tokens'), ('probe', 'length'), ('probe', 'sequences')]
  keys += [(None, key) for key in ('steps', 'batch_size', 'microbatches')]
  number = st.sampled_from([*mutate.NUMBERS, 10**9, 10**12]) | st.integers(1, 2**40)

  def changed(pairs):
    new = json.loads(json.dumps(config))
    for (section, key), value in pairs:
      (new if section is None else new[section])[key] = value
    return Input('', {'config.json': File(json.dumps(new).encode())}, (), 'run')

  return st.lists(st.tuples(st.sampled_from(keys), number), min_size=1, max_size=2).map(changed)


_bases = lambda prepared: prepared
KINDS = {
    'run_files': Kind(_prepare_files, _inputs, _run_files, ('ValueError', 'OSError'), share=10,
                      bases=_bases),
    'load_run': Kind(_prepare, _inputs, _run_load, ('ValueError', 'CheckpointError', 'OSError'),
                     share=2, batch=200, bases=_bases),
    'run_sizes': Kind(_prepare, _sizes, _run_load, ('ValueError', 'CheckpointError', 'OSError'),
                      share=5, batch=500, bases=_bases)}
