"""Pages of every kind in a browser: nothing of them lies beyond the screen, however narrow."""

import os
import re
import shutil
import subprocess

import pytest

from sink_jax.cli.report import make_report
from tests.paper import stored
from tests.report.test_report import FLAT, GROWING, ROOT, TRIALS, write

BROWSER = os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, (
    'chromium', 'chromium-browser', 'google-chrome'))), None)
WIDTHS = (390, 1280)  # of a phone and a screen, in pixels
# A page in frames of both widths, which says how wide it is in each. A frame reports its own
# width, since a window of a browser has a least one.
PROBE = """<!DOCTYPE html><title></title><body><script>
const found = [];
for (const width of [%s]) {
  const frame = document.createElement('iframe');
  frame.style = `border: 0; width: ${width}px; height: 900px`;
  frame.srcdoc = %s;
  frame.onload = () => {
    const page = frame.contentDocument.documentElement;
    found.push(`${frame.contentWindow.innerWidth}:${page.scrollWidth}`);
    document.title = found.join(' ');
  };
  document.body.append(frame);
}
</script>"""


def widths(page, work):
  """{width of the window: width of the page in it}."""
  words = page.replace('\\', '\\\\').replace('`', '\\`').replace('${', '\\${')
  probe = work / 'probe.html'
  probe.write_text(PROBE % (', '.join(map(str, WIDTHS)), f'`{words}`'))
  shown = subprocess.run(
      [BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--virtual-time-budget=20000',
       f'--user-data-dir={work / "browser"}', '--dump-dom', probe.as_uri()],
      capture_output=True, text=True, timeout=120).stdout
  title, = re.findall('<title>(.*?)</title>', shown)[:1]
  return dict(tuple(map(int, pair.split(':'))) for pair in title.split())


@pytest.mark.skipif(not BROWSER, reason='no Chromium; CHROMIUM=PATH names one')
@pytest.mark.parametrize('kind', [
    'runs', *(pytest.param(kind, marks=pytest.mark.full) for kind in (
        'paper', 'baseline', 'fine-tuning', 'leaderboard', 'graft'))])
def test_nothing_is_beyond_the_screen(kind, tmp_path):
  if kind == 'runs':
    for i, name in enumerate(TRIALS):
      write(tmp_path / f'runs/{name}-{"x" * 60}', name, (GROWING, FLAT)[i % 2])
  else:
    folder = {'fine-tuning': 'sft'}.get(kind, kind)
    stored.restore(ROOT / 'results' / folder / 'metrics.json', tmp_path / 'runs')
  make_report(tmp_path / 'out', tmp_path / 'runs', kind=kind)
  page = (tmp_path / 'out/index.html').read_text()
  found = widths(page, tmp_path)
  assert found.keys() == set(WIDTHS) and all(shown <= width for width, shown in found.items())
  if kind == 'runs':  # the check itself: a table that does not scroll is seen
    wide = page.replace('.wide { overflow-x: auto;', '.wide { ')
    assert widths(wide, tmp_path)[390] > 390
