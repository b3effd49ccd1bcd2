"""The pages of docs/: the site builds, and every link, name and file in them exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sink_jax as sj
from sink_jax.attention.spec import COMPONENTS
from tests.documents import DOCUMENTS, ROOT, TEXTS, anchors, blocks, links


@pytest.mark.parametrize('path', [*DOCUMENTS, *map(str, sorted((ROOT / 'results').rglob('*.md')))])
def test_links_lead_somewhere(path):
  for target, anchor in links(path):
    assert target.exists(), target
    if anchor:
      assert anchor in anchors(target), f'{target} has no heading #{anchor}'


def test_names_files_and_pages_exist():
  assert {f'docs/{path.name}' for path in (ROOT / 'docs').glob('*.md')} == set(DOCUMENTS[1:])
  named = {name for text in TEXTS.values() for name in re.findall(r'\bsj\.([A-Za-z_]\w*)', text)}
  # The walk-through for a variant also names the class that it adds.
  assert len(named) > 15 and named - {'Softplus'} <= set(sj.__all__)
  file = re.compile(r'\b(?:sink_jax|configs|launch|tests)/[\w/.]+\.(?:py|sh|txt|md|json|ipynb)\b')
  paths = {path for text in TEXTS.values() for path in file.findall(text)}
  assert len(paths) > 20
  made = {title for _, _, title, _ in blocks() if title} | {'launch/settings.sh'}
  for path in paths - made:
    assert (ROOT / path).exists(), path


def test_the_api_has_every_public_name():
  listed = re.findall(r'^::: (\S+)$', TEXTS['docs/api.md'], re.MULTILINE)
  exported = {f'{module}.{name}' for name, module in sj._MODULE_OF.items()}
  components = {base.__module__ for base in COMPONENTS.values()}
  assert sorted(listed) == sorted(exported | components)


def test_the_site_builds_strictly(tmp_path):
  pytest.importorskip('mkdocs')
  # Nobody serves this proxy, so a build that fetches anything fails.
  offline = dict.fromkeys(
    ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY'), 'http://127.0.0.1:9'
  )
  done = subprocess.run(
    [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', tmp_path / 'site'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | offline,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  pages = {
    path.relative_to(tmp_path / 'site'): path.read_text()
    for path in (tmp_path / 'site').rglob('*.html')
  }
  assert Path('index.html') in pages and Path('results/index.html') in pages
  # A table in <details> that is not rendered would leave this text.
  assert not [path for path, text in pages.items() if '| --- |' in text]
  for name in ('sink_rate', 'attend', 'load_pretrained', 'Softpick'):
    assert re.search(rf'id="sink_jax\.[\w.]+\.{name}"', pages[Path('api.html')]), name
