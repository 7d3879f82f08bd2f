"""Acts inside a training process, which imports this file when Python starts. Environment variables say what to do.

FAULTS_SIGNAL = import:120:9    sends signal 9 to the process at its 120th import
                save:7:15       signal 15 at the 7th file or folder that it creates or renames in `checkpoints`
                restore:3:9     signal 9 at the 3rd file that it opens for reading in `checkpoints`
FAULTS_FILE_LIMIT = 3000        limits files to 3000 bytes
FAULTS_CLOCK = -86400:2.5       sets Python's clock back by a day, 2.5 s after the start
"""

import os
import resource
import sys
import time


def _signal_at(kind: str, number: int, signal: int) -> None:
  left = number

  def is_meant(event: str, arguments: tuple) -> bool:
    if kind == 'import':
      return event == 'import'
    if event == 'open':
      is_written = isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
      return '/checkpoints/' in str(arguments[0]) and is_written == (kind == 'save')
    return kind == 'save' and event in ('os.mkdir', 'os.rename') and '/checkpoints/' in str(arguments[0])

  def hook(event: str, arguments: tuple) -> None:
    nonlocal left
    if left > 0 and is_meant(event, arguments):
      left -= 1
      if not left:
        os.kill(os.getpid(), signal)

  sys.addaudithook(hook)


def _set_clock(offset: float, after: float) -> None:
  seconds, nanoseconds, start = time.time, time.time_ns, time.monotonic()

  def shift() -> float:
    return offset if time.monotonic() - start >= after else 0.0

  time.time = lambda: seconds() + shift()
  time.time_ns = lambda: nanoseconds() + int(shift() * 1e9)


# Removed from the environment, so that child processes are not disturbed.
if _what := os.environ.pop('FAULTS_SIGNAL', ''):
  _kind, _number, _number_of_signal = _what.split(':')
  _signal_at(_kind, int(_number), int(_number_of_signal))
if _what := os.environ.pop('FAULTS_FILE_LIMIT', ''):
  resource.setrlimit(resource.RLIMIT_FSIZE, (int(_what), int(_what)))  # Python ignores SIGXFSZ.
if _what := os.environ.pop('FAULTS_CLOCK', ''):
  _set_clock(*map(float, _what.split(':')))
