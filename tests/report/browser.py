"""A page in headless Chromium, with what a script next to it finds out."""

import html
import json
import os
import re
import shutil
import subprocess

BROWSER = os.environ.get('CHROMIUM') or shutil.which('chromium') or shutil.which('google-chrome')
# Before the scripts of the page: what goes wrong on it, and what it asks the network for.
WATCH = """<script>window.wrong = [];
addEventListener('error', (event) => wrong.push(event.message));
addEventListener('unhandledrejection', (event) => wrong.push(String(event.reason)));
addEventListener('securitypolicyviolation', (event) => wrong.push(event.blockedURI));
console.error = (...words) => wrong.push(words.join(' '));</script>"""
# A frame, as windows of browsers have a least width. The result stands in the text of the page.
OUTER = """<!DOCTYPE html><title></title><body><pre id="result"></pre><script>
const frame = document.createElement('iframe');
frame.style = 'border: 0; height: 3000px; width: {width}px';
frame.srcdoc = {page};
frame.onload = async () => {{
  const run = async (window, document) => {{ {script} }};
  const found = await run(frame.contentWindow, frame.contentDocument);
  document.getElementById('result').textContent = JSON.stringify(found);
}};
document.body.append(frame);
</script>"""


def in_browser(page, script, folder, width=390):
  """What a script returns for the `window` and `document` of a page, a text."""
  watched = page.replace('<title>', f'{WATCH}<title>', 1)
  text = json.dumps(watched).replace('<', '\\u003c')
  outer = folder / 'outer.html'
  outer.write_text(OUTER.format(width=width, page=text, script=script))
  options = ['--headless', '--no-sandbox', '--disable-gpu', '--virtual-time-budget=30000']
  command = [BROWSER, *options, f'--user-data-dir={folder / "browser"}', '--dump-dom']
  shown = subprocess.run(
    [*command, outer.as_uri()], capture_output=True, text=True, timeout=180, check=True
  ).stdout
  return json.loads(html.unescape(re.search('<pre id="result">(.+?)</pre>', shown)[1]))
