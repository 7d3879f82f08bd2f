"""Serves a model: binds an address, drives uvicorn, and ends cleanly.

SIGTERM or Ctrl-C closes the address; requests that wait or run go on for up to `drain_s`; then they are cancelled. A
second Ctrl-C cancels them at once.
"""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from praxis_lite.common.errors import UserError
from praxis_lite.runs.serving.app import Served, make_app
from praxis_lite.runs.serving.engine import Engine

_OTHER_CONNECTIONS = 64  # Beside those of requests: of /health, /metrics, and of clients that get a 429.
_STOP_S = 60.0  # A step of the batcher takes less.


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
    engine: warmed up, not started.
    served: what is served; its `hosts` are set here.
    host, port: the address; port 0 takes a free one.
    most_open: how many requests the engine takes.
    drain_s: how long requests may go on after a signal.
    on_ready: called with the URL, and whether only this machine reaches it.

  Raises:
    UserError: the address cannot be used.
    RuntimeError: the engine has failed.
  """
  listener = _bind(host, port)
  is_local, name = is_loopback(host), f'[{host}]' if ':' in host else host
  # A page of another site whose name leads here must not talk to it.
  hosts = ('localhost', '127.0.0.1', host.partition(':')[0] or '[') if is_local else ('*',)
  config = uvicorn.Config(
    make_app(engine, served._replace(hosts=hosts)),
    lifespan='off',
    log_level='error',
    access_log=False,
    ws='none',
    server_header=False,
    limit_concurrency=most_open + _OTHER_CONNECTIONS,
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


class _Server(uvicorn.Server):  # type: ignore[misc, unused-ignore]
  """Uvicorn's server, which ends with a signal, and does not raise the signal again when it has ended."""

  def end(self) -> None:
    """Ends it as a signal does."""
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
  """Whether only this machine reaches an address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


def _bind(host: str, port: int) -> socket.socket:
  try:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)
  except OSError as error:
    raise UserError(
      f'--host={host} --port={port} cannot be used: {error.strerror or error}; --port=0 takes a free port'
    ) from None
