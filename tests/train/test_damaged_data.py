"""Training on a chunk cache that changed since it was built."""

import json
import logging
import shutil

import pytest

from sink_jax.data.cache_check import DamagedCache
from sink_jax.data.dataset import open_data
from sink_jax.data.sources import Jsonl
from sink_jax.train.checksums import saved_steps
from sink_jax.train.experiment import from_dict
from sink_jax.train.loop import train
from sink_jax.train.metrics_log import read_metrics
from sink_jax.train.run_dir import lock_workdir
from tests.train import runs


@pytest.fixture
def config(tmp_path):
  folder = tmp_path / 'corpus'
  folder.mkdir()
  for i in range(12):
    (folder / f'{i}.txt').write_text(f'{i} cats sat on {i + 1} mats. ' * 9)
  return runs.config(data__source=f"TextFolder(path='{folder}')", data__valid_fraction=0.4,
                     data__cache_dir=str(tmp_path / 'caches'), steps=4, probe__sequences=2)


def go(config, workdir):
  return train(config, workdir, show_progress=False)


def test_no_checkpoint_is_made_of_damaged_chunks(config, tmp_path):
  open_data(from_dict(config).data)
  cache, = (path.parent for path in (tmp_path / 'caches').glob('*/manifest.json'))
  chunks = bytearray((cache / 'train.000.npy').read_bytes())
  chunks[-5] ^= 1  # another token of the vocabulary
  (cache / 'train.000.npy').write_bytes(chunks)
  with pytest.raises(DamagedCache, match=r'train\.000\.npy changed since the build; delete'):
    go(config, tmp_path / 'run')
  status = json.loads((tmp_path / 'run' / 'status.json').read_text())
  assert status['status'] == 'failed' and 'train.000.npy' in status['error']
  assert saved_steps(tmp_path / 'run') == []
  shutil.rmtree(cache)  # the remedy
  go(config, tmp_path / 'run')
  assert saved_steps(tmp_path / 'run') == [4] and (cache / 'verified.json').exists()
  assert len(read_metrics(tmp_path / 'run', 'train')) == 4


def test_a_validation_source_belongs_to_a_run(tmp_path):
  config, other = runs.config(), runs.config(data__valid_source="Jsonl(path='x')")
  assert from_dict(other).data.valid_source == Jsonl(path='x')
  assert from_dict(config).data.valid_source is None
  data = {'content': 'a', 'valid_content': 'b'}
  workdir = tmp_path / 'run'
  with lock_workdir(workdir, config, data):
    pass
  older = json.loads((workdir / 'config.json').read_text())
  del older['data']['valid_source']  # as it was before there was such a key
  (workdir / 'config.json').write_text(json.dumps(older))
  with lock_workdir(workdir, config, data):
    pass
  with pytest.raises(ValueError, match=r"data.valid_source: '' -> .Jsonl"):
    with lock_workdir(workdir, other, data):
      pass
  with pytest.raises(ValueError, match='the content of the data, since the run began'):
    with lock_workdir(workdir, config, data | {'valid_content': 'c'}):
      pass


def test_a_split_by_chunks_is_said_aloud(config, tmp_path, caplog):
  (tmp_path / 'one').mkdir()
  (tmp_path / 'one' / 'a.txt').write_text('12 cats sat on 13 mats. ' * 99)
  config['data']['source'] = f"TextFolder(path='{tmp_path / 'one'}')"
  caplog.set_level(logging.WARNING, 'sink_jax')
  go(config, tmp_path / 'run')
  assert 'too few documents to hold some out' in caplog.text
