"""Training, a sweep, its evaluation and its report in gs://bucket, with the commands of a user."""

import json
import random
import shutil

import pytest

from sink_jax.data.sources import TextFolder
from tests.bucket import emulated
from tests.sweep.test_command import TABLE
from tests.train.runs import without_timings
from tests.train.test_metrics import shown

TWO = """{{'a': SMALL,
           'b': SMALL | {{'data.source': "TextFolder(path='{0}/text')", 'data.valid_fraction': 0.2,
                         'data.tokenizer': 'TrainedBpe(vocab_size=280)',
                         'data.cache_dir': '{0}/cache'}}}}"""
TEXT = 'the quick brown fox jumps over the lazy dog, again and again and again. '
PNG = b'\x89PNG'


@pytest.fixture(scope='module')
def bucket():
  with emulated() as there:
    yield there


def finish(process):
  out, err = process.communicate(timeout=300)
  assert process.returncode == 0, err[-3000:]
  return out, err


def rows(bucket, name):
  return without_timings(bucket.read(f'runs/{name}/metrics.jsonl').splitlines())


@pytest.mark.full
def test_a_sweep_is_trained_resumed_evaluated_and_reported(bucket, tmp_path):
  here, text = tmp_path / 'here', tmp_path / 'text'
  here.mkdir()
  text.mkdir()
  for i in range(40):
    (text / f'{i}.txt').write_text(f'{i} {TEXT * 3}')
  (tmp_path / 'table.py').write_text(TABLE.format(trials=TWO.format(tmp_path)))
  config, runs = f'--config={tmp_path / "table.py"}', f'{bucket.url}/runs'
  start = lambda *command: bucket.start(*command, cwd=here)

  shards = [start('sweep', config, f'--workdir={runs}', f'--shard={k}/2') for k in (1, 2)]
  assert [finish(shard)[0] for shard in shards] == ['a: done\n', 'b: done\n']
  for k in (1, 2):
    assert b'1 done' in bucket.read(f'runs/summary-{k}-of-2.md')
  whole = rows(bucket, 'a')
  assert [row['step'] for row in whole if row['kind'] == 'train'] == list(range(1, 9))
  for name in 'ab':
    assert 'first_token_chain' in json.loads(bucket.read(f'runs/{name}/analyses.json'))
    assert board(bucket, name)['train/loss'] == list(range(1, 9))

  for lost in ('checkpoints/8/', 'status.json'):  # as after a kill at step 4
    bucket.delete(f'runs/a/{lost}')
  shutil.rmtree(tmp_path / 'cache')  # the workdir of b has its tokenizer
  _, said = finish(start('train', f'{config}:a', f'--workdir={runs}/a'))
  assert 'resuming from step 4 of 8' in said
  assert rows(bucket, 'a') == whole
  assert board(bucket, 'a')['train/loss'] == list(range(1, 9))
  assert board(bucket, 'a')['probe/sink_1'] == [0, 4, 8]
  finish(start('evaluate', f'--workdir={runs}/b'))
  assert json.loads(bucket.read('runs/b/evaluation/sink_report.json'))['step'] == 8
  assert bucket.read('runs/b/evaluation/attention_maps.png').startswith(PNG)

  finish(start('report', f'--runs={runs}', f'--out={bucket.url}/report'))
  assert 'report/index.html' in bucket.names('report')
  pictures = [name for name in bucket.names('report') if name.endswith('.png')]
  assert pictures and all(bucket.read(name).startswith(PNG) for name in pictures)
  finish(
    start(
      'analyses',
      'maps',
      f'--workdir={runs}/b',
      f'--out={bucket.url}/analyses',
      f'--source={text}',
      '--sequences=2',
      '--length=8',
    )
  )
  assert bucket.names('analyses') == ['analyses/maps.json', 'analyses/maps.png']
  assert not list(here.iterdir())  # no folder such as gs:/bucket


def test_a_corpus_is_built_there_and_trained_from_in_place(bucket, tmp_path, corpus):
  """From the shards, a host reads only the bytes of its rows."""
  (tmp_path / 'table.py').write_text(TABLE.format(trials="{'a': SMALL}"))
  config = f'--config={tmp_path / "table.py"}:a'
  words = [
    config,
    f'--config.data.source={corpus!r}',
    '--config.data.valid_fraction=0.2',
    '--config.data.tokenizer=TrainedBpe(vocab_size=280)',
  ]
  words.append(f'--out={bucket.url}/corpus')
  build = lambda: finish(bucket.start('data_build', *words, cwd=tmp_path))
  files = lambda: {name: bucket.read(name) for name in bucket.names('corpus')}
  assert f"PackedDataset(path='{bucket.url}/corpus')" in build()[0]
  built = files()
  shard = 'corpus/00000.bin'
  assert {'corpus/manifest.json', 'corpus/tokenizer.json', shard} <= built.keys()
  bucket.delete('corpus/manifest.json')  # as after a kill before it was written: the shard is kept
  build()
  assert files() == built

  bucket.reads()
  (tmp_path / 'here').mkdir()
  for name, content in built.items():
    (tmp_path / 'here' / name.removeprefix('corpus/')).write_bytes(content)
  losses = []
  for path in (f'{bucket.url}/corpus', str(tmp_path / 'here')):
    workdir = tmp_path / f'run{len(losses)}'
    finish(
      bucket.start(
        'train',
        config,
        f'--workdir={workdir}',
        '--config.validation.batches=1',
        f"--config.data.source=PackedDataset(path='{path}')",
        cwd=tmp_path,
      )
    )
    losses.append([json.loads(line).get('loss') for line in (workdir / 'metrics.jsonl').open()])
  assert losses[0] == losses[1] and len(losses[0]) > 4

  row = (json.loads(built['corpus/manifest.json'])['context'] + 1) * 2 + 4
  of_shard = [size for name, size in bucket.reads() if name == shard]
  # Each read is a row, and nothing else of a shard is read.
  assert set(of_shard) == {row} and len(of_shard) > 4 * 8
  assert sum(of_shard) < len(built[shard]) / 2


@pytest.fixture
def corpus(tmp_path):
  draw = random.Random(0)
  (tmp_path / 'text').mkdir()
  for i in range(400):
    text = ' '.join(''.join(draw.choices('abcdefgh', k=5)) for _ in range(600))
    (tmp_path / 'text' / f'{i}.txt').write_text(text)
  return TextFolder(path=str(tmp_path / 'text'))


def board(bucket, name):
  return shown(map(bucket.read, bucket.names(f'runs/{name}/tensorboard/')))
