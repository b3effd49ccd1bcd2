"""A bucket on this machine: an emulator of Google Cloud Storage that keeps objects in memory."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest
import requests

from tests.train.runs import ROOT, free_port, wait_for

_NAME = 'bucket'


class Bucket:
  """gs://bucket as outside programs see it, through its HTTP interface.

  environment: the environment variables with which commands reach it.
  """

  url = f'gs://{_NAME}'

  def __init__(self, address, environment, log):
    self.environment, self._address, self._log = environment, address, log

  def start(self, command, *options, cwd):
    """Starts `python -m sink_jax COMMAND`; returns the process."""
    return subprocess.Popen(
      [sys.executable, '-m', 'sink_jax', command, *options],
      cwd=cwd,
      env=self.environment,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )

  def names(self, prefix=''):
    """The sorted names of all objects that start with the prefix."""
    found = self._ask('get', f'/storage/v1/b/{_NAME}/o', params={'prefix': prefix}).json()
    return sorted(item['name'] for item in found.get('items', ()))

  def answers(self):
    with contextlib.suppress(requests.ConnectionError):
      return self.names() is not None

  def read(self, name):
    return self._ask(
      'get', f'/download/storage/v1/b/{_NAME}/o/{quote(name, "")}', params={'alt': 'media'}
    ).content

  def reads(self):
    """(object name, bytes) of each read since the last call."""
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
  """Yields an empty Bucket; skips the test if there is no emulator.

  Only programs that read gs:// should import gcsfs, so launch/test.sh installs it into a separate
  folder.
  """
  packages = os.environ.get('BUCKET') or str(Path(sys.prefix, 'gs'))
  if not Path(packages, 'gcp_storage_emulator').is_dir():
    pytest.skip('bash launch/test.sh installs launch/bucket.txt into BUCKET=DIR')
  port = free_port()
  address = f'http://127.0.0.1:{port}'
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join((str(ROOT), packages)),
    'JAX_PLATFORMS': 'cpu',
    'STORAGE_EMULATOR_HOST': address,
    'TENSORSTORE_GCS_HTTP_URL': address,
    'CLOUD_STORAGE_EMULATOR_ENDPOINT': address,
    'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'any',
    'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
  }  # or it asks Google for the type of bucket
  log = tempfile.NamedTemporaryFile('r')
  process = subprocess.Popen(
    [sys.executable, '-P', '-m', 'tests.bucket_server', str(port), log.name],
    env=environment,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  try:
    bucket = Bucket(address, environment, log)
    wait_for(bucket.answers, process, seconds=60)
    yield bucket
  finally:
    process.kill()
    process.wait()
