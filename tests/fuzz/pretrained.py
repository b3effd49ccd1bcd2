"""Published checkpoints: config.json, headers of safetensors files, and their index."""

from __future__ import annotations

import json
import struct

from hypothesis import strategies as st

from tests.fuzz import mutate
from tests.fuzz.child import ROOT
from tests.fuzz.inputs import File, Input, Kind

_FIXTURES = ROOT / 'tests' / 'pretrained' / 'fixtures'
_INDEX = 'model.safetensors.index.json'


def _prepare(folder):
  """A small checkpoint of every family, two that hold more to read, and one in several files."""
  from tests.pretrained import tiny
  made = {}
  firsts = [folder.name for folder in tiny.first_fixtures().values()]
  for case in (*firsts, 'gpt_oss_mxfp4', 'qwen3_window'):
    paths = [_FIXTURES / case / name for name in ('config.json', 'model.safetensors')]
    made[case] = {path.name: path.read_bytes() for path in paths if path.exists()}
  tiny.write(folder / 'sharded', files=3)
  made['sharded'] = {p.name: p.read_bytes() for p in (folder / 'sharded').iterdir()}
  from sink_jax.pretrained.files import Checkpoint
  Checkpoint(folder / 'sharded')
  return made


def _prepare_models(folder):
  made = _prepare(folder)
  made = {case: made[case] for case in ('llama', 'gpt2', 'sharded')}
  for case, files in made.items():
    input = Input(base=case)
    input.write(folder / case, files)
    _run_checkpoint(None, input, folder / case)
  return made


def _split(data):
  size = struct.unpack('<Q', data[:8])[0]
  return json.loads(data[8:8 + size]), data[8 + size:]


def _weights(data):
  """Changed safetensors files: the header, its length, or any byte."""
  header, body = _split(data)
  small = dict(list(header.items())[:4])
  join = lambda text, length: struct.pack('<Q', length) + text
  lengths = st.sampled_from([0, 1, 8, 2**31, 2**32, 2**63, 2**64 - 1, 100_000_000, 99_999_999])
  headers = mutate.changed_json([header, small])
  return st.one_of(
      headers.map(lambda text: join(text, len(text)) + body),
      headers.map(lambda text: join(text, len(text))),
      st.builds(lambda text, n: join(text, n) + body, headers, lengths),
      mutate.changed_bytes([data]), st.just(b''),
      st.just(join(mutate.nested(), 2 * mutate.DEEP)))


def _file_names():
  return st.sampled_from(mutate.PATHS + ['config.json', 'model-00001-of-00003.safetensors', 'a\\b',
                                         _INDEX, 'x' * 300, 'nowhere', 'C:\\x', '//x'])


def _inputs(prepared):
  def of(base):
    own = prepared[base]
    weights = sorted(n for n in own if n.endswith('.safetensors'))
    parts = [st.tuples(st.just('config.json'),
                       mutate.changed_json([json.loads(own['config.json'])]).map(File))]
    parts += [st.tuples(st.just(n), _weights(own[n]).map(File)) for n in weights]
    parts += [st.tuples(st.just((*weights, 'model.safetensors')[0]), st.sampled_from(
        [File(link='/dev/zero'), File(link='../prepared'), File(link='/nowhere'),
         File(own[weights[0]] if weights else b'', 1 << 28), File(b'', 1 << 28)]))]
    if _INDEX in own:
      index = json.loads(own[_INDEX])
      named = st.builds(lambda key, value: json.dumps(
          {'weight_map': index['weight_map'] | {key: value}}).encode(),
          st.sampled_from(sorted(index['weight_map'])) | st.text(mutate.LETTERS, max_size=5),
          _file_names())
      parts += [st.tuples(st.just(_INDEX), (named | mutate.changed_json([index])).map(File))] * 3
    return st.builds(lambda pairs, gone: Input('', dict(pairs), (gone,) if gone else (), base),
                     st.lists(st.one_of(*parts), min_size=1, max_size=2),
                     st.sampled_from(['', '', '', '', *own]))
  return st.one_of([of(base) for base in sorted(prepared)])


def _run(prepared, input, folder):
  from sink_jax.pretrained.files import Checkpoint
  checkpoint = Checkpoint(folder)
  for name in list(checkpoint.entries)[:2]:
    checkpoint.read(name)


def _configs(prepared):
  sizes = st.sampled_from(mutate.NUMBERS)

  def of(base):
    own = json.loads(prepared[base]['config.json'])
    one = st.builds(lambda key, value: own | {key: value}, st.sampled_from(sorted(own)),
                    sizes | mutate.hostile_values())
    more = st.builds(lambda key, value: own | {key: value}, st.sampled_from(
        ['rope_scaling', 'rope_parameters', 'layer_types', 'sliding_window', 'head_dim',
         'quantization_config', 'rope_theta', 'partial_rotary_factor']),
        mutate.hostile_values() | mutate.changed_objects(
            [{'rope_type': 'yarn', 'factor': 2.0, 'original_max_position_embeddings': 8,
              'beta_fast': 32, 'attention_factor': 1.0, 'mscale': 1.0},
             {'type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
              'original_max_position_embeddings': 16}, {'type': 'linear', 'factor': 2.0}]))
    return (one | more | mutate.changed_objects([own])).map(lambda x: Input(json.dumps(x)))
  return st.one_of([of(base) for base in sorted(prepared)])


def _run_config(prepared, input, folder):
  from sink_jax.pretrained.families import family_for
  from sink_jax.pretrained.files import read_object
  (folder / 'config.json').write_text(input.text)
  hf = read_object(folder / 'config.json', 'Download it again.')
  family = family_for(hf)
  config = family.model_config(hf)
  if config.layers < 100:  # load_pretrained asks for as many tensors first
    family.stored_tensors(hf, config)


def _run_checkpoint(prepared, input, folder):
  from sink_jax.models.sizes import parameter_shapes
  from sink_jax.pretrained.load import load_pretrained
  parameter_shapes.cache_clear()
  load_pretrained(folder)


_bases = lambda prepared: prepared
_only_empty = lambda prepared: {'': {}}
KINDS = {
    'headers': Kind(_prepare, _inputs, _run, share=10, bases=_bases),
    'families': Kind(_prepare, _configs, _run_config, share=10, bases=_only_empty),
    'checkpoints': Kind(_prepare_models, _inputs, _run_checkpoint, share=2, batch=200,
                        bases=_bases)}
