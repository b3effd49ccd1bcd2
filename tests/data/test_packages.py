"""Sources of installed packages as a corpus."""

import pytest

from sink_jax.component import from_string
from sink_jax.data import packages
from sink_jax.data.sources import Source
from sink_jax.data.packages import InstalledPackages


@pytest.fixture
def site(tmp_path, monkeypatch):
  files = {'one/a.py': b'x = 1\n', 'one/b.pyi': b'x: int\n', 'two/copy.py': b'x = 1\n',
           'two/readme.md': b'# two\n', 'two/latin.txt': b'caf\xe9\n', 'two/empty.py': b'',
           'two/blank.py': b'  \n', 'two/module.so': b'\x7fELF', 'two/table.py': b'#' * (2 << 20)}
  for name, content in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
  monkeypatch.setattr(packages.sysconfig, 'get_paths', lambda: {'purelib': str(tmp_path)})
  return tmp_path


def test_text_once_by_package(site):
  found = [(d.text, d.domain, d.name) for d in InstalledPackages().documents()]
  assert found == [('x = 1\n', 'code', 'one'), ('x: int\n', 'code', 'one'),
                   ('# two\n', 'docs', 'two')]
  assert len(list(InstalledPackages(max_files=1).documents())) == 1


def test_fingerprint_follows_the_files(site):
  before = InstalledPackages().fingerprint()
  assert InstalledPackages().fingerprint() == before
  packages._package_files.cache_clear()
  (site / 'one/a.py').write_text('x = 23\n')
  assert InstalledPackages().fingerprint() != before


def test_it_is_a_choice_and_refuses_nonsense(tmp_path, monkeypatch):
  assert from_string(Source, 'InstalledPackages(max_files=3)') == InstalledPackages(max_files=3)
  with pytest.raises(ValueError, match='max_files=-1'):
    InstalledPackages(max_files=-1)
  monkeypatch.setattr(packages.sysconfig, 'get_paths', lambda: {'purelib': str(tmp_path)})
  with pytest.raises(ValueError, match='no packages'):
    list(InstalledPackages().documents())
