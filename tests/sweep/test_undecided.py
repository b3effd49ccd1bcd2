"""A second look at undecided claims: which trials and seeds a report asks a sweep for."""

import json
from pathlib import Path

import pytest

from sink_jax.cli.parser import parse
from sink_jax.cli.sweep import run_sweep
from sink_jax.sweep.options import Options
from sink_jax.sweep.trials import Trial
from sink_jax.sweep.undecided import read_second_look

ROOT = Path(__file__).parents[2]
LOOK = {'budget': 'smoke', 'protocol': 'paper', 'trials': ['default', 'v-bias'], 'seeds': [3, 4]}


def table(budget='smoke', protocol='paper'):
  return {name: Trial(name, None, {'trial': name, 'budget': budget, 'protocol': protocol})
          for name in ('default', 'v-bias', 'k-bias')}


def report(folder, looks):
  (folder / 'report.json').write_text(json.dumps({'undecided': looks}))
  return folder / 'report.json'


def test_a_report_names_trials_and_seeds(tmp_path):
  other = dict(LOOK, budget='tenth', seeds=[7, 8])
  assert read_second_look(report(tmp_path, [other, LOOK]), table()) == (
      {'default', 'v-bias'}, [3, 4])


@pytest.mark.parametrize('looks, words', [
    ([], 'would decide no claim of it'),
    ([dict(LOOK, budget='tenth')], 'are of runs at tenth budget, paper protocol; the trials of '
                                   'this sweep are at smoke budget, paper protocol'),
    ([dict(LOOK, protocol='released')], 'at smoke budget, released protocol;')])
def test_another_report_is_refused(looks, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    read_second_look(report(tmp_path, looks), table())


@pytest.mark.parametrize('content', [
    None, '{', '{"title": "older"}', '[]', '{"undecided": [{"trials": ["default"]}]}',
    '{"undecided": [{"seeds": [3]}]}', '{"undecided": [3]}',
    '{"undecided": [{"trials": ["v-bias"], "seeds": ["3"]}]}'])
def test_what_is_no_report_is_refused(content, tmp_path):
  if content:
    (tmp_path / 'r.json').write_text(content)
  with pytest.raises(ValueError, match='r.json'):
    read_second_look(tmp_path / 'r.json', table())


def test_the_command_lists_them(tmp_path, capsys):
  command = lambda *options: run_sweep(parse(Options, [
      f'--config={ROOT}/configs/paper.py', '--budget=smoke', '--list',
      f'--undecided={report(tmp_path, [LOOK])}', *options], 'python -m sink_jax.sweep'))
  command()
  assert capsys.readouterr().out.split() == ['default-seed-3', 'default-seed-4', 'v-bias-seed-3',
                                             'v-bias-seed-4']
  with pytest.raises(ValueError, match='leave out --seeds, --only and'):
    command('--seeds=0')
