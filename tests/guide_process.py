"""A process that runs scripts one after the other, so that guides on one device share the imports; for test_docs.py.

Each line of its input is the directory of a `guide.py`; each line of its output is a traceback as JSON, '' if it ran.
"""

import faulthandler
import gc
import json
import os
import runpy
import sys
import traceback

if __name__ == '__main__':
  gc.set_threshold(200_000, 20, 100)  # As in conftest.py.
  answers = os.fdopen(os.dup(sys.stdout.fileno()), 'w')
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # What guides print is not an answer.
  path = list(sys.path)
  for line in sys.stdin:
    folder = line.rstrip('\n')
    os.chdir(folder)
    sys.path[:] = [folder, *path]
    error = ''
    faulthandler.dump_traceback_later(600, exit=True)  # No guide may take longer; this shows where it waits.
    try:
      runpy.run_path('guide.py', run_name='__main__')
    except BaseException:
      error = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(error), file=answers, flush=True)
