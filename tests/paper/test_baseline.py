"""What the search for a baseline says of runs with planted numbers."""

import json

import pytest

from configs import baseline, desk, quickstart
from sink_jax.cli.report import make_report
from sink_jax.paper.baseline import find, search_runs, settings_met
from sink_jax.report.read_runs import find_runs
from tests.paper.paper_runs import HARDWARE, probe_row


def write(folder, config, *, seed=0, status='done', rate=5e4, null=None, **values):
  folder.mkdir(parents=True)
  config = config.to_dict() | {'seed': seed}
  (folder / 'config.json').write_text(json.dumps(config))
  steps = config['steps']
  (folder / 'status.json').write_text(json.dumps(dict(status=status, step=steps, **HARDWARE)))
  sink = values.pop('sink', (0,))
  rows = [probe_row(0, (), null_p99=null or {'sink_1': 0.5, 'hidden_ratio': 1.1}),
          dict(kind='train', step=steps, loss=3.0, grad_norm=1.0, tokens_per_second=rate),
          probe_row(steps, sink, null_p99=null or {'sink_1': 0.0, 'hidden_ratio': 1.0}, **values),
          dict(kind='valid', step=steps, valid=3.0)]
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def run(folder, name, **options):
  write(folder / f'{name}-{options.get("seed", 0)}', baseline.get_config(name), **options)


def met(folder):
  """{setting: {criterion: (seeds that meet it, seeds that are done)}}."""
  found = settings_met(search_runs(find(find_runs(folder))))
  return {name: {key: (sum(of[name]), len(of[name])) for key, of in found.items() if name in of}
          for name in {name for of in found.values() for name in of}}


def test_each_criterion_is_met_by_its_own_kind_beyond_its_level(tmp_path):
  run(tmp_path, 'bpe-2-softmax', sink=(30,), hidden_ratio=[9.0, 5.0, 1.0])
  run(tmp_path, 'bpe-2-sigmoid-normalized', sink=(9.9,))
  run(tmp_path, 'bpe-2-sigmoid', sink=(4.9,), raw_mass_1=0.5, raw_row_mass=16.25)
  run(tmp_path, 'bpe-2-k-bias', sink=(0,), sink_bias_slot=35.0)
  run(tmp_path, 'bytes-3-softmax', sink=(29.9,), hidden_ratio=[9.0, 4.9, 1.0])
  assert met(tmp_path) == {
      'bpe-2': {'a': (1, 1), 'b': (1, 1), 'c': (0, 1), 'd': (1, 1), 'e': (1, 1)},
      'bytes-3': {'a': (0, 1), 'b': (0, 1)}}  # the embedding is no block


def test_a_null_beyond_the_level_is_the_level(tmp_path):
  run(tmp_path, 'bpe-2-softmax', sink=(40,), hidden_ratio=[1.0, 8.0, 1.0],
      null={'sink_1': 45.0, 'hidden_ratio': 9.0})
  assert met(tmp_path) == {'bpe-2': {'a': (0, 1), 'b': (0, 1)}}


def test_raw_mass_that_stands_out_is_a_sink_of_sigmoid(tmp_path):
  # A mean weight of a visible key is 0.05 here: 3.25 / 65 * 2 / 2.
  run(tmp_path, 'bpe-2-sigmoid', raw_mass_1=0.31, raw_row_mass=3.25)
  assert met(tmp_path) == {'bpe-2': {'d': (0, 1)}}


def test_seeds_count_and_the_chosen_setting_is_that_of_desk(tmp_path):
  for seed, rate in ((0, 40), (4, 10)):
    run(tmp_path, 'bpe-2-softmax', seed=seed, sink=(rate,))
  write(tmp_path / 'default', desk.get_config('default'), seed=1, sink=(50,))
  write(tmp_path / 'other', desk.get_config('default,budget=smoke'), seed=1, sink=(50,))
  run(tmp_path, 'wide-2-softmax', status='interrupted', sink=(90,))
  write(tmp_path / 'quick', quickstart.get_config('text-softmax'), sink=(90,))
  counts = met(tmp_path)
  assert counts == {'bpe-2': {'a': (1, 2), 'b': (0, 2)}, 'desk': {'a': (1, 1), 'b': (0, 1)}}
  text = make_report(tmp_path / 'out', tmp_path, kind='baseline')
  assert 'met by bpe-2 (1 of 2 seeds), desk; 1 setting was tried.' in text
  assert '(b) softmax: a hidden norm ratio' in text and (
      'met by none within this budget, not by bpe-2 (0 of 2 seeds)') in text
  assert 'K bias' in text and ': not run; 0 settings were' in text
  assert 'wide-2-softmax, seed 0 (interrupted at step 2,500)' in text
  stored = json.loads((tmp_path / 'out/report.json').read_text())
  # 4,000 steps of 16 sequences of 64 tokens at 50,000 tokens per second.
  assert [row['training_seconds'] for row in stored['runs']][:2] == [81.92, 81.92]
  assert (tmp_path / 'out/rates.png').stat().st_size > 5000
  assert 'data:image/webp' in (tmp_path / 'out/index.html').read_text()
  first = (tmp_path / 'out/report.md').read_text().split('## In detail')[0]
  assert first.index('| settings run |') < first.index('](rates.png)') < first.index('](curves.png')


def test_other_runs_are_no_search(tmp_path):
  write(tmp_path / 'default', desk.get_config('default,budget=smoke'))
  with pytest.raises(ValueError, match='configs/baseline.py --workdir=runs/baseline'):
    make_report(tmp_path / 'out', tmp_path, kind='baseline')
  with pytest.raises(ValueError, match='leave out --kind=baseline'):
    make_report(tmp_path / 'out', tmp_path, ['x.json'], kind='baseline')
  assert not (tmp_path / 'out').exists()
