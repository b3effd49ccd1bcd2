"""The repository's folder, and the versions that its requirements files pin."""

import pathlib
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[1]


def pinned(path, python):
  """{package: version} from a file of exact versions, for Linux."""
  pins = {}
  for line in path.read_text().splitlines():
    if not line.partition('#')[0].strip():
      continue
    pin = Requirement(line)
    if pin.marker is None or pin.marker.evaluate(
      {
        'python_version': python,
        'python_full_version': f'{python}.9',
        'sys_platform': 'linux',
        'platform_machine': 'x86_64',
        'platform_system': 'Linux',
      }
    ):
      assert re.fullmatch(r'==[\w.]+', str(pin.specifier)), line
      assert canonicalize_name(pin.name) not in pins, f'{pin.name} is pinned twice'
      pins[canonicalize_name(pin.name)] = str(pin.specifier)[2:]
  return pins
