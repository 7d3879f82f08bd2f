"""The routes of `praxis-lite serve`.

POST /v1/completions         continues a text, or tokens
POST /v1/chat/completions    answers in a chat, by the run's chat template
GET  /v1/models              the name of the model
GET  /health                 whether the engine works
GET  /metrics                counters, one in each line
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from praxis_lite.inputs import BaseTokenizer
from praxis_lite.runs.serving.engine import (
  LENGTH,
  NOTHING,
  STOPPED,
  Accepted,
  BusyError,
  EndedError,
  EndEvent,
  Engine,
  Event,
  NewTokensEvent,
  Refused,
)
from praxis_lite.runs.serving.replies import Replies, Usage, encode_json, to_event
from praxis_lite.runs.serving.requests import Asked, RequestError, parse_request
from praxis_lite.runs.serving.served_text import ServedText

_BODY_S = 30.0  # The longest time in which the body of a request must arrive.
_ENDING = RequestError('the server has ended', 503)


class Served(NamedTuple):
  """The model that is served, and the limits of requests.

  Attributes:
    most_top: how many of the most probable tokens a request may ask for at each position.
    most_bytes: the largest size of a request's body, in bytes.
    timeout_s: the most seconds that a request may take, including sending its answer.
    hosts: the names of this server that requests may use; '*' allows any.
    most_requests: how many requests of all routes may be in progress, including ones that will be refused.
  """

  name: str
  tokenizer: BaseTokenizer | None = None
  most_top: int = 0
  most_bytes: int = 1 << 20
  timeout_s: float = 600.0
  hosts: tuple[str, ...] = ('*',)
  most_requests: int = 1 << 16


def make_app(engine: Engine, served: Served) -> Starlette:
  routes = _Routes(engine, served)

  def answer(call: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
      try:
        return await call(request)
      except RequestError as error:
        return _error(error)
      except asyncio.CancelledError:  # Uvicorn cancels requests after the time to drain.
        return _error(_ENDING)

    return endpoint

  return Starlette(
    routes=[
      Route('/v1/completions', answer(partial(routes.complete, is_chat=False)), methods=['POST']),
      Route('/v1/chat/completions', answer(partial(routes.complete, is_chat=True)), methods=['POST']),
      Route('/v1/models', answer(routes.models)),
      Route('/health', answer(routes.health)),
      Route('/metrics', answer(routes.metrics)),
    ],
    middleware=[Middleware(_Door, served=served)],
    exception_handlers={HTTPException: _answer_http_error},
  )


class _Door:
  """Refuses requests that name a host not in `Served.hosts`, and requests beyond `most_requests`."""

  def __init__(self, app: ASGIApp, served: Served):
    self._app, self._served = app, served
    self._num_inside = 0

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    most, host = self._served.most_requests, Headers(scope=scope).get('host', '')
    if not {'*', host.partition(':')[0]} & {*self._served.hosts}:
      error = RequestError(f'the host {host[:60]!r} is not one of this server: {", ".join(self._served.hosts)}')
    elif self._num_inside >= most:
      error = RequestError(f'the server is overloaded: {most} requests are under way; try again', 503, code='busy')
    else:
      self._num_inside += 1
      try:
        return await self._app(scope, receive, send)
      finally:
        self._num_inside -= 1
    await _error(error, closes=True)(scope, receive, send)


class _Routes:
  def __init__(self, engine: Engine, served: Served):
    self._engine, self._served, self._created = engine, served, int(time.time())

  async def models(self, request: Request) -> Response:
    names = self._served.name, *self._engine.batcher.adapter_names
    shared = {'object': 'model', 'created': self._created, 'owned_by': 'praxis_lite'}
    return _json({'object': 'list', 'data': [{'id': name, **shared} for name in names]})

  async def health(self, request: Request) -> Response:
    if (failure := self._engine.failure) is None:
      return _json({'status': 'ok'})
    return _json({'status': f'the engine failed: {type(failure).__name__}'}, 503)

  async def metrics(self, request: Request) -> Response:
    engine, batcher = self._engine, self._engine.batcher
    counts = {
      'requests_accepted_total': engine.num_accepted,
      'requests_busy_total': engine.num_busy,
      'requests_refused_total': engine.num_refused,
      'requests_cancelled_total': engine.num_cancelled,
      'requests_ended_total': engine.num_ended,
      'prompt_tokens_total': batcher.statistics.prompt_tokens,
      'shared_tokens_total': batcher.statistics.shared_tokens,
      'new_tokens_total': batcher.statistics.new_tokens,
      'passes_total': batcher.statistics.passes,
      'requests_open': engine.num_open,
      'requests_running': batcher.num_running,
      'requests_waiting': batcher.num_waiting,
    }
    lines = ''.join(f'praxis_lite_{name} {count}\n' for name, count in counts.items())
    return Response(lines, media_type='text/plain; version=0.0.4')

  async def complete(self, request: Request, *, is_chat: bool) -> Response:
    served = self._served
    body = await _read_body(request, served.most_bytes)
    adapters = self._engine.batcher.adapter_names
    asked = parse_request(body, is_chat=is_chat, model=served.name, most_top=served.most_top, adapters=adapters)
    deadline = time.monotonic() + served.timeout_s
    work = _Work(self._engine, served, asked)
    try:
      if asked.is_stream:
        await work.accept(deadline)
        return _Stream(work, deadline)
      return await _unless_gone(request, work.whole(deadline))
    except BaseException:  # BaseException includes the cancellation of this task.
      work.cancel()
      raise


class _Work:
  """One request: turns the engine's events into replies."""

  def __init__(self, engine: Engine, served: Served, asked: Asked):
    self._events = events = asyncio.Queue[Event]()
    loop = asyncio.get_running_loop()

    def send(event: Event) -> None:
      with contextlib.suppress(RuntimeError):  # The loop is closed, so nobody waits for the event.
        loop.call_soon_threadsafe(events.put_nowait, event)

    try:
      self._ticket = engine.submit(asked, send)
    except EndedError as error:
      raise RequestError(str(error), 503) from None
    except BusyError as error:
      raise RequestError(f'the server is busy: {error}; try again', 429, code='busy') from None
    self._engine, self._served, self._asked = engine, served, asked
    self._replies = Replies(
      asked.adapter or served.name, served.tokenizer, asked.is_chat, asked.num_top, asked.has_usage
    )
    self._text = ServedText(None, (), (), ())
    self._usage = Usage(0, 0)

  def cancel(self) -> None:
    """Ends the request, unless it has ended."""
    self._engine.cancel(self._ticket)

  async def accept(self, deadline: float) -> None:
    """Waits until the engine has accepted the request; raises RequestError if it refuses."""
    event = await self._next(deadline)
    if isinstance(event, Refused):
      code = 'context_length_exceeded' if event.does_not_fit else None
      raise RequestError(event.message, field='messages' if self._asked.is_chat else 'prompt', code=code)
    if not isinstance(event, Accepted):
      raise _ended_early(event)
    # An answer in a chat, and the text of a source, are new texts, so they are decoded without the prompt.
    batcher = self._engine.batcher
    begins = self._asked.is_chat or batcher.prompts_are_sources
    before, stop_ids = [] if begins else event.prompt, batcher.sampler.stop_ids
    self._text = ServedText(self._served.tokenizer, before, self._asked.stop, stop_ids)
    self._usage = Usage(len(event.prompt), 0)

  async def whole(self, deadline: float) -> Response:
    await self.accept(deadline)
    piece = NOTHING
    while isinstance(event := await self._next(deadline), NewTokensEvent):
      piece += event
    reason = _reason(event)
    usage = self._usage._replace(continuation=len(piece.ids))
    return _json(self._replies.whole(self._text.add(piece.ids, is_all=True), piece, reason, usage))

  async def stream(self, deadline: float) -> AsyncIterator[bytes]:
    """Yields the reply in pieces; call `accept` first."""
    yield self._replies.start()
    ids = list[int]()
    try:
      while isinstance(event := await self._next(deadline), NewTokensEvent):
        ids += event.ids
        yield self._replies.piece(self._text.add(ids, is_all=False), event)
      reason = _reason(event)
      yield self._replies.piece(self._text.add(ids, is_all=True), NOTHING)
      yield self._replies.end(reason, self._usage._replace(continuation=len(ids)) if self._asked.has_usage else None)
    except RequestError as error:
      yield to_event(error.to_json())

  async def _next(self, deadline: float) -> Event:
    try:
      return await asyncio.wait_for(self._events.get(), deadline - time.monotonic())
    except TimeoutError:
      raise RequestError('the request took too long', 504, code='timeout') from None


