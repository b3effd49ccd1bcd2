"""Checkpoint folders: what their headers say, and errors that name the file and the remedy."""

import json
import re

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.pretrained import keys
from sink_jax.pretrained.files import INDEX, WEIGHTS, Checkpoint
from tests.pretrained import tiny

SECOND = 'model-00002-of-00003.safetensors'


def refused(folder, *parts):
  with pytest.raises(ValueError) as caught:
    Checkpoint(folder)
  for part in parts:
    assert part in str(caught.value), caught.value


@pytest.mark.parametrize('files', [1, 3])
def test_tensors_are_listed_file_after_file_and_read_one_by_one(tmp_path, files):
  arrays = tiny.write(tmp_path, files=files)
  checkpoint = Checkpoint(tmp_path)
  assert set(checkpoint.entries) == set(arrays)
  in_order = [entry.file for entry in checkpoint.entries.values()]
  assert in_order == sorted(in_order) and len(set(in_order)) == files
  for name, x in arrays.items():
    assert checkpoint.entries[name].shape == x.shape and checkpoint.entries[name].dtype == 'F32'
    np.testing.assert_array_equal(checkpoint.read(name), x)


def test_a_config_that_is_missing_or_no_object(tmp_path):
  refused(tmp_path, str(tmp_path / 'config.json'), 'does not exist', 'choose that folder')
  for text, part in (('{', 'JSON'), ('[1]', 'not list'), ('[' * 10**5, 'JSON'), ('\0', 'JSON')):
    (tmp_path / 'config.json').write_text(text)
    refused(tmp_path, str(tmp_path / 'config.json'), part)
  (tmp_path / 'config.json').write_bytes(b'\xff')
  refused(tmp_path, 'cannot be read as JSON')


def test_an_adapter_is_to_be_merged(tmp_path):
  (tmp_path / 'adapter_config.json').write_text('{"base_model_name_or_path": "a/b"}')
  (tmp_path / 'adapter_model.safetensors').write_bytes(b'')
  for config in (None, '{"model_type": "llama"}'):
    if config:
      (tmp_path / 'config.json').write_text(config)
    with pytest.raises(ValueError, match=r'adapter(?s:.*)merge_and_unload'):
      Checkpoint(tmp_path)


def test_a_folder_without_weights(tmp_path):
  tiny.write(tmp_path)
  (tmp_path / WEIGHTS).unlink()
  refused(tmp_path, WEIGHTS, INDEX, 'incomplete')


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'consolidated.00.pth',
                                  'pytorch_model.bin.index.json'])
def test_pickles_are_never_read_and_the_conversion_is_spelled_out(tmp_path, name):
  tiny.write(tmp_path)
  (tmp_path / WEIGHTS).unlink()
  (tmp_path / name).write_bytes(b'')
  refused(tmp_path, name, 'run any code',
          f"M.from_pretrained('{tmp_path}', torch_dtype='auto').save_pretrained('{tmp_path.name}-")


@pytest.mark.parametrize('size', [0, 7, 100, -1])
def test_a_truncated_file(tmp_path, size):
  tiny.write(tmp_path, files=3)
  whole = (tmp_path / SECOND).read_bytes()
  (tmp_path / SECOND).write_bytes(whole[:size])
  refused(tmp_path, str(tmp_path / SECOND), 'damaged or incomplete', 'download it again')


def test_a_header_that_promises_too_much(tmp_path):
  tiny.write(tmp_path)
  whole = (tmp_path / WEIGHTS).read_bytes()
  (tmp_path / WEIGHTS).write_bytes(b'\xff' * 8 + whole[8:])
  refused(tmp_path, WEIGHTS, 'damaged or incomplete')


def test_a_missing_shard(tmp_path):
  tiny.write(tmp_path, files=3)
  (tmp_path / SECOND).unlink()
  refused(tmp_path, str(tmp_path / SECOND), 'is missing', 'run it again')


def edit_index(folder, edit):
  index = json.loads((folder / INDEX).read_text())
  edit(index)
  (folder / INDEX).write_text(json.dumps(index))


def test_an_index_that_names_what_its_shard_lacks(tmp_path):
  tiny.write(tmp_path, files=3)
  edit_index(tmp_path, lambda index: index['weight_map'].update({'lost.weight': SECOND}))
  refused(tmp_path, INDEX, 'lost.weight', SECOND)


def test_a_tensor_in_two_shards(tmp_path):
  arrays = tiny.write(tmp_path, files=3)
  tiny.save_file({'model.norm.weight': arrays['model.norm.weight']}, tmp_path / SECOND)
  edit_index(tmp_path, lambda index: index.update(
      weight_map={k: v for k, v in index['weight_map'].items() if v != SECOND}
      | {'model.norm.weight': SECOND}))
  refused(tmp_path, 'model.norm.weight', SECOND)


@pytest.mark.parametrize('file', ['../outside.safetensors', '/etc/hostname', '..', '', 'a\\b',
                                  None, 3])
def test_an_index_stays_inside_its_folder(tmp_path, file):
  tiny.write(tmp_path / 'model', files=3)
  tiny.save_file({'x': np.zeros(1)}, tmp_path / 'outside.safetensors')
  edit_index(tmp_path / 'model', lambda index: index['weight_map'].update({'x': file}))
  refused(tmp_path / 'model', INDEX, 'inside' if isinstance(file, str) else 'weight_map')


@pytest.mark.parametrize('index', [{}, {'weight_map': {}}, {'weight_map': [SECOND]}, []])
def test_an_index_without_a_map(tmp_path, index):
  tiny.write(tmp_path, files=3)
  (tmp_path / INDEX).write_text(json.dumps(index))
  with pytest.raises(ValueError, match=re.escape(str(tmp_path / INDEX))):
    Checkpoint(tmp_path)


def test_a_run_of_ours_is_told_apart(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  (tmp_path / 'data.json').write_text('{}')
  with pytest.raises(ValueError, match='is a run trained with sink_jax.*--workdir'):
    Checkpoint(tmp_path)
  with pytest.raises(ValueError, match='--checkpoint'):
    sj.load_run(tiny.write(tmp_path / 'other') and tmp_path / 'other')


def test_more_layers_than_tensors_are_refused_before_they_are_listed(tmp_path):
  tiny.write(tmp_path)
  config = json.loads((tmp_path / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(config | {'num_hidden_layers': 2**12}))
  with pytest.raises(ValueError, match=f'says {2**12} layers'):
    sj.load_pretrained(tmp_path)


def test_an_index_of_mixed_types_is_refused(tmp_path):
  tiny.write(tmp_path, files=3)
  index = json.loads((tmp_path / INDEX).read_text())
  index['weight_map'][next(iter(index['weight_map']))] = 5
  (tmp_path / INDEX).write_text(json.dumps(index))
  refused(tmp_path, INDEX, 'weight_map')


@pytest.mark.parametrize('file', ['x' * 300, 'device.safetensors'])
def test_an_index_that_names_no_file(tmp_path, file):
  tiny.write(tmp_path, files=3)
  (tmp_path / 'device.safetensors').symlink_to('/dev/zero')
  index = json.loads((tmp_path / INDEX).read_text())
  index['weight_map']['x'] = file
  (tmp_path / INDEX).write_text(json.dumps(index))
  refused(tmp_path, file[:20])


@pytest.mark.parametrize('key', ['num_hidden_layers', 'n_layer', 'num_experts'])
def test_more_layers_or_experts_than_any_model_has(key):
  assert keys.size({key: 2**12}, key) == 2**12
  with pytest.raises(ValueError, match=key):
    keys.size({key: 2**12 + 1}, key)
