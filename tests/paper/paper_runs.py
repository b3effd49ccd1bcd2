"""Run folders of the paper's trials, written by hand."""

import functools
import json

from configs import paper
from sink_jax.paper import numbers
from sink_jax.paper.numbers import PaperRow
from sink_jax.report.read_runs import find_runs

HARDWARE = dict(
    hardware='cpu, 2 cores', jax='0.10.2', date='2026-11-21T14:55:31+00:00',
    command='python -m sink_jax sweep --config=configs/paper.py --workdir=/disk/me/runs')


@functools.cache
def config_text(trial, budget, protocol):
  """As JSON, so that nobody changes the cached one."""
  return json.dumps(paper.get_config(f'{trial},budget={budget},protocol={protocol}').to_dict())


def probe_row(step, sink, **values):
  rates = ([float(rate) for rate in sink] + [0.0] * 64)[:64]
  row = dict(kind='probe', step=step, sink_1=rates[0], sink=rates, sink_bias_slot=None,
             sink_bias_slot_released=None, largest_importance=0.5, mean_importance=0.2,
             mean_bias_slot=None, raw_mass_1=0.2, largest_raw_mass_1=0.5, raw_row_mass=1.0,
             value_ratio=[0.5, 0.25], key_ratio=[0.75, 0.5], hidden_ratio=[1.0, 1.25, 1.5],
             hidden_before_norm_ratio=[1.25, 1.5], sink_token_ratio=None)
  return row | values


def write(folder, trial='default', *, budget='smoke', protocol='paper', seed=0, status='done',
          step=None, sink=(20,), losses=None, details=None, analyses=None, domain='code',
          train=None, first=None, **values):
  """A run with probe rows at its beginning and at `step`.

  first, values: of the first and of the last probe row.
  """
  folder.mkdir(parents=True)
  config = json.loads(config_text(trial, budget, protocol)) | {'seed': seed}
  (folder / 'config.json').write_text(json.dumps(config))
  step = config['steps'] if step is None else step
  record = dict(status=status, step=step, **HARDWARE, **(details or {}))
  (folder / 'status.json').write_text(json.dumps(record))
  loss = 3.0 if losses is None else losses
  rows = [probe_row(0, (), **(first or {})),
          dict(kind='train', step=step // 2, loss=4.0, grad_norm=1.0),
          dict(kind='train', step=step, loss=loss if train is None else train, grad_norm=0.5),
          dict(kind='valid', step=0, valid=9.0), probe_row(step, sink, **values),
          {'kind': 'valid', 'step': step, 'valid': loss, domain: loss}]
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  if analyses is not None:
    (folder / 'analyses.json').write_text(json.dumps(analyses))


def change(folder, settings, file='config.json'):
  """settings: {'data.source': ...}; None takes a key away."""
  config = json.loads((folder / file).read_text())
  for name, value in settings.items():
    *path, key = name.split('.')
    section = functools.reduce(dict.__getitem__, path, config)
    section[key] = value
    if value is None:
      del section[key]
  (folder / file).write_text(json.dumps(config))


def write_synthetic(folder, variant, **options):
  """The same of a trial of the synthetic axis, which has no budget."""
  write(folder, **options)
  config = json.loads((folder / 'config.json').read_text())
  config['label'] = {'trial': f'synthetic-{variant}', 'budget': '', 'protocol': ''}
  config['data'] |= {'source': 'BigramBackcopy()', 'interventions': ''}
  (folder / 'config.json').write_text(json.dumps(config))


def write_not_expressible(folder, trial, reason, **label):
  folder.mkdir(parents=True)
  (folder / 'status.json').write_text(json.dumps(dict(
      status='not expressible', reason=reason, label={'trial': trial, 'budget': 'smoke', **label},
      **HARDWARE)))


def write_paper(root):
  """The full budget as if every run had come out as the paper says, and every figure.

  Where the paper's numbers are in pictures only, they are made up to agree with its words.
  """
  rows = {row.trial: row for table in numbers.ALL_TABLES
          for row in table.rows if row.trial and row.trial not in ('k-bias', 'default')
          or row.values.get('valid_loss')}
  for trial in numbers.TRIALS:
    row = rows.get(trial, PaperRow('', trial, {}))
    values = {k: v for k, v in row.values.items() if isinstance(v, (int, float))}
    failed = row.failed or row.values.get('converges') is False
    extra_key = values.get('sink_star')
    if extra_key is None and trial.startswith('value-'):
      extra_key = {'1': 60.0, '5': 20.0, '20': 0.0}[trial.split('-')[-1]]
    sinks = [values.get(f'sink_{k}', 0.0) for k in (1, 2, 3, 4)]
    if trial.startswith(('prefix', 'data-5b', 'window-1024', 'value-uniform-5')):
      sinks[0] = {'value-uniform-5': 7.0}.get(trial, 15.0)
    if trial.startswith('prefix'):
      sinks[1] = 15.0
    ratio = 1.2 if _is_flat(trial) else 20.0
    ratio = {'softmax-p-half': 10, 'softmax-p-third': 6, 'softmax-p-quarter': 4}.get(trial, ratio)
    loss = values.get('valid_loss', 3.73)
    gap = 3 if trial in ('data-50m', 'data-100m') else 0
    write(root / trial, trial, budget='full', status='diverged' if failed else 'done', sink=sinks,
          losses=loss, domain='Pile-CC', train=loss - gap,
          sink_bias_slot=extra_key, hidden_ratio=[1.0, 1.1, ratio],
          hidden_before_norm_ratio=[1.1, 20.0 if trial == 'post-norm' else ratio],
          sink_token_ratio=[1.0, 9.0, 8.0] if trial == 'sink-token' else None,
          analyses=_analyses(trial))
  # A smaller learning rate delays the sink.
  for trial, emerged in (('lr-8e-4', 800), ('default', 1500), ('lr-2e-4', 4000)):
    with open(root / trial / 'metrics.jsonl', 'r+') as file:
      lines = file.readlines()
      file.seek(0)
      file.writelines(lines[:1] + [json.dumps(probe_row(emerged, (10.5,))) + '\n'] + lines[1:])
  return root


def _is_flat(trial):
  """Has it no massive activations?"""
  return trial in ('post-norm', 'kv-bias', 'k-bias', 'sink-token', 'sigmoid', 'elu', 'identity',
                   'mlp', 'mlp-normalized', '1b-sigmoid')


def _analyses(trial):
  results = {}
  if trial in ('sink-token', 'kv-bias', 'k-bias'):
    results['removed'] = dict(what=trial, sink_1=0.0, largest_importance=0.1, valid_loss=5.5,
                            valid_loss_before=3.72)
  if trial.startswith('window-'):
    size = int(trial.split('-')[1])
    results['window'] = dict(size=size, length=2 * size, absolute_first=0.5, absolute_uniform=0.1,
                           relative_first=0.5 / size, uniform=1 / size)
    if size == 32:
      results['window']['map'] = [[1 / (i + 1) if j <= i else 0.0 for j in range(64)]
                                for i in range(64)]
  if trial.startswith('prefix-'):
    length = int(trial.split('-')[1])
    results['prefix'] = dict(length=length, strongest_in_prefix=1.0,
                           sequences=[[20.0 if k == i % length else 0.0 for k in range(length + 5)]
                                      for i in range(5)])
  if trial == 'default':
    results['first_token_chain'] = dict(largest_relative_difference=2e-6)
  return results or None


def runs(root):
  return find_runs(root)
