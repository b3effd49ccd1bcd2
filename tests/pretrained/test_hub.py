"""Names of models, what is downloaded, and errors with the remedy."""

import collections
import os

import huggingface_hub
import pytest
from huggingface_hub import errors

import sink_jax as sj
from sink_jax.pretrained import hub
from sink_jax.pretrained.families import FAMILIES
from tests.pretrained import tiny


def test_the_32_models():
  models = hub.MODELS
  assert len(models) == 32
  assert collections.Counter(m.family for m in models.values()) == {
      'llama': 8, 'gpt2': 4, 'mistral': 2, 'gpt_neox': 10, 'opt': 6, 'jamba': 2}
  assert {m.family for m in models.values()} <= set(FAMILIES)
  assert len({m.hub for m in models.values()}) == 32
  for name, model in models.items():
    assert model.name == name
    if model.counterpart:
      other = models[model.counterpart]
      assert other.counterpart == name and other.tuned != model.tuned
      assert (other.family, other.bos, other.billions) == (model.family, model.bos, model.billions)
    # Files of a family agree with the tokens named here.
    assert bool(model.bos) == (model.family in ('llama', 'mistral', 'opt', 'jamba'))
  assert sum(m.counterpart is not None for m in models.values()) == 10


@pytest.fixture
def downloads(tmp_path, monkeypatch):
  """Downloads that never leave the machine: `answer` is returned, or raised."""
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


@pytest.mark.parametrize('text, repo, name', [
    ('Pythia-14M', 'EleutherAI/pythia-14m', 'Pythia-14M'),
    ('pythia-14m', 'EleutherAI/pythia-14m', 'Pythia-14M'),
    ('LLaMA2-7B chat', 'meta-llama/Llama-2-7b-chat-hf', 'LLaMA2-7B Chat'),
    ('facebook/opt-125m', 'facebook/opt-125m', 'OPT-125M'),
    ('Qwen/Qwen3-0.6B', 'Qwen/Qwen3-0.6B', 'Qwen/Qwen3-0.6B')])
def test_names_are_found_and_downloaded(downloads, text, repo, name):
  assert hub.resolve(text) == (downloads.answer, name)
  (asked, options), = downloads.calls
  assert asked == repo and options.pop('revision') is None
  kept = list(huggingface_hub.utils.filter_repo_objects(
      ['config.json', 'model.safetensors', 'model-00001-of-00002.safetensors', 'merges.txt',
       'model.safetensors.index.json', 'tokenizer.model', 'pytorch_model.bin', 'tf_model.h5',
       'qwen.tiktoken', 'original/model.safetensors', 'consolidated.safetensors'], **options))
  assert kept == ['config.json', 'model.safetensors', 'model-00001-of-00002.safetensors',
                  'merges.txt', 'model.safetensors.index.json', 'tokenizer.model',
                  'qwen.tiktoken']


@pytest.mark.parametrize('text, repo, revision, name', [
    ('pythia-14m@step1000', 'EleutherAI/pythia-14m', 'step1000', 'Pythia-14M@step1000'),
    ('Qwen/Qwen3-0.6B@refs/pr/3', 'Qwen/Qwen3-0.6B', 'refs/pr/3', 'Qwen/Qwen3-0.6B@refs/pr/3'),
    ('GPT2', 'openai-community/gpt2', None, 'GPT2')])
def test_a_revision_of_the_hub(downloads, text, repo, revision, name):
  assert hub.resolve(text) == (downloads.answer, name)
  (asked, options), = downloads.calls
  assert (asked, options['revision']) == (repo, revision)
  downloads.answer = error_of(errors.RevisionNotFoundError)
  with pytest.raises(ValueError, match='no branch, tag or commit'):
    hub.resolve(text)


@pytest.mark.parametrize('text, words', [
    ('Pythia-14M@', 'after @ stands'), ('Pythia-14M@../x', 'after @ stands'),
    ('GPT2@a b', 'after @ stands'), ('Pythia-15M@step1', "Did you mean .*'Pythia-14M'"),
    ('@main', 'neither a folder')])
def test_revisions_that_are_none(downloads, text, words):
  with pytest.raises(ValueError, match=words):
    hub.resolve(text)
  assert not downloads.calls


def test_a_folder_goes_first(downloads, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  tiny.write('Pythia-14M')
  assert hub.resolve('Pythia-14M')[1] == 'Pythia-14M' and not downloads.calls
  assert hub.resolve(tmp_path / 'snapshot') == (tmp_path / 'snapshot', 'snapshot')
  tiny.write('Pythia-14M@step1')
  assert hub.resolve('Pythia-14M@step1')[1] == 'Pythia-14M@step1' and not downloads.calls
  run = sj.load_pretrained('Pythia-14M')
  assert run.name == 'Pythia-14M' and run.bos == 'none' and run.folder == 'Pythia-14M'


@pytest.mark.parametrize('text, meant', [
    ('Pythia-15M', 'Pythia-14M'), ('Llama2-7B', 'LLaMA2-7B Base'), ('GPT-2', 'GPT2'),
    ('opt125m', 'OPT-125M')])
def test_near_names_are_suggested(downloads, text, meant):
  expected = f"neither a folder.*Did you mean [^?]*'{meant}'.*Jamba-v0.1"
  with pytest.raises(ValueError, match=expected):
    hub.resolve(text)
  assert not downloads.calls


@pytest.mark.parametrize('text', ['no/such/folder', './missing', '', '/missing/model', 'x' * 5000])
def test_what_is_no_name_is_not_asked_for(downloads, text):
  with pytest.raises(ValueError, match='neither a folder nor a known model'):
    hub.resolve(text)
  assert not downloads.calls


def error_of(cls, text='said no'):
  error = cls.__new__(cls)
  Exception.__init__(error, text)
  return error


@pytest.mark.parametrize('error, part', [
    (error_of(errors.GatedRepoError), 'is gated: accept its licence.*HF_TOKEN.*folder'),
    (error_of(errors.RepositoryNotFoundError), 'does not exist.*facebook/opt-125m.*HF_TOKEN'),
    (error_of(errors.LocalEntryNotFoundError), 'could not be downloaded .said no.*folder'),
    (OSError('disk full'), 'could not be downloaded .disk full'),
    (RuntimeError('socket'), 'could not be downloaded .socket')])
def test_downloads_that_fail_say_what_to_do(downloads, error, part):
  downloads.answer = error
  with pytest.raises(ValueError, match=part) as caught:
    hub.resolve('facebook/opt-126m')
  # It may have been meant as a folder; a name of the catalogue is none.
  both = f"no folder 'facebook/opt-126m' in {os.getcwd()}, and as the name of a model of the hub: "
  assert both in str(caught.value)
  with pytest.raises(ValueError) as caught:
    hub.resolve('GPT2')
  assert 'no folder' not in str(caught.value)


def test_an_adapter_is_named_as_on_the_hub(downloads):
  (downloads.answer / 'model.safetensors').unlink()
  (downloads.answer / 'adapter_config.json').write_text('{}')
  with pytest.raises(ValueError, match=r"(?s)adapter.*from_pretrained\('a/lora'\).merge_and_unload"):
    hub.resolve('a/lora')


def test_a_model_of_pickles_only_is_explained(downloads):
  (downloads.answer / 'model.safetensors').unlink()
  with pytest.raises(ValueError, match=r"pickles only(?s:.*)from_pretrained\('facebook/opt-125m'"):
    hub.resolve('OPT-125M')
