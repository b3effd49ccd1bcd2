"""The chunk cache: content, reuse, interruption, concurrency, errors."""

import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from sink_jax.cli import data_build
from sink_jax.data import prepare
from sink_jax.data.cache import Cache
from sink_jax.data.sources import Jsonl, PackedDataset, TextFolder, held_out
from sink_jax.data.prepare import open_cache
from sink_jax.data.stdlib import Stdlib
from sink_jax.data.tokenizer import ByteEncoder, Bytes, TrainedBpe
from sink_jax.io import build_once
from sink_jax.io.build_once import _publish, fcntl
from sink_jax.io.paths import cache_root
from tests.data.building import build

_VALID = 0.2


def _open(source, context=16, **options):
  return open_cache(source, options.pop('tokenizer', Bytes()), context,
                    options.pop('bos', False), valid_fraction=_VALID, **options)


def _expected(source, domain, valid, context, bos, eos):
  """Concatenate-and-cut, written independently of the package."""
  stream = []
  for document in source.documents():
    if document.domain == domain and held_out(document.name, _VALID) == valid:
      stream += [0] * bos + [2 + b for b in document.text.encode()] + [0] * eos
  chunks = len(stream) // (context + 1)
  return np.array(stream[:chunks * (context + 1)]).reshape(chunks, context + 1), len(stream)


@pytest.mark.parametrize('bos,eos', [(False, True), (True, True), (False, False)])
def test_chunks_are_the_joined_documents_of_each_domain(corpus, bos, eos):
  cache = _open(corpus, bos=bos, eos=eos)
  assert cache.domains == ['prose', 'verse']
  for split in ('train', 'valid'):
    expected = [_expected(corpus, d, split == 'valid', 16, bos, eos) for d in cache.domains]
    table = cache.tables[split]
    np.testing.assert_array_equal(table.take(np.arange(len(table))),
                                  np.concatenate([chunks for chunks, _ in expected]))
    for domain, (chunks, tokens) in zip(cache.domains, expected, strict=True):
      entry = cache.manifest['domains'][domain][split]
      assert (entry['chunks'], entry['tokens']) == (len(chunks), tokens)
  documents = [cache.manifest['domains']['prose'][s]['documents'] for s in ('train', 'valid')]
  assert sum(documents) == 60 and min(documents) > 0


def test_a_table_reads_rows_in_any_order(corpus):
  table = _open(corpus).tables['train']
  whole = table.take(np.arange(len(table)))
  rows = np.random.default_rng(0).integers(0, len(table), 200)
  np.testing.assert_array_equal(table.take(rows), whole[rows])


def test_one_long_document_is_split_by_chunks(tmp_path):
  (tmp_path / 'one').mkdir()
  text = ''.join(chr(97 + i % 26) for i in range(1705))
  for name in ('first.txt', next(f'{i}.txt' for i in range(99) if held_out(f'{i}.txt', _VALID))):
    for old in (tmp_path / 'one').iterdir():
      old.unlink()
    (tmp_path / 'one' / name).write_text(text)
    cache = _open(TextFolder(path=str(tmp_path / 'one')))
    assert cache.manifest['domains']['text']['split_by'] == 'chunks'
    train, valid = (cache.tables[s].take(np.arange(len(cache.tables[s]))) for s in ('train', 'valid'))
    assert (len(train), len(valid)) == (80, 20)
    stream = ByteEncoder().encode(text)[:1700]
    np.testing.assert_array_equal(np.concatenate([train, valid]).ravel(), stream)
    np.testing.assert_array_equal(cache.probes(17), valid)


def test_probes_are_the_beginnings_of_validation_documents(corpus):
  cache = _open(corpus, context=256, bos=True)
  starts = {d.domain: [] for d in corpus.documents()}
  for document in corpus.documents():
    if held_out(document.name, _VALID) and len(document.text) >= 100:
      starts[document.domain].append(ByteEncoder().encode(document.text)[:100])
  probes = cache.probes(100)
  assert len(probes) == sum(map(len, starts.values())) > 4
  for i in range(3):  # the domains take turns
    np.testing.assert_array_equal(probes[2 * i], starts['prose'][i])
    np.testing.assert_array_equal(probes[2 * i + 1], starts['verse'][i])
  assert 0 < len(cache.probes(257)) < len(probes)


