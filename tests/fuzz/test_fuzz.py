"""The harness finds every planted defect, and a few hundred inputs find none in the library."""

import json

import pytest

from tests.fuzz import kinds
from tests.fuzz.__main__ import main
from tests.fuzz.child import Reader, generated
from tests.fuzz.guard import Guard
from tests.fuzz.inputs import File, Input
from tests.fuzz.pool import Batch

QUICK = ('slots', 'text_tokenizers', 'headers', 'families')


@pytest.fixture(scope='session')
def guard(tmp_path_factory):
  """One for all: a hook of this kind cannot be taken out again, but is silent outside."""
  return Guard(tmp_path_factory.mktemp('fuzz'))


@pytest.mark.parametrize('defect, outcome', [
    ('evaluates', 'Forbidden'), ('writes_outside', 'Forbidden'), ('raises', 'KeyError'),
    ('runs_a_program', 'Forbidden'), ('imports', 'Forbidden'), ('swallows', 'Forbidden'),
    ('says_nothing', 'ValueError')])
def test_a_planted_defect_is_found(guard, tmp_path_factory, defect, outcome):
  scratch = tmp_path_factory.getbasetemp() / 'fuzz0'
  record = Reader(kinds.load(f'planted-{defect}'), scratch, guard).read(Input('fuzzed_module'))
  assert record['failure'] and record['outcome'] == outcome
  assert not (scratch.parent / 'outside.txt').exists()


def test_a_refusal_that_says_why_is_none(guard, tmp_path_factory):
  scratch = tmp_path_factory.getbasetemp() / 'fuzz0'
  record = Reader(kinds.load('planted-refuses'), scratch, guard).read(Input('x'))
  assert record['outcome'] == 'ValueError' and record['failure'] is None


@pytest.mark.parametrize('defect, outcome', [('eats_memory', 'MemoryError'), ('dies', 'crash'),
                                             ('hangs', 'hang')])
def test_what_ends_a_process_is_put_down_to_its_input(defect, outcome):
  found = Batch(f'planted-{defect}', 0, 1, seconds=6.0 if defect == 'eats_memory' else 1.0).run()
  assert found.outcomes == {outcome: 1}
  assert Input.from_json(found.failures[0]['input']).text == 'fuzzed_module'


@pytest.mark.parametrize('name', [
    *QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in ('settings', 'tokenizers'))])
def test_a_few_hundred_inputs(guard, tmp_path_factory, name):
  kind, records = kinds.load(name), []
  reader = Reader(kind, tmp_path_factory.getbasetemp() / 'fuzz0', guard)
  generated(kind, reader.prepared, 0, 150, lambda input: records.append(
      (reader.read(input), input)))
  failures = [(record['failure'], input) for record, input in records if record['failure']]
  assert len(records) > 100 and not failures


def test_an_input_can_be_stored_and_played_again():
  files = {'a/b': File(b'\xff', 10, b'z'), 'c': File(link='/dev/zero')}
  own = Input('\ud800\0x', files, ('d',), 'e')
  assert Input.from_json(own.to_json()) == own


@pytest.mark.full
def test_the_command(tmp_path):
  out = tmp_path / 'fuzz.json'
  with pytest.raises(SystemExit) as ended:
    main(['--each=200', '--processes=2', '--kinds=slots,headers', f'--out={out}'])
  found = json.loads(out.read_text())
  assert ended.value.code == 0 and found['failures'] == 0
  assert {kind: row['inputs'] for kind, row in found['kinds'].items()} == {
      'slots': 200, 'headers': 200}
  assert '| slots | 200 |' in out.with_suffix('.md').read_text()
