"""Tests copies of runs in an object store, which is moto's server of the S3 protocol on this machine.

  pip install 'praxis_lite[remote]' s3fs 'moto[server]'
  python tools/real_object_store.py --kills=3

It trains a small model, kills the process with SIGKILL while a checkpoint is being copied, deletes its directory or
replaces it by an older one, and continues from the store. At the end it compares arrays, metrics and event files with
an undisturbed run. Then the store goes away while a run trains, and comes back empty. Finally the commands on
checkpoints read the store, intact and with a changed byte. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.checkpoints import saved_steps
from tools.faults.comparison import differences, results_of
from tools.faults.processes import EXPERIMENT, Training, environment

if TYPE_CHECKING:
  from fsspec import AbstractFileSystem

_BUCKET = 'bucket'
_SLOW = 'datasets[0].seconds=0.5'  # Makes steps slow, so that each checkpoint is copied before the next one is saved.


class Store:
  """A server with one bucket, which it keeps in memory."""

  def __init__(self, log: Path) -> None:
    with contextlib.closing(socket.socket()) as free:
      free.bind(('127.0.0.1', 0))
      self._port: int = free.getsockname()[1]
    self._log = log
    self.env = {
      'AWS_ENDPOINT_URL': f'http://127.0.0.1:{self._port}',
      'AWS_ACCESS_KEY_ID': 'nobody',
      'AWS_SECRET_ACCESS_KEY': 'nothing',
      'AWS_DEFAULT_REGION': 'us-east-1',
    }
    self.start()

  @property
  def files(self) -> AbstractFileSystem:
    import s3fs

    os.environ.update(self.env)
    return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

  def start(self) -> None:
    """Starts the server, without objects, and creates the bucket."""
    command = [sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(self._port)]
    with open(self._log, 'ab') as log:
      self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    for _ in range(1200):
      with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', self._port), timeout=1):
        break
      if self._process.poll() is not None:
        raise SystemExit(f'the server has ended with {self._process.returncode}: {self._log.read_text()[-2000:]}')
      time.sleep(0.1)
    self.files.mkdir(_BUCKET)

  def stop(self) -> None:
    self._process.kill()
    self._process.wait()


class Checks:
  """Prints each check and counts those that fail."""

  def __init__(self) -> None:
    self.failed = 0

  def __call__(self, what: str, is_so: bool, found: object = '') -> None:
    self.failed += not is_so
    print(f'{"ok    " if is_so else "FAILED"}  {what}{"" if is_so else f": {found}"}', flush=True)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--kills', type=int, default=3, help='how often the first run is killed')
  kills = parser.parse_args().kills
  missing = [name for name in ('moto', 's3fs', 'flask') if importlib.util.find_spec(name) is None]
  if missing:
    parser.error(f'{", ".join(missing)} must be installed: pip install "moto[server]" s3fs')
  check = Checks()
  with tempfile.TemporaryDirectory() as folder, running_store(Path(folder)) as store:
    env = environment(Path(folder, 'cache')) | store.env
    kill_in_uploads(Path(folder), store, env, kills, check)
    lose_the_store(Path(folder), store, env, check)
    use_the_commands(Path(folder), store, env, check)
  print(f'{check.failed} failed' if check.failed else 'all as it should be')
  return 1 if check.failed else 0


@contextlib.contextmanager
def running_store(folder: Path) -> Iterator[Store]:
  store = Store(folder / 'server.log')
  try:
    yield store
  finally:
    store.stop()


def train(directory: Path, env: dict[str, str], url: str | None, *settings: str) -> Training:
  overrides = [*settings, *([] if url is None else [f'task.train.mirror={url}'])]
  command = ['train', f'--exp={EXPERIMENT}:Faults', f'--job_log_dir={directory}', '--noverify']
  return Training([*command, *(f'--set={override}' for override in overrides)], env)


def kill_in_uploads(folder: Path, store: Store, env: dict[str, str], kills: int, check: Checks) -> None:
  """Kills a run while it copies a checkpoint, then continues from the store in an empty or an outdated directory."""
  undisturbed = train(folder / 'undisturbed', env, None)
  check('an undisturbed run', undisturbed.wait() == 0, undisturbed.text)
  url, directory, older = f's3://{_BUCKET}/runs/killed', folder / 'killed', folder / 'older'
  files, complete = store.files, 0
  for kill in range(kills):
    run = train(directory, env, url, _SLOW)

    def is_half_there(complete: int = complete) -> bool:
      steps, whole = steps_in_store(files, f'{_BUCKET}/runs/killed')
      return bool(steps - whole) and max(whole, default=0) > complete

    if not run.wait_for(is_half_there):
      check(f'kill {kill + 1}: a copy was under way', False, run.text)
      return
    run.send(signal.SIGKILL)
    run.wait()
    steps, whole = steps_in_store(files, f'{_BUCKET}/runs/killed')
    where = 'in an empty directory' if kill % 2 == 0 else 'in an older directory'
    print(f'        killed after {run.last_step} steps: {sorted(whole)} complete, half of {sorted(steps - whole)}')
    check(
      f'kill {kill + 1}: began {where[3:] if not kill else "from the store"}', kill == 0 or is_fetched(run), run.text
    )
    complete = max(whole, default=0)
    if not older.exists():
      shutil.copytree(directory, older)
      for step in sorted(saved_steps(older))[1:]:
        shutil.rmtree(older / 'checkpoints' / str(step))
    shutil.rmtree(directory)
    if kill % 2 == 1:
      shutil.copytree(older, directory)
  run = train(directory, env, url)
  check('the run goes on to its end', run.wait() == 0 and is_fetched(run), run.text)
  found = differences(results_of(directory), results_of(folder / 'undisturbed'))
  check('arrays, metrics and event files equal the results of the undisturbed run', not found, found)
  steps, whole = steps_in_store(files, f'{_BUCKET}/runs/killed')
  check('the store has the three newest checkpoints, and no half', steps == whole == {16, 20, 24}, (steps, whole))


def lose_the_store(folder: Path, store: Store, env: dict[str, str], check: Checks) -> None:
  """Stops the server during training. The run must go on and warn, and a later one must copy everything."""
  url, directory = f's3://{_BUCKET}/runs/away', folder / 'away'
  run = train(directory, env, url, 'datasets[0].seconds=1.5')  # The package of the store retries for seconds.
  run.wait_for(lambda: run.last_step >= 6)
  store.stop()
  code = run.wait(600)
  lines = [line for line in run.lines if 'copying the run failed' in line]
  check('without its store, a run takes all steps', 'step 24 of 24: saved' in run.text, run.text)
  check('it ends with exit code 2, and said so before', code == 2 and len(lines) >= 2, (code, lines))
  print(*(f'        {line}' for line in lines[:1] + lines[-1:]), sep='\n')
  refused = train(folder / 'other', env, url)
  check('a run does not begin without its store', refused.wait(600) == 2 and len(refused.lines) == 1, refused.text)
  print(f'        {refused.text}')
  store.start()
  again = train(directory, env, url)
  check('the same command, with an empty store, copies all', again.wait() == 0, again.text)
  steps, whole = steps_in_store(store.files, f'{_BUCKET}/runs/away')
  check('all checkpoints are there', steps == whole == {16, 20, 24}, (steps, whole))


def use_the_commands(folder: Path, store: Store, env: dict[str, str], check: Checks) -> None:
  """Lists, verifies and copies checkpoints in the store; then changes a byte there and checks that this is noticed."""
  url, files = f's3://{_BUCKET}/runs/away', store.files

  def checkpoints(*arguments: str) -> tuple[int, str]:
    process = Training(['checkpoints', *arguments], env)
    return process.wait(), process.text

  code, text = checkpoints('list', url)
  check('list of a URL', code == 0 and len(text.splitlines()) == 4, text)
  code, text = checkpoints('verify', url)
  check('verify of a URL', code == 0 and text.count(': whole') == 3, text)
  code, text = checkpoints('copy', url, str(folder / 'copy'))
  check('copy from a URL', code == 0, text)
  found = differences(results_of(folder / 'copy'), results_of(folder / 'away'))
  check('the copy is the run', not found, found)
  name = max(files.find(f'{_BUCKET}/runs/away/checkpoints/24'), key=files.size)
  data = bytearray(files.cat_file(name))
  data[len(data) // 2] ^= 1
  files.pipe_file(name, bytes(data))
  code, text = checkpoints('verify', url)
  check('verify names what has changed', code == 1 and 'has changed' in text, text)
  code, text = checkpoints('copy', url, str(folder / 'refused'))
  check('what has changed is not copied', code == 2 and not list(folder.glob('refused/checkpoints/*')), text)
  run = train(folder / 'before', env, url)
  check('a new directory takes the one before', run.wait() == 0 and 'is damaged (' in run.text, run.text)
  found = differences(results_of(folder / 'before'), results_of(folder / 'away'))
  check('and ends with the same bits', not found, found)


def is_fetched(run: Training) -> bool:
  return any(line.startswith('fetched s3://') for line in run.lines)


def steps_in_store(files: AbstractFileSystem, run: str) -> tuple[set[int], set[int]]:
  """Returns two sets of a run's steps in the store: those with any object, and those that are complete."""
  names: list[str] = []
  with contextlib.suppress(FileNotFoundError):
    names = [path.rpartition('/')[2] for path in files.ls(f'{run}/checkpoints', detail=False)]
  whole = {int(name.removesuffix('.complete')) for name in names if name.endswith('.complete')}
  return whole | {int(name) for name in names if name.isdecimal()}, whole


if __name__ == '__main__':
  sys.exit(main())