def test_probe_prompts_are_the_first_of_each_length(monkeypatch):
  from sink_jax.data import probe_prompts
  monkeypatch.setattr(probe_prompts, '_KEPT', 5)
  lengths = np.random.default_rng(0).integers(1, 40, 400)
  pool = probe_prompts.ProbePrompts(30)
  for i, length in enumerate(lengths):
    pool.add(np.full(length, i))
  kept = [(int(p[0]), len(p)) for p in pool._prompts]
  assert len(kept) < 200
  for wanted in (1, 10, 30):
    first = [i for i, length in enumerate(lengths) if length >= wanted][:5]
    assert [i for i, length in kept if length >= wanted][:5] == first


def test_cache_is_reused_and_its_key_sees_every_setting(corpus, cache_folder, monkeypatch):
  first = _open(corpus)
  with monkeypatch.context() as patch:
    patch.setattr(prepare, 'CacheBuilder', None)  # a second build would fail
    assert _open(corpus).folder == first.folder
  others = [_open(corpus, context=17), _open(corpus, bos=True), _open(corpus, eos=False),
            _open(corpus, tokenizer=TrainedBpe(vocab_size=270)),
            open_cache(corpus, Bytes(), 16, False, valid_fraction=0.3)]
  (cache_folder.parent / 'corpus' / 'prose' / 'new.txt').write_text('more')
  others.append(_open(corpus))
  assert len({first.folder, *(o.folder for o in others)}) == 7
  assert all(o.folder.parent == cache_folder for o in others)


def test_an_interrupted_build_is_never_used(corpus, cache_folder, monkeypatch):
  def killed(self, path):
    raise KeyboardInterrupt
  with monkeypatch.context() as patch:
    patch.setattr(ByteEncoder, 'save', killed)
    with pytest.raises(KeyboardInterrupt):
      _open(corpus)
  assert [path.suffix for path in cache_folder.iterdir()] == ['.partial']
  complete = _open(corpus).folder
  assert list(cache_folder.iterdir()) == [complete]
  assert not (complete / 'lock').exists() and not (complete / 'work').exists()
  # A copy by hand that was broken off, and what another host began and never went on with:
  for name in ('train.000.npy', 'manifest.json'):
    (complete / name).unlink()
  leftover = cache_folder / 'other.partial'
  shutil.copytree(complete, leftover)
  assert len(_open(corpus).tables['train']) > 0
  assert leftover.exists()
  for path in [leftover, *leftover.iterdir()]:
    os.utime(path, (1, 1))
  _open(corpus)
  assert not leftover.exists()


def test_damaged_cache_files_are_named(corpus):
  folder = _open(corpus).folder
  data = (folder / 'train.001.npy').read_bytes()
  (folder / 'train.001.npy').write_bytes(data[:-10])
  with pytest.raises(ValueError, match=r'train\.001\.npy is missing or damaged.*delete'):
    _open(corpus)
  shutil.copy(folder / 'valid.001.npy', folder / 'train.001.npy')
  manifest = json.loads((folder / 'manifest.json').read_text())
  del manifest['files']  # as in older caches
  (folder / 'manifest.json').write_text(json.dumps(manifest))
  with pytest.raises(ValueError, match=r'train\.001\.npy holds uint16.*delete'):
    _open(corpus)
  (folder / 'manifest.json').write_text(json.dumps(manifest | {'format': 0}))
  with pytest.raises(ValueError, match='cache format 0'):
    Cache(folder)
  (folder / 'manifest.json').write_text('{')
  with pytest.raises(ValueError, match='not a chunk cache'):
    Cache(folder)