class _Stream(StreamingResponse):  # type: ignore[misc, unused-ignore]
  """A reply in pieces; ends the request if the client disconnects, or does not read in time."""

  def __init__(self, work: _Work, deadline: float):
    super().__init__(work.stream(deadline), media_type='text/event-stream', headers={'cache-control': 'no-cache'})
    self._work, self._deadline = work, deadline

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(self._deadline - time.monotonic() + 1):
          await super().__call__(scope, receive, send)
    except asyncio.CancelledError:  # Uvicorn cancels requests after the time to drain.
      with contextlib.suppress(Exception):  # The client may have disconnected, too.
        await send({'type': 'http.response.body', 'body': to_event(_ENDING.to_json()), 'more_body': False})
    finally:
      self._work.cancel()


def _reason(event: Event) -> str:
  if isinstance(event, EndEvent) and event.reason in (STOPPED, LENGTH):
    return event.reason
  raise _ended_early(event)


def _ended_early(event: Event) -> RequestError:
  return RequestError(f'the request was not completed: {event.reason if isinstance(event, EndEvent) else event}', 503)


async def _read_body(request: Request, most_bytes: int) -> bytes:
  kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
  if kind != 'application/json':  # A browser sends this type across sites only after a CORS preflight.
    raise RequestError(f'content-type is {kind[:60]!r}; expected application/json', 415)
  body = bytearray()
  try:
    async with asyncio.timeout(_BODY_S):
      async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
          raise RequestError(f'the body has more than {most_bytes:,} bytes', 413)
  except TimeoutError:
    raise RequestError(f'the body did not arrive in {_BODY_S:g} s', 408) from None
  except ClientDisconnect:
    raise RequestError('the client is gone', 499) from None
  return bytes(body)


