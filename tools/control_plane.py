"""Measures the cost of a run's control plane by the number of processes: messages, bytes and times, with slopes.

    python tools/control_plane.py --processes=8,32,100,300,1000 --picture=docs/assets/control-plane.svg

There is one real service of JAX. Each simulated process has a real client of it and a real connection to the
rendezvous; they are threads of a few processes. It measures what `praxis_lite` adds to JAX, which is the rendezvous,
the beats of the watchdog, and `status` over the heartbeats on disk, and for comparison JAX's own connecting and one
barrier. All processes share the cores of this machine, so the times are upper bounds. The figures for 10,000 processes
are extrapolated from the last two numbers of processes, linearly in logarithms.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from praxis_lite.common.jax_internals.processes import Client

Row = dict[str, float]
Table = dict[int, Row]  # By the number of processes.
PER_WORKER = 125
ROUNDS = 5
FAR = 10_000


class CountingClient:
  """A client of JAX's service that counts the requests and the bytes of keys and values, in both directions."""

  def __init__(self, client: Client):
    self._client, self.requests, self.bytes = client, 0, 0

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
    self.requests, self.bytes = self.requests + 1, self.bytes + len(key) + len(value)
    self._client.key_value_set(key, value, allow_overwrite=allow_overwrite)

  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
    found = self._client.key_value_dir_get(key)
    self.requests, self.bytes = self.requests + 1, self.bytes + sum(len(k) + len(v) for k, v in found)
    return found

  def key_value_try_get(self, key: str) -> str:
    self.requests, self.bytes = self.requests + 1, self.bytes + len(key)
    value = self._client.key_value_try_get(key)  # Raises an error if there is no such key.
    self.bytes += len(value)
    return value

  def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
    self._client.wait_at_barrier(barrier_id, timeout_in_ms)


def all_of(targets: Sequence[Callable[[], object]]) -> None:
  threads = [threading.Thread(target=target) for target in targets]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()


def work(first: int, last: int, count: int, meeting: str, service: str, way: str) -> None:
  """Simulates the processes from `first` to `last`; prints a line of JSON."""
  from jax._src.lib import _jax  # type: ignore[attr-defined]

  from praxis_lite.runs.cluster import beats as beats_module
  from praxis_lite.runs.cluster.clusters import Job
  from praxis_lite.runs.cluster.rendezvous import meet
  from praxis_lite.runs.cluster.watchdog import PREEMPTION_KEY

  if way == 'all':  # As before: one group.
    beats_module.GROUP = count
  own = range(first, last)
  began = time.monotonic()
  name = 'node-00123, process 12345'
  all_of([partial(meet, Job('test', count, i), meeting, 300.0, name) for i in own])
  met = time.monotonic() - began
  began = time.monotonic()
  clients = {i: _jax.get_distributed_runtime_client(service, i, init_timeout=300) for i in own}
  all_of([clients[i].connect for i in own])
  connected = time.monotonic() - began
  counting = {i: CountingClient(clients[i]) for i in own}
  all_beats = {i: beats_module.Beats(counting[i], i, count) for i in own}
  seconds: list[float] = []

  def exchange(i: int, number: int) -> None:
    at = 'runs/loop/training_loop.py:123 train'
    said = {'beat': number, 'doing': 'step 12345', 'at': at, 'idle': 0.1, 'state': 'running', 'ending': False}
    start = time.monotonic()
    all_beats[i].exchange(said, 0.1)
    all_beats[i].verdict()
    with contextlib.suppress(Exception):
      counting[i].key_value_try_get(PREEMPTION_KEY)  # As the watchdog does in each beat.
    seconds.append(time.monotonic() - start)

  def barrier(name: str) -> float:
    start = time.monotonic()
    all_of([partial(clients[i].wait_at_barrier, name, 300_000) for i in own])
    return time.monotonic() - start

  for i in own:
    exchange(i, 0)
  barrier('written')
  for each in counting.values():
    each.requests = each.bytes = 0
  seconds.clear()
  for number in range(1, ROUNDS + 1):
    for i in own:
      exchange(i, number)
  barriers = [barrier(f'barrier {number}') for number in range(3)]
  spent = {'requests': max(each.requests for each in counting.values()) / ROUNDS}
  spent |= {'bytes': max(each.bytes for each in counting.values()) / ROUNDS, 'beat': statistics.median(seconds)}
  print(json.dumps({**spent, 'meet': met, 'connect': connected, 'barrier': min(barriers)}), flush=True)
  sys.stdin.read()  # Waits until all are done, because JAX ends the others when one process leaves.
  os._exit(0)