def test_without_locks_the_slower_of_two_builds_takes_the_result_of_the_faster(
    corpus, cache_folder, monkeypatch):
  def refused(file, kind):
    raise OSError(errno.ENOLCK, 'no locks')
  monkeypatch.setattr(fcntl, 'flock', refused)
  publish, folders = _publish, []

  def overtaken(partial, final):
    monkeypatch.setattr(build_once, '_publish', publish)
    folders.append(_open(corpus).folder)  # another process finishes in between
    stamp = final.stat().st_ino, (final / 'manifest.json').stat().st_mtime_ns
    publish(partial, final)
    assert (final.stat().st_ino, (final / 'manifest.json').stat().st_mtime_ns) == stamp
  monkeypatch.setattr(build_once, '_publish', overtaken)
  assert _open(corpus).folder == folders[0]
  assert folders[0] in cache_folder.iterdir() and not list(cache_folder.glob('*.partial-*'))


def test_two_processes_at_once_and_the_command_line(corpus, cache_folder):
  command = [sys.executable, '-m', 'sink_jax.data.build', '--source', repr(corpus),
             '--tokenizer', 'TrainedBpe(vocab_size=300)', '--context', '8']
  running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
             for _ in range(2)]
  outputs = [p.communicate() for p in running]
  assert [p.returncode for p in running] == [0, 0], outputs
  printed = [out.splitlines()[0] for out, _ in outputs]
  assert printed[0] == printed[1]
  assert not any('tokenizing' in err for _, err in outputs)  # no progress bar off a terminal
  assert sorted(p.name for p in cache_folder.iterdir()) == sorted(
      ['tokenizers', printed[0].rsplit('/', 1)[1]])
  failed = subprocess.run([*command[:4], 'TextFolder()'], capture_output=True, text=True)
  assert failed.returncode == 1 and 'needs the path' in failed.stderr
  assert 'Traceback' not in failed.stderr


