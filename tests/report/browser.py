"""A page in headless Chromium, with what a script next to it finds out."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

BROWSER = os.environ.get('CHROMIUM') or shutil.which('chromium') or shutil.which('google-chrome')
needs_browser = pytest.mark.skipif(not BROWSER, reason='no Chromium; CHROMIUM=PATH names one')
OPTIONS = [
  '--headless',
  '--no-sandbox',
  '--disable-gpu',
  '--enable-logging=stderr',  # the console of the page
  '--virtual-time-budget=30000',
  '--dump-dom',
]
# A frame, as windows of browsers have a least width. The result stands in the text of the page.
OUTER = """<!DOCTYPE html><title></title><body><pre id="result"></pre><script>
const frame = document.createElement('iframe');
frame.style = 'border: 0; height: 3000px; width: {width}px';
frame.srcdoc = {page};
frame.onload = async () => {{
  const run = async (window, document) => {{ {script} }};
  const found = await run(frame.contentWindow, frame.contentDocument);
  const requests = frame.contentWindow.performance.getEntriesByType('resource');
  document.getElementById('result').textContent = JSON.stringify({{ found, requests }});
}};
document.body.append(frame);
</script>"""


def in_browser(page, script, folder, width=390):
  """What a script returns for the `window` and `document` of a page, a text.

  Nothing is on the console, also of what the policy of the page forbids, and nothing is requested.
  """
  text = json.dumps(page).replace('<', '\\u003c')
  outer = folder / 'outer.html'
  outer.write_text(OUTER.format(width=width, page=text, script=script))
  command = [BROWSER, *OPTIONS, f'--user-data-dir={folder / "browser"}', outer.as_uri()]
  shown = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
  assert not re.findall('CONSOLE.*', shown.stderr)
  result = re.search('<pre id="result">(.+?)</pre>', shown.stdout)
  assert result, 'the script did not end'
  content = json.loads(html.unescape(result[1]))
  assert content['requests'] == []
  return content['found']
