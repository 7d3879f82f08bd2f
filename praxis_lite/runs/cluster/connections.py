"""The connections of the rendezvous, which stay open so that the loss of a process is noticed at once.

    process 0     has a connection to each other process
    others        have one to process 0

When a process is killed, its system closes its connection. That alone is no proof, because a firewall may close a
connection too: `watchdog.py` also waits until beats are missing. Nothing is sent while all processes are alive. Each
message is one line of JSON:

    {"left": true}        the process ends as it should, so the end of its connection means nothing
    {"verdict": "..."}    why the process gives up; process 0 passes it on to all others
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping

from praxis_lite.common.foreign_text import printable

# A host that has lost power closes no connection. So after this many seconds without traffic, its system is probed.
_KEEPALIVE = {'TCP_KEEPIDLE': 60, 'TCP_KEEPINTVL': 60, 'TCP_KEEPCNT': 5}
_SEND_S = 1.0
_MOST_LINE = 1 << 16


class Connections:
  """Connections to other processes of the run. `sockets` has the connected sockets, by the index of the other process.

  Attributes:
    closed: the times, by `time.monotonic`, at which connections were closed without {"left": true}, by index.
    verdict: why another process gives up; '' while none has said so.
  """

  def __init__(self, sockets: Mapping[int, socket.socket]):
    self.closed: dict[int, float] = {}
    self.verdict = ''
    self._open = dict(sockets)
    self._received = dict.fromkeys(sockets, b'')
    self._left: set[int] = set()
    self._lock = threading.Lock()
    self._selector = selectors.DefaultSelector()
    for index, connection in sockets.items():
      connection.settimeout(_SEND_S)
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
      for option, value in _KEEPALIVE.items():
        with contextlib.suppress(AttributeError, OSError):  # Not every system has every option.
          connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
      self._selector.register(connection, selectors.EVENT_READ, index)
    if self._open and hasattr(os, 'register_at_fork'):
      os.register_at_fork(after_in_child=self._close_copies)

  def __len__(self) -> int:
    return len(self._open)

  def listen(self, seconds: float) -> None:
    """For at most `seconds`, waits until messages arrive or connections are closed; notes both."""
    if not self._open or not self._lock.acquire(blocking=False):
      time.sleep(seconds)
      return
    try:
      for key, _ in self._selector.select(seconds):
        self._read(key.data)
    finally:
      self._lock.release()

  def tell(self, verdict: str) -> bool:
    """Sends a verdict to the other processes; returns whether it has been sent to all connected ones."""
    return self._send({'verdict': verdict})

  def leave(self) -> None:
    """Tells the other processes that this one ends as it should."""
    self._send({'left': True})

  def _send(self, message: Mapping[str, object]) -> bool:
    connections, sent = list(self._open.values()), 0
    for connection in connections:
      with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b'\n')
        sent += 1
    return 0 < sent == len(connections)

  def _read(self, index: int) -> None:
    try:
      data = self._open[index].recv(_MOST_LINE)
    except TimeoutError:
      return
    except OSError:
      data = b''
    *lines, rest = (self._received[index] + data).split(b'\n')
    self._received[index] = rest
    for line in lines:
      with contextlib.suppress(ValueError, AttributeError):
        message = json.loads(line)
        if message.get('left'):
          self._left.add(index)
        self.verdict = self.verdict or printable(str(message.get('verdict', '')), one_line=True)
    if not data or len(rest) > _MOST_LINE:
      connection = self._open.pop(index)
      self._selector.unregister(connection)
      connection.close()
      if index not in self._left:
        self.closed[index] = time.monotonic()

  def _close_copies(self) -> None:
    """Called in a forked process, which may outlive this one: closes its copies of the connections."""
    for connection in self._open.values():
      connection.close()
