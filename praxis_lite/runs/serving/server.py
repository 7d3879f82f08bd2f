"""Serves a model: binds an address, runs uvicorn, and ends cleanly.

SIGTERM or Ctrl-C closes the listening socket. Requests that wait or run may go on for up to `drain_s` seconds, and are
then cancelled. A second Ctrl-C cancels them at once.

A connection on which no request arrives is closed after a while, or earlier if there are too many connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from praxis_lite.common.errors import UserError
from praxis_lite.runs.serving.app import Served, make_app
from praxis_lite.runs.serving.engine import Engine

_OTHER_CONNECTIONS = 64  # Connections beyond accepted requests: for /health, /metrics, and clients that get a 429.
_HEADERS_S = 30.0  # The longest time in which the headers of a request must arrive.
_STOP_S = 60.0  # Seconds to wait for the engine to end; longer than any step of the batcher.


def serve(
  engine: Engine,
  served: Served,
  host: str,
  port: int,
  *,
  most_open: int,
  drain_s: float,
  on_ready: Callable[[str, bool], object],
) -> None:
  """Serves requests until a signal.

  Args:
    engine: the engine, warmed up but not started.
    served: the model and its limits; this sets `hosts` and `most_requests`.
    host, port: the address; port 0 takes a free port.
    most_open: how many requests the engine accepts.
    drain_s: how many seconds requests may go on after a signal.
    on_ready: called with the URL, and whether only this machine can reach it.

  Raises:
    UserError: the address cannot be used.
    RuntimeError: the engine has failed, or did not end in time.
  """
  listener = _bind(host, port)
  is_local, name = is_loopback(host), f'[{host}]' if ':' in host else host
  # Protects against DNS rebinding: a web page whose host name resolves to this machine must not reach the server.
  hosts = tuple(dict.fromkeys(('localhost', '127.0.0.1', host.partition(':')[0] or '['))) if is_local else ('*',)
  most_connections = most_open + _OTHER_CONNECTIONS
  config = uvicorn.Config(
    make_app(engine, served._replace(hosts=hosts, most_requests=most_connections)),
    http=_Protocol,
    limit_concurrency=most_connections,
    lifespan='off',
    log_level='error',
    access_log=False,
    ws='none',
    server_header=False,
    timeout_graceful_shutdown=max(1, round(drain_s)),
  )
  server = _Server(config)
  engine.on_failure = server.end
  engine.start()
  try:
    on_ready(f'http://{name}:{listener.getsockname()[1]}', is_local)
    server.run(sockets=[listener])
  finally:
    listener.close()
    has_ended = engine.stop(_STOP_S)
  if engine.failure is not None:
    raise RuntimeError('the engine failed') from engine.failure
  if not has_ended:
    raise RuntimeError(f'a step of the batcher did not end in {_STOP_S:g} s')


class _Protocol(H11Protocol):  # type: ignore[misc, unused-ignore]
  """A connection, which is closed if the headers of a request do not arrive in time.

  If there are more than `limit_concurrency` connections, the one that has been idle for the longest time is closed.
  """

  def __init__(self, *args: Any, **named: Any):
    super().__init__(*args, **named)
    # Uvicorn's own limit would also count idle connections, and refuse requests.
    self._most, self.limit_concurrency = self.limit_concurrency, None
    self._idle_since = 0.0
    self._timer: asyncio.TimerHandle | None = None

  @property
  def is_idle(self) -> bool:
    """Whether no request is in progress: the headers are incomplete, or the answer was sent before the body ended."""
    is_answered = self.cycle is not None and self.cycle.response_complete
    return self.conn.their_state is h11.IDLE or is_answered

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
    super().connection_made(transport)
    if self._most is not None and len(self.connections) > self._most:
      idle = [other for other in self.connections if isinstance(other, _Protocol) and other.is_idle]
      if others := [other for other in idle if other is not self]:
        min(others, key=lambda other: other._idle_since).transport.close()
    self._watch()

  def handle_events(self) -> None:
    super().handle_events()
    self._watch()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    self._watch()

  def connection_lost(self, exc: Exception | None) -> None:
    super().connection_lost(exc)
    self._end_timer()

  def _watch(self) -> None:
    """Starts the timer of idle time, unless it runs: parts of headers do not restart it. Stops it during a request."""
    if not self.is_idle:
      self._end_timer()
    elif self._timer is None and not self.transport.is_closing():
      self._idle_since = self.loop.time()
      self._timer = self.loop.call_later(_HEADERS_S, self.transport.close)

  def _end_timer(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None


class _Server(uvicorn.Server):  # type: ignore[misc, unused-ignore]
  """Uvicorn's server, but when a signal has ended the server, it does not raise this signal again."""

  def end(self) -> None:
    """Ends the server, as a signal would."""
    self.should_exit = True

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)


def is_loopback(host: str) -> bool:
  """Whether only this machine can reach an address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


def _bind(host: str, port: int) -> socket.socket:
  try:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)
  except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long.
    reason = (error.strerror or error) if isinstance(error, OSError) else 'it is no name of a host'
    raise UserError(f'--host={host} --port={port} cannot be used: {reason}; --port=0 takes a free port') from None