def measure(count: int, way: str) -> Row:
  """Returns the figures for `count` processes."""
  from jax._src.lib import _jax  # type: ignore[attr-defined]

  from praxis_lite.runs.cluster.beats import beat_interval
  from praxis_lite.runs.cluster.launch import free_port

  meeting, address = f'localhost:{free_port()}', f'localhost:{free_port()}'
  service = _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=600, shutdown_timeout=5)
  workers = []
  for first in range(0, count, PER_WORKER):
    numbers = [str(n) for n in (first, min(first + PER_WORKER, count), count)]
    command = [sys.executable, __file__, '--work', *numbers, meeting, address, way]
    workers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
  try:
    lines = [json.loads(worker.stdout.readline()) for worker in workers if worker.stdout is not None]
  finally:
    for worker in workers:
      worker.kill()
      worker.wait()
    del service
  found = {name: max(line[name] for line in lines) for name in lines[0]}
  interval = beat_interval(count, 300.0) if way == 'groups' else 1.0
  found |= {'groups': float(way == 'groups'), 'interval': interval, 'messages/s': count * found['requests'] / interval}
  return found | {'bytes/s': count * found['bytes'] / interval, 'status': status_seconds(count)}


def status_seconds(count: int) -> float:
  """Returns the seconds that reading and describing the heartbeats of `count` processes takes."""
  from praxis_lite.runs.records.heartbeat import Heartbeat, read_heartbeats
  from praxis_lite.runs.records.status import status_of

  with tempfile.TemporaryDirectory() as folder:
    Path(folder, 'heartbeats').mkdir()
    speed = {'median': 1.2, 'p90': 1.3, 'waited': 0.0, 'product': 0.001}
    for i in range(count):
      beat = Heartbeat(process=i, processes=count, host=f'n{i}', time=time.time(), speed=speed)
      Path(folder, 'heartbeats', f'{i}.json').write_text(json.dumps(dataclasses.asdict(beat)))
    began = time.perf_counter()
    status_of(read_heartbeats(folder), is_held=True)
    return time.perf_counter() - began


COLUMNS = {
  'requests': 'requests of a process in a beat',
  'bytes': 'bytes of a process in a beat',
  'messages/s': 'messages/s at the service',
  'bytes/s': 'bytes/s at the service',
  'beat': 'seconds of a beat',
  'meet': 'rendezvous, s',
  'connect': "JAX's connecting, s",
  'barrier': 'a barrier, s',
  'status': '`status`, s',
}


def slope(table: Table, name: str) -> float:
  """Returns the exponent with which a figure grows between the last two numbers of processes."""
  (small, before), (large, after) = list(table.items())[-2:]
  return math.log(max(after[name], 1e-9) / max(before[name], 1e-9)) / math.log(large / small)


def far(table: Table, name: str) -> float:
  """Returns a figure, extrapolated to 10,000 processes."""
  from praxis_lite.runs.cluster.beats import beat_interval

  count, last = list(table.items())[-1]
  of_one = {'messages/s': 'requests', 'bytes/s': 'bytes'}.get(name)
  if of_one is not None:
    return FAR * far(table, of_one) / (beat_interval(FAR, 300.0) if last['groups'] else 1.0)
  return last[name] * (FAR / count) ** slope(table, name)


