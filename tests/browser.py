"""Opens a page in headless Chromium, uses it by a script, and returns what the script says."""

import html
import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
_FLAGS = (
  '--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking'
  ' --disable-component-update --disable-sync --enable-logging=stderr --log-level=0'
)
_SESSION = """<script>
const said = [], say = (...what) => said.push(...what);
try {
%s
} catch (error) { say('ERROR ' + error.stack); }
document.title = said.join(' | ');
</script></body>"""
# Chromium makes no window narrower than 500 pixels, but a frame may be.
_FRAME = """<iframe id="frame" width="%d" height="900" style="border: 0"></iframe><script>
const frame = document.getElementById('frame');
frame.onload = () => { document.title = frame.contentDocument.title; };
frame.srcdoc = %s;
</script>"""


def needs_chromium(test):
  """Marks a test that opens a page, which takes seconds."""
  return pytest.mark.slow(pytest.mark.skipif(CHROMIUM is None, reason='needs Chromium')(test))


def use_page(page, session, folder, width=None):
  """Returns what a script passes to `say` on a page that has no other output to the console.

  Args:
    page: the page, as HTML.
    session: JavaScript that calls say(...).
    folder: where files may be written.
    width: of the page in pixels; None for a window of the usual size.
  """
  text = page.replace('</body>', _SESSION % session)
  if width is not None:
    text = _FRAME % (width, json.dumps(text).replace('</', '<\\/'))
  file = folder / 'page.html'
  file.write_text(text, encoding='utf-8')
  command = [CHROMIUM, *_FLAGS.split(), f'--user-data-dir={folder}/user', '--dump-dom', file.as_uri()]
  done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
  assert ':CONSOLE' not in done.stderr, done.stderr
  return html.unescape(re.search(r'<title>(.*?)</title>', done.stdout, re.DOTALL)[1]).split(' | ')


# Whether the page is as wide as its window, and the title is above the numbers beside it.
IS_NARROW = """
  const below = (id) => document.getElementById(id).getBoundingClientRect();
  say(document.documentElement.scrollWidth <= innerWidth, below('title').bottom <= below('totals').top);
  say([...document.querySelectorAll('.chip')].every((chip) => chip.getBoundingClientRect().right <= innerWidth));
"""
