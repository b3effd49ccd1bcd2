"""What the folder of an exported run holds: the class, its keys, and numbers that were folded."""

import json
import shutil

import numpy as np
import pytest
import tokenizers

import sink_jax as sj
from sink_jax.data.dataset import DataConfig
from sink_jax.data.token_edits import FixedToken, RandomTokens
from sink_jax.data.tokenizer import Bytes, TextTokenizer
from sink_jax.pretrained.export import export_checkpoint, export_workdir
from sink_jax.pretrained.export import write_tokenizer
from sink_jax.pretrained.files import Checkpoint
from sink_jax.pretrained.sink_token import unused_token
from sink_jax.train.loop import train
from sink_jax.train.workdir import read_status
from tests.pretrained import exported_cases
from tests.train import runs

LAYER = 1


def doubles(tree, *names):
  """Leaves of the attention of one block, in float64."""
  return [np.asarray(tree['blocks']['attention'][name]['kernel']
                     if name in ('query', 'key', 'value', 'out') else
                     tree['blocks']['attention'][name], np.float64)[LAYER] for name in names]


class Folder:
  """An exported case: `hf`, `notes` and the stored tensors of one block's attention."""

  def __init__(self, case, folder):
    target, self.run = exported_cases.case_of(case)
    self.hf, notes = export_checkpoint(self.run, folder, context=64,
                                       sink_id=exported_cases.SINK_ID)
    assert self.hf['model_type'] == target
    self.notes, self.checkpoint = '\n'.join(notes), Checkpoint(folder)

  def stored(self, name):
    return self.checkpoint.read(f'model.layers.{LAYER}.self_attn.{name}')

  def params(self, *names):
    return doubles(self.run.params, *names)


@pytest.fixture
def export(tmp_path):
  return lambda case: Folder(case, tmp_path)


def assert_same(actual, expected):
  # A number that is computed in float64 and rounded once.
  np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=0)


def test_another_eps_of_qk_norm_is_a_scale_of_queries_and_keys(export):
  folder = export('qk_norm_eps')
  query, key = folder.params('query', 'key')
  factor = np.sqrt(0.003 / 1e-6)
  assert_same(folder.stored('q_proj.weight'), factor * query.T)
  assert_same(folder.stored('k_proj.weight'), factor * key.T)
  assert 'attention.qk_norm = QKNorm(eps=1e-06): its eps becomes' in folder.notes
  assert 'Qwen3ForCausalLM: llama has no attention.qk_norm' in folder.notes


def test_factors_of_rows_and_values_are_those_of_matrices(export, tmp_path):
  folder = export('v_bias_shared')
  value, out, scale, vector = folder.params('value', 'out', 'value_scale', 'kv_bias_value')
  assert_same(folder.stored('v_proj.weight'), (value * np.repeat(scale, 8)).T)
  assert_same(folder.stored('o_proj.weight'), 0.5 * out.T)
  # The V bias has no weight, so the factor of the rows is not its own.
  bias = np.asarray(folder.run.params['blocks']['attention']['out']['bias'], np.float64)[LAYER]
  assert_same(folder.stored('o_proj.bias'), bias + np.tile(vector[0], 4) @ out)
  for name, width in (('q', 32), ('k', 16), ('v', 16)):
    np.testing.assert_array_equal(folder.stored(f'{name}_proj.bias'), np.zeros(width))
  assert folder.hf['attention_bias'] and folder.hf['mlp_bias']
  # The model that they make is the run.
  tokens = exported_cases.tokens_of(folder.run)
  expected = np.asarray(folder.run.logits(tokens))
  np.testing.assert_allclose(sj.load_pretrained(tmp_path).logits(tokens), expected,
                             rtol=0, atol=1e-6 * np.abs(expected).max())


def test_a_v_bias_of_each_head(export):
  folder = export('v_bias')
  out, vector = folder.params('out', 'kv_bias_value')
  assert_same(folder.stored('o_proj.bias'),
              sum(vector[h] @ out[8 * h:8 * h + 8] for h in range(4)))
  assert not folder.hf['mlp_bias']


