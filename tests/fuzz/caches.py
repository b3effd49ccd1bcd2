"""Chunk caches: the manifest, the chunks, the probe prompts, the encoder beside them."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from tests.fuzz import mutate
from tests.fuzz.arrays import changed_npy
from tests.fuzz.inputs import File, Input, Kind


def _prepare(folder):
  from sink_jax.data.sources import Jsonl
  from sink_jax.data.prepare import open_cache
  from sink_jax.data.tokenizer import Bytes, TrainedBpe
  folder.mkdir(parents=True, exist_ok=True)
  rows = [json.dumps({'text': f'{i} cats sat. ' * 9, 'd': 'ab'[i % 2]}) for i in range(60)]
  (folder / 'a.jsonl').write_text('\n'.join(rows))
  made = {}
  for name, tokenizer in (('bytes', Bytes()), ('bpe', TrainedBpe(vocab_size=270))):
    cache = open_cache(Jsonl(path=str(folder / 'a.jsonl'), domain_field='d'), tokenizer, 8, False,
                       valid_fraction=0.3, cache_dir=str(folder / name))
    made[name] = {p.name: p.read_bytes() for p in cache.folder.iterdir()}
    input = Input(base=name)
    input.write(folder / 'copy', made[name])
    _run(None, input, folder / 'copy')
  return made


def _inputs(prepared):
  def of(base):
    own = prepared[base]

    def changes(name):
      if name.endswith('.npy'):
        return changed_npy(own[name])
      if name.endswith('.json'):
        return mutate.changed_json([json.loads(own[name])])
      return mutate.changed_bytes([own[name]])

    # The manifest says what all the other files are.
    one = st.one_of([st.tuples(st.just(name), changes(name).map(File) | (
        st.sampled_from([File(), File(b'', 1 << 30), File(link='/nowhere'), File(link='.'),
                         File(link='/dev/zero'), File(mutate.nested())])))
        for name in [*sorted(own), 'manifest.json', 'manifest.json']])
    return st.builds(lambda pairs, gone: Input('', dict(pairs), (gone,) if gone else (), base),
                     st.lists(one, min_size=1, max_size=2), st.sampled_from(['', '', '', *own]))
  return st.one_of([of(base) for base in sorted(prepared)])


def _run(prepared, input, folder):
  from sink_jax.data.cache_check import check
  from sink_jax.data.corpus import CorpusDataset
  from sink_jax.data.sources import PackedDataset
  from sink_jax.data.prepare import open_cache
  from sink_jax.data.tokenizer import Bytes, TrainedBpe
  tokenizer = Bytes() if input.base == 'bytes' else TrainedBpe(vocab_size=270)
  cache = open_cache(PackedDataset(path=str(folder)), tokenizer, 8, False)
  data = CorpusDataset(cache, (), 0, ())
  data.summary()
  data.probe_tokens(2, 4)
  next(data.batches(0, 2, 0))
  cache.encoder.decode(cache.encoder.encode('cats'))
  check(cache)


KINDS = {'caches': Kind(_prepare, _inputs, _run, ('ValueError', 'OSError'), share=8,
                        bases=lambda prepared: prepared)}