def number(value: float) -> str:
  return f'{value:,.0f}' if value >= 100 else f'{value:.3g}'


def as_markdown(table: Table) -> str:
  lines = [f'| processes | {" | ".join(COLUMNS.values())} |', '|---' * (len(COLUMNS) + 1) + '|']
  lines += [f'| {count:,} | {" | ".join(number(row[name]) for name in COLUMNS)} |' for count, row in table.items()]
  lines.append(f'| slope | {" | ".join(f"{slope(table, name):.2f}" for name in COLUMNS)} |')
  lines.append(f'| {FAR:,}, extrapolated | {" | ".join(number(far(table, name)) for name in COLUMNS)} |')
  return '\n'.join(lines)


def picture(tables: Mapping[str, Table]) -> str:
  """Returns an SVG of the service's bytes per second by the number of processes, with logarithmic axes."""
  width, height, left, bottom, top = 640, 320, 90, 280, 20
  x = lambda count: left + (width - left - 120) * math.log(count / 8) / math.log(FAR / 8)  # noqa: E731
  values = [row['bytes/s'] for table in tables.values() for row in table.values()]
  low, high = min(values), max([*values, *(far(table, 'bytes/s') for table in tables.values())])
  y = lambda value: bottom - (bottom - top) * math.log(value / low) / math.log(high / low)  # noqa: E731
  style = 'text{font:12px sans-serif;fill:#777}path{fill:none;stroke-width:2}line{stroke:#777;stroke-opacity:.3}'
  parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{style}</style>']
  for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
    unit = ['', 'k', 'M', 'G', 'T'][power // 3]
    parts.append(f'<line x1="{left}" x2="{width - 120}" y1="{y(10**power):.1f}" y2="{y(10**power):.1f}"/>')
    parts.append(
      f'<text x="{left - 8}" y="{y(10**power) + 4:.1f}" text-anchor="end">{10 ** (power % 3)} {unit}B/s</text>'
    )
  for count in (8, 100, 1000, FAR):
    parts.append(f'<text x="{x(count):.1f}" y="{bottom + 18}" text-anchor="middle">{count:,}</text>')
  parts.append(f'<text x="{left}" y="{height - 4}">processes</text>')
  for (name, table), color in zip(tables.items(), ('#2b7bd6', '#c2452d')):
    points = [(x(count), y(row['bytes/s'])) for count, row in table.items()]
    end = (x(FAR), y(far(table, 'bytes/s')))
    line = f'stroke="{color}" stroke-dasharray="5 4"'
    parts.append(f'<path stroke="{color}" d="M{" L".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>')
    (a, b), (c, d) = points[-1], end
    parts.append(f'<path {line} d="M{a:.1f},{b:.1f} L{c:.1f},{d:.1f}"/>')
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in points]
    parts.append(f'<text x="{end[0] + 6:.1f}" y="{end[1] + 4:.1f}">{name}</text>')
  return '\n'.join([*parts, '</svg>', ''])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--processes', default='8,32,100,300,1000')
  parser.add_argument('--picture')
  parser.add_argument('--without_groups', type=int, default=300, help='the most processes that all read all')
  values = parser.parse_args()
  sizes = [int(size) for size in values.processes.split(',')]
  tables: dict[str, Table] = {}
  for way, name in (('groups', 'in groups'), ('all', 'all read all')):
    tables[name] = {}
    for count in sizes if way == 'groups' else [size for size in sizes if size <= values.without_groups]:
      tables[name][count] = measure(count, way)
      print(f'{name}, {count}: {tables[name][count]}', flush=True)
    print(as_markdown(tables[name]), flush=True)
  if values.picture:
    Path(values.picture).write_text(picture(tables))


if __name__ == '__main__':
  if sys.argv[1:2] == ['--work']:
    first, last, count, meeting, service, way = sys.argv[2:]
    work(int(first), int(last), int(count), meeting, service, way)
  else:
    main()
