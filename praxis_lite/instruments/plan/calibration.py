"""Measures which share of their published figures the local devices reach, and stores the shares for plans.

    praxis-lite plan --calibrate

    measured                the program                           as a share of
    compute                 a product of bfloat16 matrices        the peak
    attention               fused attention, on GPUs and TPUs     the peak
    memory                  x + 1 of a large array                the memory's bandwidth
    links                   an all-gather over all local devices  the bandwidth of their fast links
    seconds_per_operation   small operations in a row
    seconds_per_hop         an all-gather of 64 bytes per device

Each program runs for a second, so that power and clock rates settle as in a long run. One host cannot measure the
network between hosts, so that share stays an assumption. One file stores the measurements of all kinds of accelerators.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from praxis_lite.common.accelerators import accelerator_of
from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.files import cache_folder, parse_json, replace_file
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.targets import TARGETS, Efficiency, Target
from praxis_lite.instruments.plan.topology import Topology
from praxis_lite.layers import AttentionSpec, Causal, dot_product_attention

T = TypeVar('T')


def calibration_file() -> Path:
  """Returns the path of the file in which `praxis-lite plan` stores measurements."""
  return cache_folder() / 'calibration.json'


def apply_calibration(topology: Topology, file: Path) -> Topology:
  """Returns the topology with the measured efficiency of its target; unchanged if `file` has no entry for it.

  Raises:
    UserError: `file` does not have the format that `calibrate` writes.
  """
  found = read_measurements(file, _efficiency, '--calibrate').get(topology.target.name)
  if found is None:
    return topology
  return dataclasses.replace(topology, target=dataclasses.replace(topology.target, efficiency=found))


def calibrate(
  file: Path | None = None,
  *,
  devices: Sequence[jax.Device] | None = None,
  matrix: int = 8192,
  megabytes: int = 1024,
  seconds: float = 1.0,
  report: Callable[[str], object] = lambda stage: None,
) -> Target:
  """Measures the efficiency that programs reach on devices, and returns a target with that efficiency.

  Args:
    file: the file in which to store the efficiency, next to the entries of other targets; None stores nothing.
    devices: devices of one kind; None uses the local devices of this process.
    matrix: number of rows and of columns of the matrices that are multiplied.
    megabytes: size of the arrays that are read, written or gathered; at most 1/16 of a device's memory is used.
    seconds: run time of each program.
    report: called with the name of each measurement before it begins.

  Raises:
    ConfigError: the published figures of these devices are not known.
    UserError: `file` does not have the format that this function writes.
  """
  if devices is None:
    start_devices()
  devices = list(devices or jax.local_devices())
  kind = devices[0].device_kind
  accelerator = accelerator_of(kind)
  name = 'cpu' if devices[0].platform == 'cpu' else accelerator.name if accelerator else ''
  if not name:
    raise ConfigError(f'--calibrate: no figures of {kind!r} are known to measure by; known are {", ".join(TARGETS)}')
  kept = {} if file is None else read_measurements(file, _efficiency, '--calibrate')
  perfect = dataclasses.replace(TARGETS[name], efficiency=Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0))
  size = min(megabytes * 10**6, int(perfect.device_memory / 16))
  found = dict(_measure(perfect, devices, matrix, size, seconds, report))
  when = datetime.date.today().isoformat()
  rest = ', '.join(field.name for field in dataclasses.fields(Efficiency) if field.name not in (*found, 'calibrated'))
  text = f'{len(devices)} x {kind}, {when}, jax {jax.__version__}; assumed: {rest}'
  measured: dict[str, Any] = {**found, 'calibrated': text}
  efficiency = dataclasses.replace(TARGETS[name].efficiency, **measured)
  if file is not None:
    try:
      write_measurements(file, {chip: dataclasses.asdict(e) for chip, e in (kept | {name: efficiency}).items()})
    except OSError as error:
      raise UserError(f'{file}: what was measured cannot be written: {error}') from error
  return dataclasses.replace(TARGETS[name], efficiency=efficiency)


# ---------------------------------------------------------------- measurements


def _measure(
  perfect: Target,
  devices: Sequence[jax.Device],
  matrix: int,
  size: int,
  seconds: float,
  report: Callable[[str], object],
) -> Iterator[tuple[str, float]]:
  """Yields (name, measured value) of fields of `Efficiency`; `perfect` is the target with all shares set to 1."""
  with jax.default_device(devices[0]):
    report('products of matrices')
    # Sums are in float32, but the result is bfloat16: float32 would add memory traffic.
    taken = _time(lambda i, x, w: x @ w, _normal(0, matrix), _normal(1, matrix) / matrix**0.5, seconds=seconds)
    compute = 2 * matrix**3 / perfect.peak('bf16') / taken
    yield 'compute', compute
    report('attention')
    yield 'attention', _attention_share(perfect, matrix, seconds) if perfect.kind in ('gpu', 'tpu') else compute
    report('memory')
    taken = _time(lambda i, x: x + 1, jnp.zeros(size // 4, jnp.float32), seconds=seconds)
    yield 'memory', 2 * size / perfect.device_bandwidth / taken
    report('small operations')
    yield 'seconds_per_operation', _time(_repeat, jnp.zeros(1024), seconds=seconds) / _OPERATIONS
  if len(devices) > 1:
    report('links')
    links, ids = Links(_topology_of(perfect, devices)), (tuple(range(len(devices))),)
    gather = functools.partial(_gather, Mesh(np.array(devices), 'x'))
    each = max(size // 4 // len(devices), 1)
    taken = _time(gather, jnp.zeros(each * len(devices)), seconds=seconds)
    yield 'links', links.traffic('all-gather', ids, 4 * each, 4 * each * len(devices)).seconds / taken
    yield 'seconds_per_hop', _time(gather, jnp.zeros(16 * len(devices)), seconds=seconds) / links.hops(ids)


_OPERATIONS = 64


def _time(step: Callable[..., jax.Array], x: jax.Array, *more: jax.Array, seconds: float) -> float:
  """Returns how many seconds `x = step(i, x, *more)` takes, as the mean over a loop that runs for about `seconds`."""
  loop = jax.jit(lambda n, x, *more: jax.lax.fori_loop(0, n, lambda i, x: step(i, x, *more), x))

  def run(times: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready(loop(times, x, *more))
    return time.perf_counter() - start

  run(1)
  times = 1
  while (taken := run(times)) < seconds / 4:  # The first run also warms up.
    times = min(times * 4, max(int(times * seconds / 2 / max(taken, 1e-9)), times + 1))
  times = max(int(times * seconds / taken), 1)
  return run(times) / times


def _normal(seed: int, size: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16)


def _repeat(i: jax.Array, x: jax.Array) -> jax.Array:
  for _ in range(_OPERATIONS):
    x = jax.lax.optimization_barrier(x + 1)  # Without the barrier, XLA fuses all additions into one operation.
  return x


def _gather(mesh: Mesh, i: jax.Array, x: jax.Array) -> jax.Array:
  """All-gathers `x` and returns a part of the result. A barrier keeps XLA from sending only that part."""

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P('x')), out_specs=P('x'), check_vma=False)
  def gather(i: jax.Array, x: jax.Array) -> jax.Array:
    whole = jax.lax.optimization_barrier(jax.lax.all_gather(x, 'x', tiled=True))
    return jax.lax.dynamic_slice(whole, (i % mesh.size * x.size,), x.shape)

  return gather(i, x)


def _attention_share(perfect: Target, length: int, seconds: float) -> float:
  """Returns the share of the peak that fused attention reaches with heads that fill the matrix units.

  It counts 2 products in the forward pass and 5 (on TPUs 7) in the backward pass, and half the FLOPs of each, because
  the mask is causal.
  """
  heads, dims = 8, 128
  kernel: Literal['splash', 'cudnn'] = 'splash' if perfect.kind == 'tpu' else 'cudnn'
  query = jnp.ones((1, length, heads, dims), jnp.bfloat16)

  def step(i: jax.Array, x: jax.Array) -> jax.Array:
    attend = functools.partial(dot_product_attention, mask=Causal(), spec=AttentionSpec(implementation=kernel))
    gradients = jax.grad(lambda x: attend(x, x, x).astype(jnp.float32).sum())(x)
    return x + (gradients * 1e-6).astype(x.dtype)

  flops = (9 if kernel == 'splash' else 7) * 2 * heads * dims * length**2 / 2
  return flops / perfect.peak('bf16') / perfect.attention_share(dims) / _time(step, query, seconds=seconds)


def _topology_of(target: Target, devices: Sequence[jax.Device]) -> Topology:
  if target.kind != 'tpu':
    return Topology(target, (1, len(devices)) if target.kind == 'gpu' else (len(devices),))
  coordinates = np.array([device.coords for device in devices])
  extent = coordinates.max(axis=0) - coordinates.min(axis=0) + 1
  return Topology(target, tuple(int(n) for n in extent[: target.torus]))


# ---------------------------------------------------------------- the file


def read_measurements(file: Path, parse: Callable[[Any], T], flag: str) -> dict[str, T]:
  """Returns the entries of a file that `praxis-lite plan` writes with `flag`; {} if there is no file.

  Raises:
    UserError: the file has the wrong format, or `parse` raises ValueError or TypeError for an entry.
  """
  if not file.is_file():
    return {}
  try:
    return {name: parse(entry) for name, entry in parse_json(file.read_bytes()).items()}
  except (OSError, ValueError, TypeError, AttributeError) as error:
    command = f'`praxis-lite plan {flag}`'
    raise UserError(
      f'{file}: not what {command} writes ({error}); remove it, and measure again with {command}'
    ) from error


def write_measurements(file: Path, entries: Mapping[str, object]) -> None:
  """Writes the entries, as JSON, to a file for `read_measurements`; raises OSError if it cannot be written."""
  file.parent.mkdir(parents=True, exist_ok=True)
  replace_file(file, json.dumps(entries, indent=2) + '\n')


def check_positive(numbers: Iterable[object]) -> None:
  """Raises ValueError unless all are positive and finite numbers."""
  if not all(type(x) in (int, float) and 0 < x < math.inf for x in numbers):  # type: ignore[operator]
    raise ValueError('expected positive numbers')


def _efficiency(fields: dict[str, Any]) -> Efficiency:
  numbers = {name: x for name, x in fields.items() if name != 'calibrated'}
  check_positive(numbers.values())
  return Efficiency(**numbers, calibrated=str(fields.get('calibrated', '')))
