"""Command lines: every spelling of an option, what cannot be read, and lines that people have."""

import dataclasses
import re
import shlex
from typing import Annotated, Literal

import pytest
import tyro

from sink_jax.cli import command, parser
from tests.documents import TEXTS
from tests.train.runs import ROOT


@dataclasses.dataclass(frozen=True)
class Parts:
  mask: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(parser.ConfigOptions):
  """Does it."""

  name: tyro.conf.Positional[str] = ''
  config: str | None = None
  out: str  # the folder of all.
  batch_size: int | None = None
  rate: float = 0.5
  kind: Literal['runs', 'paper'] | None = None
  maps: bool | None = None
  estimate: bool = True
  only: tuple[str, ...] = ()
  layers: tuple[int, ...] | None = None
  tokens: tuple[int, int] | None = None
  set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
  target: Annotated[str | None, tyro.conf.arg(name='as')] = None
  parts: Parts = Parts()

  def __post_init__(self):
    if self.rate < 0:
      raise ValueError(f'--rate={self.rate:g} is below 0.')


@dataclasses.dataclass(frozen=True)
class Lists:
  """A command without positional arguments, whose lists may be words."""

  length: tuple[int, ...] = ()
  shape: tuple[tuple[int, int, int, int], ...] = ()
  sweep: bool = False


def read(line, options=Options):
  return parser.parse(options, shlex.split(line), 'python -m program')


@pytest.mark.parametrize('line, values', [
    ('--batch_size=8', {'batch_size': 8}), ('--batch-size 8', {'batch_size': 8}),
    ('-batch_size=8', {'batch_size': 8}), ('-batch-size 8', {'batch_size': 8}),
    ('--batch_size=4 --batch_size=8', {'batch_size': 8}), ('--batch_size=-8', {'batch_size': -8}),
    ('--batch_size -8', {'batch_size': -8}), ('--rate=2e-4', {'rate': 2e-4}),
    ('--maps', {'maps': True}), ('--nomaps', {'maps': False}), ('--no-maps', {'maps': False}),
    ('--no_maps', {'maps': False}), ('-nomaps', {'maps': False}), ('--maps=false', {'maps': False}),
    ('--maps=True', {'maps': True}), ('--maps=0', {'maps': False}), ('--maps=t', {'maps': True}),
    ('--noestimate --estimate', {'estimate': True}),
    ('--maps some', {'maps': True, 'name': 'some'}),
    ('--only=a,b', {'only': ('a', 'b')}), ('--only a,b', {'only': ('a', 'b')}),
    ('--only=', {'only': ()}),
    ('--only a some', {'only': ('a',), 'name': 'some'}), ('some --only a,b',
                                                          {'only': ('a', 'b'), 'name': 'some'}),
    ('--layers=1,3', {'layers': (1, 3)}), ('--tokens=8,64', {'tokens': (8, 64)}),
    ('--set=a=1,2 --set b=3', {'set': ('a=1,2', 'b=3')}), ('--as=qwen3', {'target': 'qwen3'}),
    ('--parts.mask="Window(size=2)"', {'parts': Parts('Window(size=2)')}),
    ('--out=b --kind runs', {'kind': 'runs', 'out': 'b'}),
    ('--out=-dash --kind=paper', {'kind': 'paper', 'out': '-dash'}),
    ("--as='two words, a=b'", {'target': 'two words, a=b'}), ('-- --some', {'name': '--some'}),
    ('--as=None', {'target': 'None'}),
    ('--as -', {'target': '-'}), ('--as --dashes', {'target': '--dashes'}),
])
def test_every_spelling_of_an_option(line, values):
  found = read(f'--out=a {line}')
  assert found == Options(**{'out': 'a'} | values)
  names = {'as' if name == 'target' else f'{name}.mask' if name == 'parts' else name
           for name in values}
  assert found.given == names | {'out'}


def test_a_home_is_found_in_every_value_but_a_prompt(monkeypatch):
  monkeypatch.setenv('HOME', '/home/me')
  found = read('--out=~/a --only=b,~/c --as=~d')
  assert (found.out, found.only, found.target) == ('/home/me/a', ('b', '/home/me/c'), '~d')


def test_lists_may_be_words_where_nothing_else_may():
  shapes = ((1, 2, 3, 4), (5, 6, 7, 8))
  for line in ('--length 16 32 --shape 1,2,3,4 5,6,7,8 --sweep',
               '--length=16,32 --sweep --shape 1,2,3,4,5,6,7,8'):
    assert read(line, Lists) == Lists(length=(16, 32), shape=shapes, sweep=True)


