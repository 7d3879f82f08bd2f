"""Sends the files of emergency copies from process to process over TCP, without shared storage.

Each process has a thread that answers requests, on a free port of all addresses of its host:

    {"token": "...", "lineage": 7, "put": "12.3", "size": 81920} and bytes -> {"error": ""}
    {"token": "...", "lineage": 7, "get": "12.3"}                          -> {"error": "", "size": 81920} and bytes

The token is a secret of this start of the run. The checksums in a part show whether it is complete.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from praxis_lite.common.errors import first_line
from praxis_lite.common.files import open_plain, parse_json
from praxis_lite.common.processes import gather_texts
from praxis_lite.runs.cluster.copy_file import new_copy

# Seconds that a host waits for a connection, and for each block that it sends or receives.
_CONNECT_S, _TIMEOUT_S = 10.0, 60.0
# The longest line of a request.
_MOST_LINE = 4096
_BLOCK = 1 << 20
_NAME = re.compile(r'[0-9]{1,15}\.[0-9]{1,9}')


class PeerError(Exception):
  """A peer did not accept or send a part; the message says why."""


class Address(NamedTuple):
  """Where a process answers: names and addresses of its host, and a port."""

  names: Sequence[str]
  port: int


class Peers:
  """The other processes of a run, as holders of copies. All processes make one together, and close it at the end.

  This process keeps the parts that it receives in `folder`. All processes pass the same
  `lineage`, to which the copies belong.
  """

  def __init__(self, folder: Path, lineage: int):
    self._folder, self._lineage = folder, lineage
    self._server = _Server(self._answer)
    self._token = gather_texts(secrets.token_hex(16))[0]
    own = json.dumps([_host_names(), self._server.server_address[1]])
    self._addresses = [Address(*json.loads(text)) for text in gather_texts(own)]
    self._thread = threading.Thread(target=self._server.serve_forever, name='emergency_peers', daemon=True)
    self._thread.start()

  def put(self, peer: int, name: str, parts: Sequence[bytes | memoryview]) -> None:
    """Sends a file, such as '12.3', in parts to another process's folder; raises PeerError if it does not arrive."""
    with self._request(peer, {'put': name, 'size': sum(map(len, parts))}) as (sock, file):
      for part in parts:
        for at in range(0, len(part), _BLOCK):  # The time limit applies to each call separately.
          sock.sendall(part[at : at + _BLOCK])
      _check(file)

  def get(self, peer: int, name: str, to: Path) -> None:
    """Writes a file of another process to `to`; raises PeerError if it has no such file, or the connection ends."""
    with self._request(peer, {'get': name}) as (_, file):
      _receive(file, to, _check(file)['size'])

  def close(self) -> None:
    """Ends the thread that answers."""
    self._server.shutdown()
    self._server.server_close()

  @contextlib.contextmanager
  def _request(self, peer: int, request: dict[str, Any]) -> Iterator[tuple[socket.socket, IO[bytes]]]:
    """Connects to a process and sends a request; every error is a PeerError."""
    address, errors = self._addresses[peer], []
    for name in address.names:
      try:
        connected = socket.create_connection((name, address.port), timeout=_CONNECT_S)
      except (OSError, UnicodeError) as error:  # The host may be reachable under its next name.
        errors.append(f'{name}: {first_line(error)}')
        continue
      try:
        with connected as sock, sock.makefile('rb') as file:
          sock.settimeout(_TIMEOUT_S)
          sock.sendall(json.dumps({'token': self._token, 'lineage': self._lineage, **request}).encode() + b'\n')
          yield sock, file
          return
      except (OSError, ValueError, KeyError, TypeError) as error:
        raise PeerError(f'process {peer}: {first_line(error)}') from error
    where = f'{",".join(address.names)}:{address.port}'
    raise PeerError(f'process {peer} at {where} does not answer: {"; ".join(dict.fromkeys(errors))}')

  def _answer(self, sock: socket.socket, file: IO[bytes]) -> None:
    request = parse_json(file.readline(_MOST_LINE))
    if not hmac.compare_digest(str(request['token']), self._token):
      return  # The sender is not a process of this run.
    name = str(request.get('put') or request['get'])
    if not _NAME.fullmatch(name) or request['lineage'] != self._lineage:
      raise ValueError(f'no copy {name!r} of this run')
    path = self._folder / name
    if 'get' in request:
      with open_plain(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        sock.sendall(json.dumps({'error': '', 'size': size}).encode() + b'\n')
        sock.sendfile(opened, 0, size)
      return
    _receive(file, path, request['size'])
    sock.sendall(b'{"error": ""}\n')


class _Server(socketserver.ThreadingTCPServer):
  """Calls a function for each connection, in a thread, and sends its errors to the peer."""

  daemon_threads = True
  request_queue_size = 128

  def __init__(self, answer: Callable[[socket.socket, IO[bytes]], None]):
    class Handler(socketserver.StreamRequestHandler):
      timeout = _TIMEOUT_S

      def handle(self) -> None:
        try:
          answer(self.connection, self.rfile)  # type: ignore[arg-type]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
          with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps({'error': first_line(error)}).encode() + b'\n')

    super().__init__(('', 0), Handler)


def _check(file: IO[bytes]) -> dict[str, Any]:
  """Returns the answer of a peer; raises OSError if there is none, or if it reports an error."""
  line = file.readline(_MOST_LINE)
  if not line:
    raise OSError('the connection ended without an answer')
  answer = parse_json(line)
  if answer['error']:
    raise OSError(str(answer['error']))
  return dict(answer)


def _receive(file: IO[bytes], path: Path, size: int) -> None:
  with new_copy(path) as written:
    left = size
    while left > 0:
      block = file.read(min(left, _BLOCK))
      if not block:
        raise OSError(f'the connection ended {left} bytes early')
      written.write(block)
      left -= len(block)


def _host_names() -> list[str]:
  """Returns the names and addresses under which other hosts may reach this one, the most specific first."""
  names = []
  address = os.environ.get('JAX_COORDINATOR_ADDRESS', '').rpartition(':')[0]
  with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((address or '10.255.255.255', 9))  # Sends nothing; shows the address that packets would come from.
    names.append(str(probe.getsockname()[0]))
  return list(dict.fromkeys([*names, socket.gethostname()]))
