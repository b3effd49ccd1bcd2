"""Building packed folders: kills, several processes, settings, damage, folders of before."""

import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from sink_jax.data import build
from sink_jax.data.dataset import DataConfig, as_packed, open_data, open_packed
from sink_jax.data.packed import FORMAT, Packed
from sink_jax.data.sources import PackedDataset, TextFolder
from sink_jax.data.tokenizer import TrainedBpe
from sink_jax.io.paths import import_file
from sink_jax.train.config import Experiment, changed
from sink_jax.train.start import completed
from tests.commands import run_here
from tests.data.conftest import SHARD
from tests.data.rows import all_rows, assert_same_batches
from tests.train.runs import ROOT

_BPE = TrainedBpe(vocab_size=300)


@pytest.fixture(scope='module', autouse=True)
def small_shards():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(build, 'SHARD_CHARACTERS', SHARD)
    yield


@pytest.fixture(scope='module')
def whole(config, tmp_path_factory):
  """{file: bytes} of a folder that one process built without a stop."""
  packed, _ = open_packed(config(tokenizer=_BPE), str(tmp_path_factory.mktemp('whole')))
  return _files(packed.folder)


def _files(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != 'lock'}


_PROGRAM = """
import sys, time
from sink_jax.data import build
from sink_jax.data.dataset import DataConfig, open_packed
from sink_jax.data.sources import TextFolder
from sink_jax.data.tokenizer import TrainedBpe
if __name__ == '__main__':
  text, out, workers, build.SHARD_CHARACTERS = *sys.argv[1:3], *map(int, sys.argv[3:])
  if not workers:
    write = build.write_atomically
    def slow(path, data):
      time.sleep(0.025)
      print(path.name, flush=True)
      write(path, data)
    build.write_atomically = slow
  config = DataConfig(source=TextFolder(path=text), context=16, valid_fraction=0.2,
                      tokenizer=TrainedBpe(vocab_size=300))
  open_packed(config, out, workers)
"""


def _start(corpus, out, workers):
  arguments = corpus.path, str(out), str(workers), str(SHARD)
  return subprocess.Popen(
    [sys.executable, '-c', _PROGRAM, *arguments],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def test_killed_at_any_moment_and_resumed(corpus, whole, tmp_path, request):
  draw = random.Random(0)
  for round_ in range(50 if request.config.getoption('--full') else 2):
    out, workers, kills = tmp_path / str(round_), 2 * (round_ % 5 == 4), 0
    while not (out / 'manifest.json').exists() and kills < 12:
      process = _start(corpus, out, workers)
      if workers:
        time.sleep(draw.uniform(1, 6))
      else:
        for _ in range(draw.randint(2, 9)):  # waits until it begins this many files
          process.stdout.readline()
        time.sleep(draw.uniform(0, 0.04))
      process.send_signal(signal.SIGKILL)
      process.communicate()
      kills += 1
    assert workers or kills > 1
    if not (out / 'manifest.json').exists():
      assert _start(corpus, out, 0).wait() == 0
    assert _files(out) == whole


def test_workers_and_processes_at_once_make_the_same_folder(corpus, whole, tmp_path):
  processes = [_start(corpus, tmp_path / 'out', workers) for workers in (0, 2, 0)]
  assert [process.wait(timeout=120) for process in processes] == [0] * 3
  assert _files(tmp_path / 'out') == whole


def _flipped(data):
  middle = len(data) // 2
  return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
  'name, damage',
  [('00001.bin', lambda data: data[:-38]), ('00001.json', _flipped), ('00001.json', None)],
)
def test_a_damaged_shard_is_named_and_built_again_and_the_others_are_kept(
  config, packed, tmp_path, name, damage
):
  folder = shutil.copytree(packed.folder, tmp_path / 'copy')
  (folder / 'manifest.json').unlink()
  data = (folder / name).read_bytes()
  (folder / name).unlink()
  if damage:
    (folder / name).write_bytes(damage(data))
  with pytest.raises(ValueError, match=r'00001\.bin is damaged .*delete it, and it is built again'):
    open_packed(config(), str(folder))
  (folder / '00001.bin').unlink()
  times = lambda: [(folder / f'0000{n}.bin').stat().st_mtime_ns for n in (0, 7)]
  kept = times()
  open_packed(config(), str(folder))
  assert _files(folder) == _files(packed.folder)
  assert times() == kept


