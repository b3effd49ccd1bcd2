"""A run whose config names a class by an earlier name is the same run under the new one."""

import json
import shutil

from sink_jax.data.sources import TextFolder
from sink_jax.data.prepare import open_cache
from sink_jax.data.tokenizer import Bytes
from sink_jax.train.loop import train
from sink_jax.train.run_dir import has_ended, saved_steps
from tests.train import runs


def test_a_run_that_began_as_prepared_goes_on_as_packed_dataset(tmp_path):
  for i in range(20):
    (tmp_path / f'{i}.txt').write_text(f'{i} a quick brown fox jumps over the lazy dog. ' * 8)
  cache = open_cache(TextFolder(path=str(tmp_path)), Bytes(), 16, False, valid_fraction=0.2,
                     cache_dir=str(tmp_path / 'caches'))
  old, new = (runs.config(data__source=f'{name}(path={str(cache.folder)!r})', data__context=16,
                          data__tokenizer='Bytes()', data__valid_fraction=0.2, steps=4,
                          checkpoint_every=2)
              for name in ('Prepared', 'PackedDataset'))
  workdir = tmp_path / 'run'
  train(old, workdir, show_progress=False)
  assert json.loads((workdir / 'config.json').read_text())['data']['source'].startswith('Prepared(')
  assert has_ended(workdir, new)
  losses = [(row['step'], row.get('loss')) for row in runs.rows(workdir)]
  shutil.rmtree(workdir / 'checkpoints' / '4')
  assert not has_ended(workdir, new)
  train(new, workdir, show_progress=False)
  assert losses == [(row['step'], row.get('loss')) for row in runs.rows(workdir)]
  assert saved_steps(workdir) == [4, 2]