@pytest.mark.parametrize('case, base, kinds, window, theta', [
    ('sink_logit', 100.0, ['full'] * 2, 64, [100.0] * 2),
    ('sink_logit_windows', 10000.0, ['sliding', 'full'] * 2, 5, [10000.0] * 4),
    ('sink_logit_nope', 10000.0, ['sliding'] * 2, 5, [0] * 2)])
def test_sink_logits(export, case, base, kinds, window, theta):
  folder = export(case)
  hf, config = folder.hf, folder.run.config
  assert hf['layer_types'] == [f'{kind}_attention' for kind in kinds]
  assert hf['sliding_window'] == window and hf['layer_rope_theta'] == theta
  assert hf['rope_parameters'] == {'rope_type': 'default', 'rope_theta': base}
  # None may be left to the class, whose defaults are those of a published model.
  assert hf['attention_multiplier'] == 1 / np.sqrt(config.dims.head_dim)
  assert [hf[f'{name}_multiplier'] for name in ('embedding', 'residual')] == [1, 1]
  assert hf['logits_scaling'] == 1 and hf['tie_word_embeddings'] == config.tied
  assert hf['bos_token_id'] is None and hf['eos_token_id'] is None
  assert hf['attention_bias'] == hf['mlp_bias'] == bool(config.biases)
  if len(config.pattern) == 1:
    np.testing.assert_array_equal(folder.stored('sinks'), *folder.params('kv_bias_logit'))
    return
  for layer in range(4):  # two blocks of each kind, which are kept apart
    blocks = folder.run.params['blocks'][f'layer{layer % 2}']['attention']
    np.testing.assert_array_equal(
        folder.checkpoint.read(f'model.layers.{layer}.self_attn.sinks'),
        blocks['kv_bias_logit'][layer // 2])


def test_off_by_one_is_a_sink_logit(export):
  folder = export('off_by_one')
  assert_same(folder.stored('sinks'), np.full(4, np.log(3.0)))
  assert 'ZeroSink(n=3.0): it is the sink logit log 3' in folder.notes


def test_gates_stand_beside_the_queries_of_their_heads(export):
  folder = export('element_gate')
  query, gate, out, gain = folder.params('query', 'head_kernel', 'out', 'qk_norm_query_gain')
  rows = [x.T[12 * h:12 * h + 12] for h in range(4) for x in (query, gate)]
  np.testing.assert_array_equal(folder.stored('q_proj.weight'), np.concatenate(rows))
  assert_same(folder.stored('o_proj.weight'), 2 * out.T)
  assert_same(folder.stored('q_norm.weight'), gain - 1)
  for name, *path in (('norm', 'final_norm'), (f'layers.{LAYER}.input_layernorm', 'norm1'),
                      (f'layers.{LAYER}.post_attention_layernorm', 'norm2')):
    tree = folder.run.params[path[0]] if name == 'norm' else folder.run.params['blocks'][path[0]]
    expected = np.asarray(tree['gain'], np.float64) - 1
    assert_same(folder.checkpoint.read(f'model.{name}.weight'),
                expected if name == 'norm' else expected[LAYER])
  hf = folder.hf
  assert hf['layer_types'] == ['full_attention'] * 2 and hf['mlp_only_layers'] == [0, 1]
  assert hf['partial_rotary_factor'] == 1 and hf['head_dim'] == 12


def test_a_gate_of_heads_is_one_of_channels(export):
  folder = export('head_gate')
  gate, = folder.params('head_kernel')
  stored = folder.stored('q_proj.weight').reshape(4, 2, 8, 32)[:, 1]
  np.testing.assert_array_equal(stored, np.repeat(gate.T[:, None], 8, 1))
  assert 'attention.head = HeadGate(' in folder.notes


def test_a_learned_sink_token_is_the_embedding_of_an_unused_token(export, tmp_path):
  folder = export('sink_token')
  run, token = folder.run, exported_cases.SINK_ID
  table = np.array(run.params['embed'])
  # The model was tied: its unembedding keeps the row that the sink token takes in the embedding.
  np.testing.assert_array_equal(folder.checkpoint.read('lm_head.weight'), table)
  table[token] = run.params['sink_tokens'][0]
  np.testing.assert_array_equal(folder.checkpoint.read('model.embed_tokens.weight'), table)
  assert folder.hf['bos_token_id'] == token and not folder.hf['tie_word_embeddings']
  tokens = exported_cases.tokens_of(run)
  expected = np.asarray(run.logits(tokens))
  actual = sj.load_pretrained(tmp_path).logits(exported_cases.with_sink(run, tokens))[:, 1:]
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
  for options in (dict(sink_tokens=1), dict(sink_tokens=2)):  # without a token for it; several
    with pytest.raises(ValueError, match='model.sink_tokens = . has no counterpart'):
      export_checkpoint(exported_cases.run_of(options), tmp_path / 'out',
                        sink_id=None if options['sink_tokens'] == 1 else token)


@pytest.mark.parametrize('edits, bos, expected', [
    ((), False, 1), ((FixedToken(position=4, token=7),), False, 1),
    ((FixedToken(position=4, token=1),), False, 'FixedToken.*writes 1, 0 ends documents'),
    ((RandomTokens(),), True, r'RandomTokens.*writes 1\)'),
    ((RandomTokens(below=1),), False, 1)])
def test_the_token_that_training_never_held(edits, bos, expected):
  data = DataConfig(tokenizer=Bytes(), interventions=edits, bos=bos)
  if expected == 1:
    assert unused_token(Bytes().open(), data) == 1
    return
  with pytest.raises(ValueError, match=expected):
    unused_token(Bytes().open(), data)


@pytest.mark.parametrize('first, begin', [(None, [1]), (0, [1, 0]), (70, [1, 70])])
def test_a_sink_token_stands_before_all_that_texts_begin_with(tmp_path, first, begin):
  plain = Bytes().open()
  tokenizer = plain if first is None else plain.beginning_with(first)
  assert write_tokenizer(tokenizer, tmp_path, context=32, sink_token=1) == dict(
      bos_token_id=1, eos_token_id=0, pad_token_id=0)
  whole = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  text = plain.encode('ab')
  assert whole.encode('ab').ids == [*begin, *text]
  back = TextTokenizer.from_path(tmp_path)
  assert back.prefix == tuple(begin) and back.bos_id == 1
  assert back.tokens('ab')[0].tolist() == [*begin, *text]


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run of texts with a learned sink token."""
  folder = tmp_path_factory.mktemp('sink') / 'run'
  train(runs.config(steps=1, checkpoint_every=0, model__sink_tokens=1, data__context=16,
                    data__source='Stdlib(max_files=6)', data__tokenizer='Bytes()'),
        folder, show_progress=False)
  return folder


def test_a_run_with_a_sink_token_is_exported_with_its_tokenizer(workdir, tmp_path):
  lines = export_workdir(workdir, tmp_path / 'out')
  assert lines[1:3] == [
      'LlamaForCausalLM: the first class that is tried',
      'model.sink_tokens = 1: it is the embedding of token 1, with which every text begins']
  run, back = sj.load_run(workdir), sj.load_pretrained(tmp_path / 'out')
  tokens = sj.tokenize(back, ['def f(x):', 'return x + 1'], length=9)
  assert (tokens[:, 0] == 1).all() and back.bos == 'tokenizer'
  expected = np.asarray(run.logits(tokens[:, 1:]))
  np.testing.assert_allclose(back.logits(tokens)[:, 1:], expected,
                             rtol=0, atol=1e-6 * np.abs(expected).max())


def test_the_card_of_a_run(workdir, tmp_path):
  export_workdir(workdir, tmp_path / 'out')
  card = (tmp_path / 'out' / 'README.md').read_text()
  header, title, text = card.split('\n\n', 2)
  assert header.startswith('---\nlibrary_name: transformers') and title == '# run'
  config = json.loads(text[text.index('```json') + 7:text.rindex('```')])
  assert config == json.loads((workdir / 'config.json').read_text())
  assert f'- trained with: {read_status(workdir)["code"]}' in text
  row = runs.rows(workdir, 'probe')[-1]
  assert f'Probed at step 1: Sink_1 = {row["sink_1"]:.4g} % of heads (epsilon = 0.3).' in text
  assert f'learned sink token: {row["sink_bias_slot"]:.4g} %' in text
  for kind, name, blocks in (('value', 'values', 2), ('key', 'keys', 2),
                             ('hidden', 'hidden states', 3)):
    numbers = row[f'{kind}_ratio']
    assert len(numbers) == blocks
    assert f'- {name}: {", ".join(f"{x:.4g}" for x in numbers)}\n' in text
  with pytest.raises(ValueError, match='out already holds'):
    export_workdir(workdir, tmp_path / 'out')
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'notes.txt').touch()
  with pytest.raises(ValueError, match='other already holds notes.txt: choose another'):
    export_workdir(workdir, tmp_path / 'other')


def test_a_sink_token_without_an_unused_token_is_refused_but_for_custom(workdir, tmp_path):
  copy = tmp_path / 'run'
  shutil.copytree(workdir, copy)
  config = json.loads((copy / 'config.json').read_text())
  config['data']['interventions'] = 'FixedToken(position=2, token=1)'
  (copy / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match='model.sink_tokens = 1 would be.*FixedToken.*--as=custom'):
    export_workdir(copy, tmp_path / 'out')
  assert not (tmp_path / 'out').exists()
  lines = export_workdir(copy, tmp_path / 'out', target='custom')
  assert lines[0].endswith('config.json: sink_jax, step 1, float32')
  assert lines[1:] == ['SinkJaxForCausalLM: as --as says',
                       f'{tmp_path / "out" / "tokenizer.json"}: 258 tokens']
  hf = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert hf['model']['sink_tokens'] == 1 and hf['eos_token_id'] == 0 and not hf['use_cache']
  card = (tmp_path / 'out' / 'README.md').read_text()
  assert 'modeling_sink_jax.py here' in card and 'trust_remote_code=True' in card
  with pytest.raises(ValueError, match='--as=custom.*--workdir in place of --checkpoint'):
    sj.load_pretrained(str(tmp_path / 'out'))


def test_a_class_that_cannot_hold_the_run_is_named_with_one_that_can(tmp_path):
  _, run = exported_cases.case_of('qk_norm')
  with pytest.raises(ValueError, match=r'--as=llama cannot hold.*attention.qk_norm = QKNorm\(eps='
                                       r'0.003\).*NoQKNorm.*--as=qwen3 can'):
    export_checkpoint(run, tmp_path / 'out', target='llama')
  with pytest.raises(ValueError, match='--as=bert: no such class; choices: llama, mistral, qwen3'):
    export_checkpoint(run, tmp_path / 'out', target='bert')
  gate, norm = 'ElementGate()', 'QKNorm()'
  for components, message in (
      # Each part has a class, and none has all: the classes that lack least are named.
      (dict(head=gate), r'llama has no attention.head = ElementGate\(.*qwen3_next has no '
                        r'attention.qk_norm = NoQKNorm\(\)'),
      (dict(kv_bias='SinkLogit()', qk_norm=norm), 'qwen3 has no attention.kv_bias = SinkLogit'),
      # The gate would multiply v*, which a bias of the output is added after.
      (dict(kv_bias='VBias()', qk_norm=norm, head=gate), 'attention.kv_bias = VBias'),
      (dict(head='ElementGate(opening=0.25)', qk_norm=norm), 'attention.head = ElementGate'),
      (dict(kv_bias='KBias()'), r'have NoBias\(\) \(llama.*SinkLogit\(\) \(granite_swa'),
      (dict(kv_bias='SinkLogit()', position='Rope(factor=2.0)'), 'granite_swa has no '
       'attention.position.*of factor 1')):
    with pytest.raises(ValueError, match=f'no counterpart.*{message}|{message}.*no counterpart'):
      export_checkpoint(exported_cases.run_of({}, **components), tmp_path / 'out')
  with pytest.raises(ValueError, match='--as=qwen3 cannot hold.*; nor can another class'):
    export_checkpoint(exported_cases.run_of({}, kv_bias='PseudoMask()'), tmp_path / 'out',
                      target='qwen3')
  assert not (tmp_path / 'out').exists()