def test_words_of_a_config_are_cut_out():
  found = read('--out=a --config.steps=3 --noconfig.bos --config.x y -config.z=1 --config.last')
  assert found == read('--out=a')
  assert found.config_words == ('steps=3', 'bos=false', 'x=y', 'z=1', 'last=true')


@pytest.mark.parametrize('line, words, options', [
    ('', '--out is missing; --help lists', Options),
    ('--outt=a', 'there is no option --outt. Did you mean --out?', Options),
    ('--hlep', 'there is no option --hlep. Did you mean --help?', Options),
    ('--config.steps=3', 'there is no option --config.steps. ', Lists),
    ('--out=a --noonly', 'there is no option --noonly. ', Options),
    ('--out=a --kind=papr', '--kind=papr: choose runs, paper. Did you mean paper?', Options),
    ('--out=a --maps=perhaps', '--maps=perhaps: write --maps or --nomaps.', Options),
    ('--out=a --nomaps=true', '--nomaps=true: write --maps or --nomaps.', Options),
    ('--out=a --batch_size=many', '--batch_size=many: write a whole number.', Options),
    ('--out=a --batch_size=1.5', '--batch_size=1.5: write a whole number.', Options),
    ('--out=a --rate=fast', '--rate=fast: write a number.', Options),
    ('--out=a --rate=-1', '--rate=-1 is below 0.', Options),
    ('--out=a --layers=one', '--layers=one: write numbers, such as 1,3.', Options),
    ('--out=a --tokens=8', '--tokens=8: write 2 numbers with commas between them.', Options),
    ('--shape=1,2,3', '--shape=1,2,3: write 4 numbers with commas between them.', Lists),
    ('--out', '--out is missing its value: write --out=VALUE.', Options),
    ('--out=a --only=a --only=b', '--only is given twice: write all values after one, with commas.', Options),
    ('--out=a --only=a,,b', '--only=a,,b: a value is missing beside a comma.', Options),
    ('--out=a --only=a,', '--only=a,: a value is missing beside a comma.', Options),
    ('--out --maps', '--out is missing its value: write --out=VALUE.', Options),
    *[(f'--out=a --{name}=', f'--{name}= is empty: write a value, or leave the option out.', Options)
      for name in ('out', 'as', 'layers', 'tokens', 'rate')],
    ('--out=a one two', "unexpected argument 'two'; options are written --name=value.", Options),
    ('more', "unexpected argument 'more'", Lists), ('--sweep more', "argument 'more'", Lists),
])
def test_what_cannot_be_read_is_named_with_the_remedy(line, words, options):
  with pytest.raises(ValueError) as error:
    read(line, options)
  assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('word', parser.HELP)
def test_every_word_for_help(word, capsys):
  with pytest.raises(SystemExit) as end:
    read(f'--out=a {word}')
  printed = capsys.readouterr().out
  assert end.value.code == 0 and printed.startswith('Does it.\n\nusage: python -m program [-h]')
  assert 'the folder of all. (required)' in printed and '(default: 0.5)' in printed


