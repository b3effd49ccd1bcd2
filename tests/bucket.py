"""A bucket on this machine: an emulator of Google Cloud Storage, in the memory of a process."""

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import requests

from tests.train.runs import ROOT, free_port, wait_for

PINS = ROOT / 'launch' / 'bucket.txt'
_NAME = 'bucket'


class NotInstalled(RuntimeError):
  """The emulator is not there and cannot be installed; says why."""


def packages():
  """The folder of gcsfs and the emulator, None where the environment has them; installs them once.

  They lie beside the environment, in BUCKET=DIR or the folder `bucket` of one that
  launch/test.sh made, since only what reads gs:// should meet them.

  Raises:
    NotInstalled: there is no such folder, or pip fails.
  """
  if find_spec('gcsfs') and find_spec('gcp_storage_emulator'):
    return None
  if 'BUCKET' not in os.environ and not Path(sys.prefix, 'sink_jax.stamp').exists():
    raise NotInstalled('launch/test.sh did not make this environment: BUCKET=DIR says where the '
                       'packages of launch/bucket.txt may go')
  version = f'{sys.version_info.major}.{sys.version_info.minor}'
  digest = hashlib.sha256(PINS.read_bytes()).hexdigest()[:8]
  folder = Path(os.environ.get('BUCKET') or Path(sys.prefix, 'bucket')) / f'{version}-{digest}'
  with PINS.open() as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # the tests run in several processes
    if not (folder / 'complete').exists():
      _install(folder)
      (folder / 'complete').touch()
  return folder


def _install(folder):
  command = [sys.executable, '-m', 'pip', 'install', '--disable-pip-version-check', '--no-input',
             '--quiet', '--retries=1', '--timeout=15', '--no-deps', '--only-binary=:all:',
             '--upgrade', '--target', str(folder), '--requirement', str(PINS)]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          env=os.environ | {'PIP_USER': '0', 'PYTHONPATH': ''})
  except (OSError, subprocess.TimeoutExpired) as error:
    raise NotInstalled(f'launch/bucket.txt cannot be installed: {error}') from None
  if done.returncode:
    lines = [line for line in done.stderr.splitlines() if line.startswith('ERROR')]
    raise NotInstalled(f'launch/bucket.txt cannot be installed: {(lines or [done.stderr])[0][:300]}')


class Bucket:
  """gs://bucket as the outside sees it, through its HTTP interface.

  environment: in which commands reach it.
  """

  url = f'gs://{_NAME}'

  def __init__(self, address, environment, log):
    self.environment, self._address, self._log = environment, address, log

  def start(self, command, *options, cwd):
    """Starts `python -m sink_jax COMMAND`; returns the process."""
    return subprocess.Popen([sys.executable, '-m', 'sink_jax', command, *options], cwd=cwd,
                            env=self.environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)

  def names(self, prefix=''):
    """The names of all objects that begin so, in order."""
    found = self._ask('get', f'/storage/v1/b/{_NAME}/o', params={'prefix': prefix}).json()
    return sorted(item['name'] for item in found.get('items', ()))

  def answers(self):
    with contextlib.suppress(requests.ConnectionError):
      return self.names() is not None

  def read(self, name):
    return self._ask('get', f'/download/storage/v1/b/{_NAME}/o/{quote(name, "")}',
                     params={'alt': 'media'}).content

  def reads(self):
    """(name of an object, bytes) of each time that one was read, since this was last asked."""
    return [(line.split()[0], int(line.split()[1])) for line in self._log.readlines()]

  def delete(self, prefix):
    for name in self.names(prefix):
      self._ask('delete', f'/storage/v1/b/{_NAME}/o/{quote(name, "")}')

  def _ask(self, verb, path, **options):
    answer = requests.request(verb, self._address + path, timeout=30, **options)
    answer.raise_for_status()
    return answer


@contextlib.contextmanager
def emulated():
  """Yields an empty Bucket.

  Raises:
    NotInstalled: see `packages`.
  """
  paths = [str(path) for path in (ROOT, packages()) if path]
  port = free_port()
  address = f'http://127.0.0.1:{port}'
  environment = os.environ | {
      'PYTHONPATH': os.pathsep.join(paths), 'JAX_PLATFORMS': 'cpu',
      'STORAGE_EMULATOR_HOST': address, 'TENSORSTORE_GCS_HTTP_URL': address,
      'CLOUD_STORAGE_EMULATOR_ENDPOINT': address,
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'any',
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false'}  # which asks Google what kind of bucket it is
  log = tempfile.NamedTemporaryFile('r')
  process = subprocess.Popen(
      [sys.executable, '-P', '-m', 'tests.bucket_server', str(port), log.name], env=environment,
      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  try:
    bucket = Bucket(address, environment, log)
    wait_for(bucket.answers, process, seconds=60)
    yield bucket
  finally:
    process.kill()
    process.wait()