def test_the_command_prints_what_both_sides_of_the_split_have(tmp_path, capsys, monkeypatch):
  for name in ('a', 'b'):
    (tmp_path / name).mkdir()
    for i in range(20):
      letters = np.random.default_rng(i % 10 if name == 'a' else i // 2 + 5).integers(97, 123, 200)
      (tmp_path / name / f'{i}.txt').write_text(letters.astype(np.uint8).tobytes().decode())
  a, b = (f"TextFolder(path='{tmp_path / name}')" for name in 'ab')

  def printed(*arguments):
    assert build('--context=16', *arguments) is None
    return capsys.readouterr().out.splitlines()
  assert printed('--source', a, '--valid_fraction=0.2')[-1] == (
      '100.0% of the windows of 64 characters of validation text are also in training text')
  lines = printed('--source', a, '--valid_source', b)
  assert lines[-1].startswith('50.0% of the windows')
  assert [Cache(pathlib.Path(line)).manifest['valid_fraction']
          for line in lines if line.startswith('/')] == [0, 1]
  assert 'windows' not in printed('--source', f'PackedDataset(path={lines[0]!r})', '--valid_source',
                                  f'PackedDataset(path={[x for x in lines if x[0] == "/"][1]!r})')[-1]
  monkeypatch.setattr(data_build, '_COMPARED', 1000)
  assert printed('--source', a, '--valid_source', b)[-1].endswith('million characters')
  (tmp_path / 'a' / '0.txt').write_text('letters ' * 50)
  [(tmp_path / 'a' / f'{i}.txt').unlink() for i in range(1, 20)]
  assert printed('--source', a, '--valid_fraction=0.2')[-1].startswith('text: too few documents')


@pytest.mark.parametrize('arguments, words', [
    (['--verify=a', '--context=8'], '--context is not used: --verify builds nothing'),
    (['--verify=a', '--no-eos'], '--eos is not used'),
    (['--source=Bytes()'], 'Unknown DocumentSource'),
    (["--source=PackedDataset(path='a')", '--workers=2'], '--workers is not used: .* built already'),
    (['--valid_source=Stdlib()', '--valid_fraction=0.1'], '--valid_fraction is not used'),
    (['--context=0'], 'must be at least 1'), (['--workers=-1'], 'must be at least 0'),
    (['--valid_fraction=1'], 'between 0 and 1')])
def test_options_of_a_build_that_nothing_reads_are_refused(arguments, words):
  assert re.match(f'error: .*{words}', build(*arguments))


def test_large_vocabularies_are_stored_in_32_bits(corpus, monkeypatch):
  monkeypatch.setattr(ByteEncoder, 'vocab_size', 65537)
  monkeypatch.setattr(ByteEncoder, 'encode_batch', lambda self, texts: [
      np.frombuffer(t.encode(), np.uint8).astype(np.int32) + 65000 for t in texts])
  table = _open(corpus).tables['train']
  assert table.take(np.arange(len(table))).max() == 65000 + ord('z')


def test_prepared_opens_a_copied_folder_with_the_same_settings_only(corpus, tmp_path):
  folder = _open(corpus).folder.rename(tmp_path / 'copied')
  shutil.rmtree(tmp_path / 'corpus')
  copied = PackedDataset(path=str(folder))
  assert len(_open(copied).tables['train']) > 0
  with pytest.raises(ValueError, match='context=16, not 32'):
    _open(copied, context=32)
  with pytest.raises(ValueError, match='bos=False, not True'):
    _open(copied, bos=True)
  with pytest.raises(ValueError, match=r"tokenizer='Bytes\(\)', not 'TrainedBpe"):
    _open(copied, tokenizer=TrainedBpe())


def test_errors_of_small_and_odd_corpora(tmp_path):
  folder = tmp_path / 'small'
  (folder / 'tiny').mkdir(parents=True)
  (folder / 'tiny' / 'a.txt').write_text('')
  source = TextFolder(path=str(folder))
  with pytest.raises(ValueError, match='no documents with any text'):
    _open(source)
  (folder / 'tiny' / 'a.txt').write_text('just a few words')
  with pytest.raises(ValueError, match=r"'tiny' has 17 tokens in 1 documents.*= 17.*lower the context"):
    _open(source)
  assert len(_open(source, context=4).tables['valid']) == 1
  (folder / 'tiny').rename(folder / 'valid')
  with pytest.raises(ValueError, match="called 'valid'.*rename"):
    _open(source, context=4)
  with pytest.raises(ValueError, match='context=0'):
    _open(source, context=0)
  lines = ''.join(json.dumps({'text': 'x', 'id': str(i)}) + '\n' for i in range(300))
  (tmp_path / 'ids.jsonl').write_text(lines)
  with pytest.raises(ValueError, match='More than 256 domains.*domain_field'):
    _open(Jsonl(path=str(tmp_path / 'ids.jsonl'), domain_field='id'))


def test_stdlib_end_to_end():
  cache = _open(Stdlib(max_files=40), context=32)
  assert cache.domains == ['code', 'docs'] and len(cache.probes(32)) > 5
  text = cache.encoder.decode(cache.tables['train'].take(np.arange(3)).ravel())
  first = next(d for d in Stdlib(max_files=40).documents() if not held_out(d.name, _VALID))
  assert text.startswith(first.text[:90])


def test_a_source_decides_what_is_held_out():
  source = Stdlib(domains='code', max_files=40, split='content')
  held = [d.text for d in source.documents() if source.held_out(d.name, _VALID)]
  training = [d.text for d in source.documents() if not source.held_out(d.name, _VALID)]
  assert held != [d.text for d in source.documents() if held_out(d.name, _VALID)]
  cache = _open(source, context=32)
  for split, texts in (('train', training), ('valid', held)):
    stream = cache.tables[split].take(np.arange(len(cache.tables[split]))).ravel()
    expected = np.concatenate([[*ByteEncoder().encode(text), 0] for text in texts if text])
    np.testing.assert_array_equal(stream, expected[:len(stream)])
  assert list(TrainedBpe()._texts(source, _VALID)) == [text for text in training]


def test_cache_root(monkeypatch, tmp_path):
  assert cache_root(str(tmp_path)) == tmp_path
  assert cache_root() == tmp_path / 'cache'  # the environment variable of the fixture
  monkeypatch.delenv('SINK_JAX_CACHE')
  assert cache_root().parts[-2:] == ('.cache', 'sink_jax')