def test_the_folder_is_reused_and_its_name_sees_every_setting(
  config, corpus, tmp_path, monkeypatch
):
  source = TextFolder(path=str(shutil.copytree(corpus.path, tmp_path / 'text')))
  opened = lambda **options: open_packed(config(source=source, **options))[0]
  first = opened()
  with monkeypatch.context() as patch:
    patch.setattr(TextFolder, 'documents', None)  # no document is read
    assert opened().folder == first.folder
    with pytest.raises(ValueError, match=f'{first.folder} holds other data: choose another'):
      open_packed(config(), str(first.folder))
  changes = {'context': 17, 'bos': True, 'eos': False, 'valid_fraction': 0.3, 'tokenizer': _BPE}
  others = [opened(**{key: value}) for key, value in changes.items()]
  with open(f'{source.path}/prose/00.txt', 'a') as file:
    file.write('more')
  folders = [first, *others, opened()]
  assert len({folder.folder for folder in folders}) == 7
  assert len({folder.manifest['content'] for folder in folders}) == 7


def test_workers_of_a_source_that_a_config_file_defines_and_probes_of_texts_with_one_header(
  config, tmp_path
):
  (tmp_path / 'mine.py').write_text(
    textwrap.dedent("""\
      from sink_jax.data.sources import Document, DocumentSource
      class Numbers(DocumentSource):
        def documents(self, start=0):
          for i in range(start, 100):
            yield Document('header' * 9 * (i < 90) + f'{i:04}' * 20, '', str(i))
        def fingerprint(self):
          return ''
      """)
  )
  source = import_file(tmp_path / 'mine.py').Numbers()
  packed, _ = open_packed(config(source=source), str(tmp_path / 'out'), 1)
  starts = [
    document.text[:16].encode()
    for document in source.documents()
    if source.held_out(document.name, 0.2)
  ]
  assert 1 < len(set(starts)) < len(starts)  # texts with the header have one start
  probes = packed.prompts(len(set(starts)), 16).astype(np.uint8)
  assert {bytes(ids - 2) for ids in probes} == set(starts)


_OTHER = {'tokenizer': _BPE, 'context': 24, 'bos': True}


@pytest.fixture(scope='module')
def source(config, tmp_path_factory):
  """A packed folder of other settings than the default."""
  folder = str(tmp_path_factory.mktemp('out'))
  open_packed(config(**_OTHER), folder)
  return PackedDataset(path=folder)


def test_a_packed_dataset_brings_its_settings(config, source):
  built = as_packed(DataConfig(source=source))
  assert built == config(**_OTHER, source=source, ids=300)
  assert as_packed(built) == built
  run, _ = completed(changed(Experiment(), {'data.source': source, 'probe.length': 16}))
  assert run.data == built
  assert run.model_config().vocab_size == 300
  data, direct = open_data(DataConfig(source=source)), open_data(config(**_OTHER))
  assert_same_batches(data.batch(3, 4, 0), direct.batch(3, 4, 0))


@pytest.mark.parametrize('option, value', [('context', 25), ('valid_fraction', 0.3)])
def test_a_packed_dataset_refuses_other_settings(source, option, value):
  with pytest.raises(ValueError, match=f'was built with .*data.{option}='):
    as_packed(DataConfig(source=source, **{option: value}))


def test_a_folder_of_another_version_is_refused_with_the_command_that_packs_it_again(
  packed, tmp_path
):
  folder = shutil.copytree(packed.folder, tmp_path / 'copy')
  manifest = json.loads((folder / 'manifest.json').read_text())
  (folder / 'manifest.json').write_text(json.dumps(manifest | {'format': FORMAT - 1}))
  with pytest.raises(ValueError, match=f'^{folder} was packed by another version') as error:
    open_data(DataConfig(source=PackedDataset(path=str(folder))))
  shutil.rmtree(folder)
  _, _, command = str(error.value).partition('python -m sink_jax ')

  # Rows of 17 tokens are too short for the probe of the default config.
  code, _, said = run_here(*shlex.split(command), '--config.probe.length=16')
  assert code == 0, said
  assert_array_equal(all_rows(Packed(folder)), all_rows(packed))
