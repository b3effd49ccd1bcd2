"""Fills launch/gke_jobset.yaml and launch/sky.yaml in; needs PyYAML and no other package.

python launch/render.py jobset --name=a --image=registry/a:1 ... -- train --config=...
python launch/render.py sky --name=a --hardware=gpu ... -- train --config=...

launch/gke.sh and launch/sky.sh call it with what launch/settings.sh says.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import yaml

HERE = Path(__file__).parent
PORT = 8476
# Exit codes after which a pod is started again: 42, stopped and saved; from 127 on, died. See
# contract.sh.
RESTARTED = [42, *range(127, 256)]
LABEL = 'app.kubernetes.io/instance'

_SPOT = 'cloud.google.com/gke-spot'
_FLEX = 'cloud.google.com/gke-flex-start'


def jobset(o: argparse.Namespace) -> dict:
  """Returns the JobSet of one job, with the options `o` of the command line.

  Raises:
    ValueError: options that contradict each other.
  """
  if o.hardware != 'tpu' and o.slices != 1:
    raise ValueError(f'SLICES={o.slices}: only TPUs have slices; set HOSTS instead.')
  if o.hardware != 'cpu' and not (o.accelerator and o.chips):
    raise ValueError(f'HARDWARE={o.hardware} needs ACCELERATOR and CHIPS.')
  if o.hardware == 'tpu' and not o.topology:
    raise ValueError('HARDWARE=tpu needs TOPOLOGY, such as 4x4.')
  made = yaml.safe_load((HERE / 'gke_jobset.yaml').read_text())
  meta, spec = made['metadata'], made['spec']
  slices = spec['replicatedJobs'][0]
  job = slices['template']['spec']
  pod = job['template']['spec']
  container = pod['containers'][0]

  meta['name'] = o.name
  meta['labels'][LABEL] = job['template']['metadata']['labels'][LABEL] = o.label or o.name
  if o.queue:
    meta['labels']['kueue.x-k8s.io/queue-name'] = o.queue
  spec['failurePolicy']['maxRestarts'] = o.restarts
  slices['replicas'] = o.slices
  job['parallelism'] = job['completions'] = o.hosts
  job['podFailurePolicy']['rules'][0]['onExitCodes']['values'] = RESTARTED
  pod['terminationGracePeriodSeconds'] = o.grace
  if o.service_account:
    pod['serviceAccountName'] = o.service_account
  container['image'] = o.image
  # Kubernetes replaces $(NAME) in arguments; $$ is its way to write a $.
  container['args'] = ['--', *(word.replace('$(', '$$(') for word in o.command)]
  _select_nodes(o, meta, pod, container)
  if o.hardware != 'tpu':  # on TPUs GKE numbers the processes, and jax reads that
    container['env'] = _processes(o, slices['name'])
  if not meta['annotations']:
    del meta['annotations']
  return made


def _select_nodes(o: argparse.Namespace, meta: dict, pod: dict, container: dict) -> None:
  """Asks for the machines that the pods go to."""
  selector, tolerations = pod['nodeSelector'], pod['tolerations']
  resource = {'tpu': 'google.com/tpu', 'gpu': 'nvidia.com/gpu'}.get(o.hardware)
  if o.hardware == 'tpu':
    selector['cloud.google.com/gke-tpu-accelerator'] = o.accelerator
    selector['cloud.google.com/gke-tpu-topology'] = o.topology
    # A slice is a node pool: a job has it alone.
    meta['annotations']['alpha.jobset.sigs.k8s.io/exclusive-topology'] = (
        'cloud.google.com/gke-nodepool')
  elif o.hardware == 'gpu':
    selector['cloud.google.com/gke-accelerator'] = o.accelerator
  if resource:
    container['resources']['limits'][resource] = o.chips
    tolerations.append({'key': resource, 'operator': 'Exists', 'effect': 'NoSchedule'})
  if o.provisioning in ('spot', 'flex-start'):
    label = _SPOT if o.provisioning == 'spot' else _FLEX
    selector[label] = 'true'
    tolerations.append(
        {'key': label, 'operator': 'Equal', 'value': 'true', 'effect': 'NoSchedule'})
  elif o.provisioning == 'reserved':
    if not o.reservation:
      raise ValueError('PROVISIONING=reserved needs RESERVATION on GKE.')
    selector['cloud.google.com/reservation-name'] = o.reservation


def _processes(o: argparse.Namespace, slices: str) -> list[dict]:
  """Environment of one process per pod, which find each other by the names of the JobSet."""
  index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
  return [
      {'name': 'JAX_COORDINATOR_ADDRESS', 'value': f'{o.name}-{slices}-0-0.{o.name}:{PORT}'},
      {'name': 'JAX_NUM_PROCESSES', 'value': str(o.hosts)},
      {'name': 'JAX_PROCESS_ID', 'valueFrom': {'fieldRef': {'fieldPath': index}}},
  ]


def sky(o: argparse.Namespace) -> dict:
  """Returns the SkyPilot task of the job, with the options `o` of the command line.

  Raises:
    ValueError: the accelerator is not of the kind that HARDWARE says.
  """
  kind = 'cpu' if not o.accelerator else 'tpu' if o.accelerator.startswith('tpu') else 'gpu'
  if kind != o.hardware:
    raise ValueError(f'SKY_ACCELERATORS={o.accelerator} with HARDWARE={o.hardware}: set '
                     f'HARDWARE={kind}, or another accelerator.')
  made = yaml.safe_load((HERE / 'sky.yaml').read_text())
  made['name'], made['num_nodes'] = o.name, o.hosts
  resources = made['resources']
  resources['use_spot'] = o.provisioning == 'spot'
  if o.accelerator:
    resources['accelerators'] = o.accelerator
  if o.cloud:
    resources['infra'] = o.cloud
  made['envs']['PIP_EXTRAS'] = {
      'tpu': 'jax[tpu] etils[epath-gcs]', 'gpu': 'jax[cuda13] etils[epath-gcs]',
      'cpu': 'etils[epath-gcs]'}[o.hardware]
  made['run'] += shlex.join(
      ['exec', 'bash', 'launch/local.sh', f'--restarts={o.restarts}', '--', *o.command]) + '\n'
  return made


def parser() -> argparse.ArgumentParser:
  """Returns the parser of the options, which are settings in small letters."""
  made = argparse.ArgumentParser(description='Fills launch/gke_jobset.yaml and launch/sky.yaml in.')
  made.add_argument('kind', choices=('jobset', 'sky'))
  for name in ('name', 'image', 'label', 'queue', 'service_account', 'accelerator', 'topology',
               'reservation', 'cloud'):
    made.add_argument(f'--{name}', default='')
  for name, default in (('slices', 1), ('hosts', 1), ('chips', 0), ('restarts', 0),
                        ('grace', 120)):
    made.add_argument(f'--{name}', type=int, default=default)
  made.add_argument('--hardware', choices=('tpu', 'gpu', 'cpu'), required=True)
  made.add_argument('--provisioning', default='on-demand',
                    choices=('on-demand', 'spot', 'reserved', 'flex-start'))
  made.add_argument('command', nargs='+', help='after --: train or sweep, and its arguments')
  return made


def main() -> None:
  """Prints the filled document; one line instead of a traceback where options do not fit."""
  options = parser().parse_args()
  try:
    made = (jobset if options.kind == 'jobset' else sky)(options)
  except ValueError as error:
    raise SystemExit(f'error: {error}') from None
  # Scripts of several lines as blocks, so that a person can read what will run.
  yaml.add_representer(str, _literal, Dumper=yaml.SafeDumper)
  print('---\n' + yaml.safe_dump(made, sort_keys=False, width=10_000), end='')


def _literal(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
  style = '|' if '\n' in text else None
  return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


if __name__ == '__main__':
  main()
