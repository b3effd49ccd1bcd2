"""Checkpoint folders: what their headers say, and errors that name the file and the remedy."""

import json

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import sink_jax as sj
from sink_jax.pretrained.files import INDEX, WEIGHTS, Checkpoint
from tests.pretrained import tiny

SECOND = 'model-00002-of-00003.safetensors'


@pytest.mark.parametrize('files', [1, 3])
def test_tensors_are_listed_file_after_file_and_read_one_by_one(tmp_path, files):
  arrays = tiny.write(tmp_path, files=files)
  checkpoint = Checkpoint(tmp_path)
  assert set(checkpoint.entries) == set(arrays)
  in_order = [entry.file for entry in checkpoint.entries.values()]
  assert in_order == sorted(in_order)
  assert len(set(in_order)) == files
  for name, x in arrays.items():
    entry = checkpoint.entries[name]
    assert (entry.shape, entry.dtype) == (x.shape, 'F32')
    assert_array_equal(checkpoint.read(name), x)


def refused(read, folder, words):
  """A reader names the folder and these words, in one line."""
  with pytest.raises(ValueError) as caught:
    read(folder)
  for word in [*words, str(folder)]:
    assert word in str(caught.value)
  assert '\n' not in str(caught.value)


def only(name, content=b''):
  """Replaces all weight files by one file."""

  def edit(folder):
    for path in folder.glob('*.safetensors*'):
      path.unlink()
    (folder / name).write_bytes(content)

  return edit


POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n'


def content(name, data):
  """Writes other bytes into a file of the folder; None: deletes it."""
  return lambda folder: (
    (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
  )


@pytest.mark.parametrize(
  'edit, said',
  [
    (content(SECOND, POINTER), [SECOND, 'git lfs pull']),
    (content(INDEX, POINTER), [INDEX, 'git lfs pull']),
    (content('config.json', '{}'.encode('utf-16')), ['config.json', 'iconv -f UTF-16 ']),
    (content('config.json', None), ['config.json']),
    (content('config.json', b'{'), ['config.json', 'JSON']),
    (content('config.json', b'[1]'), ['config.json', 'JSON object']),
    (only('notes.txt'), [WEIGHTS, 'incomplete']),
    (only('pytorch_model.bin'), ['run any code', 'AutoModelForCausalLM.from_pretrained(']),
    (only('x.gguf'), ['x.gguf', 'give that file']),
    (only('data.json', b'{}'), ['run trained with sink_jax', '--workdir']),
    (only('adapter_config.json', b'{}'), ['adapter', 'merge_and_unload']),
    (content(SECOND, None), [SECOND]),
    (content(SECOND, bytes(100)), [SECOND, 'damaged or incomplete', 'download it again']),
    (content(INDEX, b'{}'), [INDEX, 'weight_map']),
    (content(INDEX, b'[]'), [INDEX]),
    (content(INDEX, b'{"weight_map": {"x": 5, "y": "z"}}'), [INDEX]),
  ],
)
def test_what_is_wrong_with_a_folder_is_named(tmp_path, edit, said):
  tiny.write(tmp_path, files=3)
  edit(tmp_path)
  refused(Checkpoint, tmp_path, said)


@pytest.mark.parametrize(
  'renamed, said',
  [
    (lambda name: f'_orig_mod.{name}', ['torch.compile', '_orig_mod']),
    (lambda name: name.replace('mlp', 'mlp._orig_mod'), ['torch.compile', '_orig_mod']),
    (lambda name: f'module.{name}', ['DistributedDataParallel', 'module.']),
    (lambda name: f'base_model.model.{name}', ['merge_and_unload', 'base_model.model.']),
  ],
)
def test_a_model_that_was_saved_in_its_wrapper_is_named(tmp_path, renamed, said):
  arrays = {renamed(name): x for name, x in tiny.tensors(tiny.LLAMA).items()}
  tiny.write(tmp_path, arrays=arrays)
  refused(sj.load_pretrained, tmp_path, said)


def test_a_byte_order_mark_in_config_json_does_not_matter(tmp_path):
  tiny.write(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps(tiny.LLAMA), encoding='utf-8-sig')
  assert Checkpoint(tmp_path).config == tiny.LLAMA


def test_a_tensor_that_its_shard_lacks_is_missing(tmp_path):
  tiny.write(tmp_path, files=3)
  tiny.save_file({'model.norm.weight': np.zeros(8, np.float32)}, tmp_path / SECOND)
  with pytest.raises(ValueError, match='lacks tensors: model.layers'):
    sj.load_pretrained(tmp_path)


def test_a_published_model_is_not_a_run(tmp_path):
  tiny.write(tmp_path)
  with pytest.raises(ValueError, match='--checkpoint'):
    sj.load_run(tmp_path)
