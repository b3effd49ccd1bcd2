"""--as=custom: the PyTorch file beside the weights, and what the exporter lets through to it.

What the file computes is compared in test_parity.py, where PyTorch is.
"""

import dataclasses
import json
import py_compile
import re

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import registry
from sink_jax.models.config import CHOICES, Experts, Layer, Mamba
from sink_jax.pretrained import to_custom
from sink_jax.pretrained.export import export_checkpoint
from sink_jax.pretrained.files import Checkpoint
from tests.pretrained import exported_cases

CASES = {name: exported_cases.config_of(options, **components)
         for name, (target, options, components) in exported_cases.CASES.items()
         if target == 'custom'}
CODE = to_custom.code()


def test_the_file_compiles_is_short_and_names_what_it_is_given(tmp_path):
  file = tmp_path / 'modeling.py'
  file.write_text(CODE)
  py_compile.compile(str(file), doraise=True)
  assert len(CODE.splitlines()) <= 250
  assert set(re.findall(r'^(?:from|import) (\w+)', CODE, re.MULTILINE)) == {
      'math', 'types', 'torch', 'transformers'}
  words = set(re.findall(r'\w+', CODE))
  assert {name for classes in to_custom.PARTS.values() for name in classes} <= words


def test_all_that_passes_has_a_case_that_is_compared():
  specs = [config.attention_of(layer) for config in CASES.values() for layer in config.pattern]
  for kind, classes in to_custom.PARTS.items():
    assert {type(getattr(spec, kind)).__name__ for spec in specs} == set(classes), kind
  for name, choices in to_custom.MODEL.items():
    given = [getattr(config, name) for config in CASES.values()]
    assert len(set(given)) > 1 or name in ('vocab_size', 'd_model', 'ffn_hidden', 'norm_eps')
    if choices is not None:
      assert {x for value in given for x in (value if isinstance(value, tuple) else (value,))
              } == set(choices), name


def components():
  """Every class of every part of attention, with defaults."""
  return [(kind, cls) for kind, base in COMPONENTS.items() for cls in registry(base).values()
          if cls.__module__.startswith('sink_jax.')]


def test_what_the_file_does_not_know_is_refused(tmp_path, monkeypatch):
  config = exported_cases.config_of({})
  for kind, cls in components():
    part = to_custom._part_refusal(kind, cls(), None)
    assert (part is None) == (cls.__name__ in to_custom.PARTS[kind]), cls
  for options, message in (
      (dict(pattern=(Layer(experts=Experts(2, 1)),)), 'custom has no model.pattern = .*experts=Ex'),
      (dict(pattern=(Layer(), Layer(mamba=Mamba(8, 2, 2, 2)))), 'custom has no model.pattern'),
      (dict(ffn='clamped_swiglu'), "custom has no model.ffn = 'clamped_swiglu'.*'relu', 'gelu'"),
      (dict(embedding_dim=8), 'custom has no model.embedding_dim = 8 .but None'),
      (dict(attention=sj.AttentionSpec(kv_bias='PseudoMask()')),
       r'custom has no attention.kv_bias = PseudoMask\(.*NoBias, KBias')):
    run = sj.Run(dataclasses.replace(config, **options), {})
    with pytest.raises(ValueError, match=f'--as=custom cannot hold this run: {message}'):
      export_checkpoint(run, tmp_path / 'out', target='custom')
    with pytest.raises(ValueError, match=f'has no counterpart.*Nor can --as=custom.*: {message}'):
      export_checkpoint(run, tmp_path / 'out')
  # Classes, fields and parts that are not listed are those that somebody adds.
  qk_norm = sj.AttentionSpec(qk_norm='QKNorm(eps=0.5)')
  for change, spec, named in (
      (('position', {'Nope': ''}), sj.AttentionSpec(), r'attention.position = Rope\('),
      (('qk_norm', {'QKNorm': ''}), qk_norm, r'attention.qk_norm = QKNorm.*\(but eps=1e-06\)'),
      (('qk_norm', None), qk_norm, r'attention.qk_norm = QKNorm.*\(but NoQKNorm\(\)\)')):
    with monkeypatch.context() as patch:
      patch.setattr(to_custom, 'PARTS', {k: v for k, v in (to_custom.PARTS | dict(
          [change])).items() if v is not None})
      run = sj.Run(dataclasses.replace(config, attention=spec), {})
      with pytest.raises(ValueError, match=f'--as=custom.*custom has no {named}'):
        export_checkpoint(run, tmp_path / 'out', target='custom')
  assert not (tmp_path / 'out').exists()
  assert set(to_custom.PARTS) <= set(COMPONENTS) and {'norm', 'ffn'} < set(CHOICES) & set(
      to_custom.MODEL)


def test_custom_is_named_where_it_can_hold_the_run(tmp_path):
  sink = exported_cases.case_of('custom_powers')[1]
  for options, message in ((dict(target='llama'), '--as=custom can hold this run'),
                           ({}, '--as=custom writes it with a PyTorch file of its own')):
    with pytest.raises(ValueError, match=message):
      export_checkpoint(sink, tmp_path / 'out', sink_id=3, **options)
  with pytest.raises(ValueError, match='--as=qwen3 cannot hold.*--as=granite_swa can'):
    export_checkpoint(exported_cases.case_of('sink_logit')[1], tmp_path / 'out', target='qwen3')


@pytest.mark.parametrize('case', ['custom_clipped', 'custom_softpick', 'custom_kernel'])
def test_the_folder_holds_the_spec_and_the_run_s_numbers(case, tmp_path):
  hf = exported_cases.exported(case, tmp_path)
  run, stored = exported_cases.case_of(case)[1], Checkpoint(tmp_path)
  assert (tmp_path / 'modeling_sink_jax.py').read_text() == CODE
  assert hf == json.loads((tmp_path / 'config.json').read_text())
  assert hf['auto_map']['AutoModelForCausalLM'] == 'modeling_sink_jax.SinkJaxForCausalLM'
  for kind, text in run.config.attention.strings().items():
    part = hf['attention'][kind]
    assert f'{part["name"]}(' in text
    for field in dataclasses.fields(getattr(run.config.attention, kind)):
      assert part[field.name] == getattr(getattr(run.config.attention, kind), field.name)
  shape = lambda *path: tuple(stored.entries['.'.join(path)].shape)
  assert list(shape('layers', '1', 'attention', 'query', 'weight')) == hf['shapes']['block'][
      'attention']['query']['weight']
  if case == 'custom_clipped':  # a pattern: two blocks of each kind, which are kept apart
    assert [[own['mask']['name'], own['position']['name']] for own in hf['blocks']] == [
        ['Window', 'YarnRope'], ['Causal', 'Rope']]
    assert hf['blocks'][0]['position']['amplitude'] == 0.1 * np.log(4) + 1
    for layer in range(4):
      np.testing.assert_array_equal(
          stored.read(f'layers.{layer}.attention.key.weight'),
          run.params['blocks'][f'layer{layer % 2}']['attention']['key']['kernel'][layer // 2].T)
  if case == 'custom_softpick':  # gamma W / sigma(W) of each layer
    own = run.params['blocks']['attention']['value']
    kernel, gamma = (np.asarray(own[name], np.float64)[1] for name in ('kernel', 'gamma'))
    np.testing.assert_allclose(stored.read('layers.1.attention.value.weight'),
                               (gamma / np.linalg.norm(kernel, 2) * kernel).T, rtol=2e-6)
  if case == 'custom_kernel':
    assert shape('sink_tokens') == (2, 32) and hf['bos_token_id'] is None