async def _unless_gone(request: Request, reply: Any) -> Response:
  """Returns the result of the coroutine `reply`; cancels it and raises RequestError if the client disconnects."""
  work, gone = asyncio.ensure_future(reply), asyncio.ensure_future(_wait_until_gone(request))
  try:
    await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
      raise RequestError('the client is gone', 499)
    return work.result()
  finally:
    for task in (work, gone):
      task.cancel()
    await asyncio.gather(work, gone, return_exceptions=True)


async def _wait_until_gone(request: Request) -> None:
  while (await request.receive())['type'] != 'http.disconnect':
    pass


def _json(value: object, status: int = 200) -> Response:
  return Response(encode_json(value), status, media_type='application/json')


def _error(error: RequestError, *, closes: bool = False) -> Response:
  response = _json(error.to_json(), error.status)
  if error.code == 'busy':
    response.headers['retry-after'] = '1'
  if closes or error.status in (408, 413):  # The rest of the body would follow on this connection.
    response.headers['connection'] = 'close'
  return response


async def _answer_http_error(request: Request, error: Exception) -> Response:
  assert isinstance(error, HTTPException)
  routes = [route for route in request.app.routes if isinstance(route, Route)]
  known = ', '.join(f'{"POST" if "POST" in (route.methods or ()) else "GET"} {route.path}' for route in routes)
  told = f'{request.method} {request.url.path}: {error.detail}; the routes are {known}'
  response = _error(RequestError(told, error.status_code))
  response.headers.update(error.headers or {})
  return response
