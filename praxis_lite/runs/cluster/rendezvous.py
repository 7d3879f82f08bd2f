"""Waits for the other processes of a run before JAX does, and names those that are missing. JAX would abort instead.

    host 0     listens on the port that JAX's service will use    | when all have connected, sends each the names of
    others     connect, send their index and name                 | the processes that this one watches (`beats.py`)

Each message is one line of JSON. Host 0 closes its port after it has answered, so that JAX can use it. The connections
stay open: see `connections.py`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from praxis_lite.common.errors import LostHostError
from praxis_lite.runs.cluster.beats import watched_by
from praxis_lite.runs.cluster.clusters import Job

_PAUSE = 0.1
_PATIENCE = 1.0
# How many files a process may have open besides connections.
_OTHER_FILES = 1024


class Meeting(NamedTuple):
  """All processes of a job, as one of them knows them."""

  # By index; '' for processes that this one does not watch, if there are many. Host 0 knows all names.
  names: list[str]
  # By index. Host 0 has a connection to each other host, or none at all if it may not open that many files. The others
  # have one connection, to host 0.
  connections: dict[int, socket.socket]


def meet(job: Job, address: str, timeout_s: float, name: str) -> Meeting:
  """Waits until all processes of a job have called this; returns their names and connections.

  The `address` is `host:port` of process 0, and `name` is the name of this process in messages.

  Raises:
    LostHostError: some processes did not call this in time; the message names them.
  """
  assert job.num_processes is not None and job.process_id is not None
  deadline = time.monotonic() + timeout_s
  host, port = address.rsplit(':', 1)
  try:
    if job.process_id == 0:
      return _gather(int(port), job.num_processes, name, deadline)
    told, connection = _report(host, int(port), job.process_id, name, deadline)
    return Meeting([told.get(i, '') for i in range(job.num_processes)], {0: connection})
  except _Missing as missing:
    hosts = f'host {missing} has' if len(missing.hosts) == 1 else f'hosts {missing} have'
    raise LostHostError(
      f'{hosts} not joined the {job.num_processes} of {job.found_by} within {timeout_s:g} s'
    ) from None
  except OSError as error:
    raise LostHostError(
      f'host 0 did not answer at {address} within {timeout_s:g} s ({error.strerror or error}); this is host '
      f'{job.process_id} of {job.num_processes} ({job.found_by})'
    ) from None


class _Missing(Exception):
  def __init__(self, hosts: Sequence[int]):
    super().__init__(', '.join(map(str, hosts)))
    self.hosts = hosts


def _gather(port: int, count: int, name: str, deadline: float) -> Meeting:
  names = {0: name}
  has_room = _allow_open_files(2 * count + _OTHER_FILES)  # Twice, because JAX's service has as many connections.
  with contextlib.ExitStack() as to_close:
    server = to_close.enter_context(_listening(port, count, deadline))
    connections: dict[int, socket.socket] = {}
    while len(names) < count:
      try:
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        connection = to_close.enter_context(server.accept()[0])
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        index, its_name = json.loads(_line(connection))
      except TimeoutError:
        missing = [i for i in range(count) if i not in names]
        _tell(connections.values(), {'missing': missing})
        raise _Missing(missing) from None
      except (OSError, ValueError, TypeError):
        continue  # The peer is not a process of this job; or it has ended, and will connect again after its restart.
      if isinstance(index, int) and 0 < index < count:
        names[index], connections[index] = str(its_name), connection
    for index, connection in connections.items():
      _tell([connection], {'names': {i: names[i] for i in {0, *watched_by(index, count)}}})
    # A process that has connected twice keeps its last connection; the others are closed at the end of this block.
    kept = {i: connection.dup() for i, connection in connections.items()} if has_room else {}
    return Meeting([names[i] for i in range(count)], kept)


def _allow_open_files(count: int) -> bool:
  """Lets this process have at least `count` open files; returns whether it may."""
  try:
    import resource
  except ImportError:  # Windows has no such limit.
    return True
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft != resource.RLIM_INFINITY and soft < count:
    with contextlib.suppress(OSError, ValueError):
      resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
  return soft == resource.RLIM_INFINITY or soft >= count


def _tell(connections: Iterable[socket.socket], what: dict[str, object]) -> None:
  for connection in connections:
    with contextlib.suppress(OSError):  # The process has ended, which JAX and the watchdog will notice.
      connection.sendall(json.dumps(what).encode() + b'\n')


def _listening(port: int, count: int, deadline: float) -> socket.socket:
  """Returns a socket that listens on all interfaces.

  Waits while an earlier process of the job uses the port; raises OSError after the deadline.
  """
  while True:
    try:
      # Listens for IPv4 and IPv6 if possible, like JAX's service.
      if socket.has_dualstack_ipv6():
        return socket.create_server(('', port), family=socket.AF_INET6, backlog=count, dualstack_ipv6=True)
      return socket.create_server(('', port), backlog=count)
    except OSError:
      if time.monotonic() > deadline:
        raise
      time.sleep(_PAUSE)


def _report(host: str, port: int, index: int, name: str, deadline: float) -> tuple[dict[int, str], socket.socket]:
  while True:
    left = deadline - time.monotonic()
    try:
      with socket.create_connection((host, port), timeout=max(left, 0.001)) as connection:
        # Host 0 may have started later than this one. Then its time ends later, and it says which hosts are missing.
        connection.settimeout(max(deadline - time.monotonic(), 0) + _PATIENCE)
        connection.sendall(json.dumps([index, name]).encode() + b'\n')
        told = json.loads(_line(connection))
        if missing := told.get('missing'):
          raise _Missing([int(i) for i in missing])
        return {int(i): str(its_name) for i, its_name in told['names'].items()}, connection.dup()
    except (OSError, ValueError, AttributeError, KeyError) as error:  # Host 0 does not listen yet.
      if time.monotonic() >= deadline:
        raise error if isinstance(error, OSError) else ConnectionError('something else answers there') from None
      time.sleep(_PAUSE)


def _line(connection: socket.socket) -> bytes:
  received = b''
  while not received.endswith(b'\n'):
    if not (part := connection.recv(65536)):
      raise ConnectionResetError('the connection was closed')
    received += part
    if len(received) > 1 << 20:
      raise ValueError('not a message of a process of this job')
  return received
