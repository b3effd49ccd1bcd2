"""The JobSet of launch/gke.sh against a strict schema, and what it says about restarts."""

import copy
import json
import shlex
import shutil
import sys

import jsonschema
import pytest
import yaml

from tests.launchers.stand_ins import ROOT, Launchers

pytestmark = pytest.mark.skipif(
    sys.platform == 'win32' or not shutil.which('bash'), reason='needs bash')

SCHEMA = json.loads((ROOT / 'tests' / 'launchers' / 'jobset_schema.json').read_text())
TPU = '''
NAME=first CONFIG=configs/base.py WORKDIR=gs://bucket/first
ARGUMENTS=('--a=a b' "--b=it's" '--c=$(x)')
RESTARTS=7 GRACE=90 IMAGE=registry/sink-jax:tpu ACCELERATOR=tpu-v6e-slice TOPOLOGY=4x4 HOSTS=4
'''
GPU = TPU + 'HARDWARE=gpu ACCELERATOR=nvidia-h100-80gb CHIPS=8 HOSTS=2\n'
VARIANTS = {
    'tpu': TPU, 'slices': TPU + 'SLICES=2 QUEUE=ours SERVICE_ACCOUNT=writer PROVISIONING=spot',
    'gpu': GPU + 'PROVISIONING=reserved RESERVATION=ours', 'cpu': TPU + 'HARDWARE=cpu CHIPS=0',
    'sweep': TPU + 'JOB=sweep SHARDS=3 PROVISIONING=flex-start'}


@pytest.fixture
def launchers(tmp_path):
  return Launchers(tmp_path)


def rendered(launchers, settings):
  launchers.settings(settings)
  code, output, errors = launchers('gke.sh', 'render')
  assert code == 0, errors
  return list(yaml.safe_load_all(output))


def parts(jobset):
  """The Job, its pod and the container of a JobSet."""
  job = jobset['spec']['replicatedJobs'][0]['template']['spec']
  pod = job['template']['spec']
  return job, pod, pod['containers'][0]


@pytest.mark.parametrize('variant', VARIANTS)
def test_manifests_follow_the_schema(launchers, variant):
  made = rendered(launchers, VARIANTS[variant])
  assert len(made) == (3 if variant == 'sweep' else 1)
  for jobset in made:
    jsonschema.validate(jobset, SCHEMA)


def test_the_schema_sees_slips(launchers):
  jobset, = rendered(launchers, VARIANTS['slices'])

  def slip(change):
    wrong = copy.deepcopy(jobset)
    change(wrong, *parts(wrong))
    with pytest.raises(jsonschema.ValidationError):
      jsonschema.validate(wrong, SCHEMA)

  def rename(values, old, new):
    values[new] = values.pop(old)

  slip(lambda j, job, pod, container: rename(container, 'image', 'imagee'))
  slip(lambda j, job, pod, container: rename(pod, 'nodeSelector', 'nodeselector'))
  slip(lambda j, job, pod, container: job.update(completions='4'))
  slip(lambda j, job, pod, container: job['podFailurePolicy']['rules'][0].pop('action'))
  slip(lambda j, job, pod, container: container['args'].append(4))
  slip(lambda j, *_: j['spec']['failurePolicy']['rules'][0].update(name='with-a-hyphen'))
  slip(lambda j, *_: j['metadata'].update(name='First'))


def test_what_starts_again(launchers):
  jobset, = rendered(launchers, TPU)
  job, pod, _ = parts(jobset)
  rule, = job['podFailurePolicy']['rules']
  # An exit code outside the list fails the job for good; one in it costs a restart.
  assert rule['action'] == 'FailJob' and rule['onExitCodes']['operator'] == 'NotIn'
  assert rule['onExitCodes']['containerName'] == pod['containers'][0]['name']
  again = rule['onExitCodes']['values']
  assert 42 in again and set(range(127, 256)) < set(again) and not {0, 1, 2} & set(again)
  assert len(again) <= 255 and job['backoffLimit'] == 0 and pod['restartPolicy'] == 'Never'
  policy = jobset['spec']['failurePolicy']
  assert policy['maxRestarts'] == 7 and pod['terminationGracePeriodSeconds'] == 90
  assert [(r['action'], r['onJobFailureReasons']) for r in policy['rules']] == [
      ('FailJobSet', ['PodFailurePolicy'])]


def test_arguments_reach_the_process_as_they_are(launchers):
  jobset, = rendered(launchers, TPU)
  _, _, container = parts(jobset)
  assert container['args'] == ['--', 'train', '--config=configs/base.py',
                               '--workdir=gs://bucket/first', '--a=a b', "--b=it's", '--c=$$(x)']
  for k, part in enumerate(rendered(launchers, VARIANTS['sweep']), 1):
    assert part['metadata']['name'] == f'first-{k}'
    assert parts(part)[2]['args'][-1] == f'--shard={k}/3'


def test_machines_and_processes(launchers):
  jobset, = rendered(launchers, VARIANTS['slices'])
  job, pod, container = parts(jobset)
  assert jobset['spec']['replicatedJobs'][0]['replicas'] == 2 and job['completions'] == 4
  assert pod['nodeSelector'] == {
      'cloud.google.com/gke-tpu-accelerator': 'tpu-v6e-slice',
      'cloud.google.com/gke-tpu-topology': '4x4', 'cloud.google.com/gke-spot': 'true'}
  assert container['resources']['limits'] == {'google.com/tpu': 4} and not container['env']
  assert jobset['metadata']['labels']['kueue.x-k8s.io/queue-name'] == 'ours'

  jobset, = rendered(launchers, VARIANTS['gpu'])
  job, pod, container = parts(jobset)
  assert container['resources']['limits'] == {'nvidia.com/gpu': 8}
  variables = {v['name']: v.get('value') for v in container['env']}
  slices = jobset['spec']['replicatedJobs'][0]['name']
  assert variables == {'JAX_COORDINATOR_ADDRESS': f'first-{slices}-0-0.first:8476',
                       'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': None}
  assert jobset['spec']['network']['enableDNSHostnames'] and job['completionMode'] == 'Indexed'


@pytest.mark.parametrize('settings, message', [
    ('TOPOLOGY=', 'HARDWARE=tpu needs TOPOLOGY'), ('CHIPS=0', 'needs ACCELERATOR and CHIPS'),
    ('HARDWARE=cpu SLICES=2', 'only TPUs have slices'),
    ('PROVISIONING=reserved', 'needs RESERVATION')])
def test_settings_that_contradict_each_other(launchers, settings, message):
  launchers.settings(TPU + settings)
  code, _, errors = launchers('gke.sh', 'apply')
  assert code == 1 and message in errors and launchers.called() == []


def test_kubectl_is_handed_the_manifest(launchers):
  launchers.settings(TPU + 'NAMESPACE=team')
  assert launchers('gke.sh', 'apply')[0] == 0
  assert launchers.called() == [['kubectl', '--namespace=team', 'apply', '-f', '-']]
  given = launchers.calls.with_name('calls.stdin').read_text()
  assert given == launchers('gke.sh', 'render')[1]
  _, output, _ = launchers('gke.sh', 'apply', '--dry_run')
  assert shlex.split(output)[-4:] == ['--namespace=team', 'apply', '-f', '-']
