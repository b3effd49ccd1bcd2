"""Which options every analysis reads; those that it does not read are refused."""

import dataclasses

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import hellaswag, registry, runner
from sink_jax.analyses.loaded_models import LoadedModel
from sink_jax.analyses.options import Options
from sink_jax.data.tokenizer import Bytes
from tests.analyses.small import analyse_models, random_inputs, repeated_inputs, small_run
from tests.pretrained import tiny


class Watched(Options):
  """Options that remember which of their fields were read."""

  def __getattribute__(self, name):
    own = object.__getattribute__(self, '__dict__')
    if name in Options.__dataclass_fields__ and name not in own.get('replaced', ()):
      own.get('seen', set()).add(name)
    return object.__getattribute__(self, name)

  def at_a_time(self, length):
    return self.batch_size or length

  @classmethod
  def of(cls, seen, own, replaced=()):
    watched = object.__new__(cls)
    watched.__dict__.update(own, seen=seen, replaced=replaced)
    return watched


@pytest.fixture(scope='module')
def subject():
  """A model that every analysis can be carried out on, as far as it needs no download."""
  return LoadedModel(small_run(vocab_size=258), Bytes().open())


@pytest.mark.every(3)
@pytest.mark.parametrize('name', registry.ANALYSES)
def test_the_table_names_the_options_that_an_analysis_reads(name, subject, monkeypatch, tmp_path):
  for domain in ('a', 'b'):
    (tmp_path / domain).mkdir()
    (tmp_path / domain / 'a.txt').write_text(f'text of the domain {domain} ' * 9)
  analysis = registry.find(name)
  module = analysis.module
  replace = dataclasses.replace
  monkeypatch.setattr(dataclasses, 'replace', lambda x, **changes: Watched.of(
      x.__dict__['seen'], {**x.__dict__, **changes}, changes) if isinstance(x, Watched)
      else replace(x, **changes))
  monkeypatch.setattr(hellaswag, 'hellaswag_accuracy', lambda *_, **__: {})
  run = subject.run
  if name == 'positions':
    run = small_run(vocab_size=258, attention=sj.AttentionSpec(position=sj.Learned(max_length=16)))
  made, read = set(), set()
  for kind in ('natural', 'random', 'repeat') if 'inputs' in analysis.inputs else ('natural',):
    own = vars(Options(inputs=kind, sequences=2, length=8, lengths=(4, 8), source=str(tmp_path),
                       cache_size=6, sinks=2, batch_size=2))
    inputs = analysis.make_inputs(LoadedModel(run, subject.tokenizer), Watched.of(made, own))
  module.measure(run, inputs, Watched.of(read, own))
  made, read = made - {'say'}, read - {'say'}
  assert made == set(analysis.inputs) and read == set(analysis.reads)


@pytest.mark.parametrize('name, options, words', [
    ('norms', dict(layers=(98,), heads=(76,), cache_size=3), '--layers would change nothing: norms '
     'takes --inputs, --source, --sequences, --length, --bos, --seed, --dtype, (--fsdp, )?--batch_size'),
    ('lengths', dict(length=8), '--length would change nothing: lengths takes .*--lengths'),
    ('domains', dict(inputs='random'), '--inputs would change nothing'),
    ('norms', dict(source='Stdlib()', inputs='random'), '--inputs=random reads no text'),
    ('norms', dict(seed=1), '--seed would change nothing: .*--inputs=random'),
    ('maps', dict(dtype='bfloat16'), '--dtype would change nothing')])
def test_options_that_would_change_nothing(name, options, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    sj.analyse(name, small_run(), **options)
  if 'dtype' not in options:
    with pytest.raises(ValueError, match=words):
      analyse_models(name, ['no such model'], [], tmp_path / 'out', **options)
    assert not (tmp_path / 'out').exists()


def test_which_options_are_taken_goes_by_what_is_looked_at(tmp_path):
  tokens = np.ones((2, 5), int)
  for options in (dict(inputs='random'), dict(sequences=3), dict(fsdp=2)):
    with pytest.raises(ValueError, match='would change nothing: norms takes --dtype, --batch_size'):
      sj.analyse('norms', small_run(), tokens, **options)
  with pytest.raises(ValueError, match='--fsdp would change nothing'):
    analyse_models('norms', [], ['a run'], tmp_path, fsdp=2)
  with pytest.raises(ValueError, match='--sequences would .* repeated_tokens takes --length, --eps'):
    analyse_models('repeated_tokens', [], [], tmp_path, sequences=3)
  kinds = registry.find('kinds')
  assert kinds.options(seed=1, source='Stdlib()').seed == 1  # text and drawn tokens, both
  assert registry.find('positions').options(seed=1).inputs == 'repeat'
  with pytest.raises(ValueError, match='--source would change nothing: --inputs=repeat'):
    registry.find('positions').options(source='Stdlib()')
  assert '--cache_size --sinks' in registry.as_text()


def test_options_that_do_not_exist_name_the_nearest():
  with pytest.raises(ValueError, match="maps: there is no option 'layer'. Did you mean layers"):
    sj.analyse('maps', small_run(), layer=1)


@pytest.mark.parametrize('name', ['maps', 'angles', 'last_query'])
def test_blocks_and_heads_out_of_range_name_the_range(name):
  tokens = np.ones((2, 5), int)
  with pytest.raises(ValueError, match='--layers=99: .* this model has it in 1,2'):
    sj.analyse(name, small_run(), tokens, layers=(98,))
  with pytest.raises(ValueError, match='--heads=77: this model has the heads 1 to 4'):
    sj.analyse(name, small_run(), tokens, heads=(76,))


@pytest.mark.parametrize('name', [name for name in registry.ANALYSES if name != 'domains'])
def test_no_analysis_prints_what_is_no_number(name, subject, monkeypatch):
  run = subject.run if name != 'positions' else small_run(
      vocab_size=258, attention=sj.AttentionSpec(position=sj.Learned(max_length=16)))
  kernel = run.params['blocks']['attention']['value']['kernel']
  params = run.params | {'blocks': run.params['blocks'] | {'attention': run.params['blocks'][
      'attention'] | {'value': {'kernel': kernel.at[0, 0, 0].set(np.nan)}}}}
  monkeypatch.setattr(hellaswag, 'hellaswag_accuracy', lambda *_, **__: {})
  inputs = random_inputs(2, 8)
  inputs = dataclasses.replace(inputs, tokenizer=subject.tokenizer)
  if name == 'repeated_tokens':
    inputs = repeated_inputs(2, 8)
  if name == 'kinds':
    inputs.description['kinds'] = [inputs.description]
  options = Options(lengths=(4, 8), length=8, cache_size=6, sinks=2)
  with pytest.raises(ValueError, match='finite.*kernel\\[0\\]|is nan: weights are finite'):
    runner.measure(registry.find(name), LoadedModel(dataclasses.replace(run, params=params),
                                                    subject.tokenizer), options, inputs)


def test_a_published_model_with_a_tensor_that_is_not_finite_is_not_analysed(tmp_path):
  own = tiny.tensors(tiny.LLAMA)
  own['lm_head.weight'][2, 3] = np.inf
  tiny.write(tmp_path / 'model', arrays=own)
  with pytest.raises(ValueError, match=r'the tensor lm_head.weight holds inf at \[2, 3\]'):
    analyse_models('norms', [str(tmp_path / 'model')], [], tmp_path / 'out', inputs='random')