# Command lines that earlier versions of the README had, and what they choose.
LINES = {
    'analyses lengths --checkpoint=exported --lengths=8,16,32,64 --out=analyses':
        dict(name='lengths', checkpoint=('exported',), lengths=(8, 16, 32, 64), out='analyses'),
    'analyses streaming --checkpoint=exported --cache_size=32 --length=400 --out=analyses':
        dict(name='streaming', checkpoint=('exported',), cache_size=32, length=400, out='analyses'),
    'benchmark attention --shape 1,2,512,64 --variants softmax,sigmoid --seconds 0.05':
        dict(shape=((1, 2, 512, 64),), variants=('softmax', 'sigmoid'), seconds=0.05),
    'benchmark importance --length 2048 --seconds 0.05': dict(length=(2048,), seconds=0.05),
    'benchmark group --trials 6': dict(trials=(6,)),
    'benchmark train_step --batch 8 16 --attention.mask="Window(size=16)"':
        dict(batch=(8, 16), attention=dict(mask='Window(size=16)')),
    'benchmark show a.json b.json': dict(files=('a.json', 'b.json')),
    'data_build --workers=8 --out=gs://bucket/a': dict(workers=8, out='gs://bucket/a'),
    'evaluate --checkpoint=exported --out=exported-sinks':
        dict(checkpoint='exported', out='exported-sinks'),
    'evaluate --workdir=runs/backcopy': dict(workdir='runs/backcopy'),
    'export --workdir=runs/text --out=exported': dict(workdir='runs/text', out='exported'),
    "generate --checkpoint=exported --prompt='def main' --length=64 --cache_size=48 --sinks=4":
        dict(checkpoint='exported', prompt='def main', length=64, cache_size=48, sinks=4),
    'lm_eval --checkpoint=Pythia-160M --tasks=lambada_openai,hellaswag --out=scores':
        dict(checkpoint='Pythia-160M', tasks=('lambada_openai', 'hellaswag'), out='scores'),
    'plan --size=1b --topology=v5e:16x16 --fsdp=16 --batch_size=512 --remat=blocks':
        dict(size='1b', topology='v5e:16x16', fsdp=16, batch_size=512, remat='blocks'),
    'report --runs=runs --out=paper': dict(runs='runs', out='paper'),
    'report --runs=runs/quickstart --out=runs/report':
        dict(runs='runs/quickstart', out='runs/report'),
    'report --analyses=a,b.json --kind=fine-tuning --nomaps --out=paper':
        dict(analyses=('a', 'b.json'), kind='fine-tuning', maps=False, out='paper'),
    'sweep --config=configs/paper.py --budget=smoke --dry_run':
        dict(config='configs/paper.py', budget='smoke', dry_run=True),
    'sweep --config=configs/paper.py --budget=smoke --workdir=runs/smoke --processes=2':
        dict(config='configs/paper.py', budget='smoke', workdir='runs/smoke', processes=2),
    'sweep --config=configs/synthetic.py --seeds=0,1,2 --workdir=runs/synthetic --processes=2':
        dict(config='configs/synthetic.py', seeds=(0, 1, 2), workdir='runs/synthetic', processes=2),
    'sweep --config=configs/quickstart.py --workdir=runs/q --only=text-softmax,text-k-bias':
        dict(config='configs/quickstart.py', workdir='runs/q',
             only=('text-softmax', 'text-k-bias')),
    'train --config=configs/quickstart.py:text-softmax --workdir=runs/text':
        dict(config='configs/quickstart.py:text-softmax', workdir='runs/text'),
    'train --config=configs/window.py:window-512,budget=smoke --workdir=runs/window':
        dict(config='configs/window.py:window-512,budget=smoke', workdir='runs/window'),
}


@pytest.mark.parametrize('line', LINES)
def test_lines_of_earlier_versions_choose_what_they_did(line):
  name, *words = shlex.split(line)
  found = command.options_of(name, words)
  values = LINES[line]
  if 'attention' in values:
    values = values | {'attention': type(found.attention)(**values['attention'])}
  assert found == type(found)(**values)


def test_every_command_of_the_documents_is_one():
  texts = [(ROOT / path).read_text() for path in ('BUILD.md', 'launch/README.md')]
  texts += [path.read_text() for folder in ('configs', 'results')
            for path in (ROOT / folder).rglob('*') if path.suffix in ('.py', '.md')]
  documents = '\n'.join(TEXTS.values())
  text = '\n'.join([documents, *texts]).replace('\\\\\n', ' ').replace('\\\n', ' ')
  lines = set(re.findall(r'^ *python -m sink_jax[. ]([\w.]+ .*?)(?:  +#.*)?$', text, re.MULTILINE))
  # Of a sentence those with options: others are names of a command.
  lines |= set(re.findall(r'`python -m sink_jax[. ]([\w.]+ [^`]*--\w[^`]*)`', documents))
  assert len(lines) > 40
  for line in lines:
    name, *words = shlex.split(line)
    command.options_of(name, words)


def test_keys_of_a_config_are_set_as_ml_collections_writes_them():
  words = shlex.split(
      '--config=configs/base.py --workdir=runs/mine --config.model.size=tiny '
      '--config.model.dtype=float32 --config.data.context=64 --config.batch_size=16 '
      '--config.attention.mask="Window(size=16)" --config.optimizer.learning_rate=2e-4')
  config = command.read_config(command.options_of('train', words))
  assert (config['model']['size'], config['data']['context'], config['batch_size']) == (
      'tiny', 64, 16)
  assert config['attention']['mask'] == 'Window(size=16)'
  assert config['optimizer']['learning_rate'] == 2e-4


@pytest.mark.parametrize('option', ['out', 'workdir'])
def test_a_place_is_not_empty(option):
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Places(parser.CommandOptions):
    """Places."""

    out: str | None = None  # a folder.
    workdir: str | None = None  # a folder.
    source: str = ''  # by default none.

  with pytest.raises(ValueError, match=f'--{option}= is empty: write a value'):
    read(f'--{option}=', Places)
  assert read(f'--{option}=x', Places).given == {option}
  assert read('--source=', Places).given == {'source'}
