"""Where the time goes: the start-up, then steps, examples and tokens per second, and the used share of the peak (MFU).

Model operations are counted in the jaxpr, since XLA's count for a compiled program includes the body of a loop once and
skips library kernels:

    dot_general             2 * batch * M * N * K
    ragged_dot_general      2 * M * N * K: each row by the weights of its group
    conv_general_dilated    2 * output elements * kernel elements per output channel
    fused attention         4 * B * N * T * S * H, the two products that it computes
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core


class StartupTimes:
  """Assigns all time from its making to the first step to named phases.

      startup = StartupTimes()
      ...
      startup.mark('data')              # the time since then is that of 'data'
      startup.report()                  # 'first step after 7.9 s: data 0.4, compile 2.9, ...'

  `clock` returns seconds, for tests.
  """

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    self._clock = clock
    self._last = clock()
    self._seconds: dict[str, float] = {}

  def mark(self, name: str) -> None:
    """Assigns the time since the last mark to phase `name`."""
    self.mark_parts({name: self._clock() - self._last})

  def mark_parts(self, seconds: Mapping[str, float]) -> None:
    """Assigns the time since the last mark to several phases, whose seconds were measured elsewhere."""
    for name, value in seconds.items():
      self._seconds[name] = self._seconds.get(name, 0.0) + value
    self._last = self._clock()

  def report(self) -> str:
    """Returns one line; phases of less than 0.05 s are left out."""
    shown = ', '.join(f'{name} {seconds:.1f}' for name, seconds in self._seconds.items() if seconds >= 0.05)
    return f'first step after {sum(self._seconds.values()):.1f} s: {shown}'


def count_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> float:
  """Returns the operations of one call: of the most expensive branch of a `cond`, and of one round of a `while`."""
  return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: core.JaxprEqn) -> float:
  name, params = equation.primitive.name, equation.params
  shapes: list[tuple[int, ...]] = [getattr(v.aval, 'shape', ()) for v in equation.invars[:3]]
  elements = math.prod(getattr(equation.outvars[0].aval, 'shape', ())) if equation.outvars else 0
  if name == 'dot_general':
    (contracting, _), _ = params['dimension_numbers']
    return 2.0 * elements * math.prod(shapes[0][d] for d in contracting)
  if name == 'ragged_dot_general':
    numbers = params['ragged_dot_dimension_numbers']
    (contracting, _), _ = numbers.dot_dimension_numbers
    # Where groups are of the dimension summed over, there is a result for each, summed over its part.
    summed_in_groups = set(numbers.lhs_ragged_dimensions) <= set(contracting)
    groups = shapes[2][-1] if summed_in_groups else 1
    return 2.0 * elements * math.prod(shapes[0][d] for d in contracting) / groups
  if name == 'conv_general_dilated':
    out_channels = shapes[1][params['dimension_numbers'].rhs_spec[0]]
    return 2.0 * elements * math.prod(shapes[1]) / out_channels
  if name.startswith('dot_product_attention_fwd'):
    query, key = shapes[:2]  # [B, T, N, H] and [B, S, K, H]
    return 4.0 * math.prod(query) * key[1]
  if name == 'cond':
    return max(count_flops(branch) for branch in params['branches'])
  below = sum(count_flops(jaxpr) for jaxpr in jax.tree.leaves(params, is_leaf=_is_jaxpr) if _is_jaxpr(jaxpr))
  if name == 'scan':
    return below * params['length']
  if name == 'shard_map':  # Inside, shapes are those of one device.
    sizes, mapped = params['mesh'].shape, params['newly_manual_axes']
    return below * math.prod(sizes[axis] for axis in mapped)
  return below


def _is_jaxpr(value: object) -> bool:
  return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


# Dense bfloat16 operations of one JAX device in 1e12 per second, from the data sheets (TPU v2 and v3: one core of two).
_PEAKS: dict[float, tuple[str, ...]] = {
  918: ('tpu v6',),
  459: ('tpu v5',),
  275: ('tpu v4',),
  197: ('tpu v5 lite', 'tpu v5e'),
  138: ('tpu v4 lite',),
  61.5: ('tpu v3',),
  22.5: ('tpu v2',),
  2500: ('gb200',),
  2250: ('b200',),
  989: ('gh200', 'h200', 'h100', 'h800'),
  835: ('h100 nvl',),
  756: ('h100 pcie',),
  362: ('l40s',),
  312: ('a100', 'a800'),
  181: ('l40',),
  125: ('a10', 'v100'),
  121: ('l4',),
  70: ('a10g',),
}


def peak_flops(device: jax.Device) -> float | None:
  """Returns the dense bfloat16 peak of one device in operations per second; None if unknown, as for a CPU."""
  words = device.device_kind.lower().replace('-', ' ').split()
  matches = [
    (len(name), peak)
    for peak, names in _PEAKS.items()
    for name in names
    if all(any(word.startswith(part) for word in words) for part in name.split())
  ]
  # The longest name counts: a 'TPU v5 lite' is also a 'tpu v5', and an 'L40S' an 'l4'.
  return max(matches)[1] * 1e12 if matches and device.platform != 'cpu' else None


class Rates(NamedTuple):
  """Speeds over the steps since the last call; tokens and MFU are None if there are none or they are unknown."""

  steps_per_second: float
  examples_per_second: float
  tokens_per_second: float | None
  mfu: float | None

  def as_metrics(self) -> dict[str, float]:
    """The known speeds by name, for summaries."""
    return {f'speed/{name}': value for name, value in self._asdict().items() if value is not None}


class Throughput:
  """Measures speed between calls of `rates`.

  Args:
    batch_struct: shapes of one global batch; tokens are counted if it has `ids` of shape [B, T].
    flops_per_step: model operations of one step over all devices; None if unknown.
    devices: the devices of the mesh.
    clock: returns seconds; for tests.
  """

  def __init__(
    self,
    batch_struct: Mapping[str, Any],
    *,
    flops_per_step: float | None = None,
    devices: Iterable[jax.Device] = (),
    clock: Callable[[], float] = time.perf_counter,
  ):
    self._examples = int(jax.tree.leaves(dict(batch_struct))[0].shape[0])
    ids = batch_struct.get('ids')
    self._tokens = math.prod(ids.shape) if ids is not None and len(ids.shape) == 2 else None
    self._flops = flops_per_step
    peaks = [peak_flops(device) for device in devices]
    self._peak = math.fsum(p for p in peaks if p) if peaks and all(peaks) else None
    self._clock = clock
    self._mark: tuple[int, float] | None = None

  def restart(self, step: int) -> None:
    """Starts measuring after `step`: the time since the last call, such as that of an evaluation, does not count."""
    self._mark = (step, self._clock())

  def rates(self, step: int) -> Rates | None:
    """Returns the speeds of the steps up to `step` since the last call or restart; None if there were none."""
    now = self._clock()
    before, self._mark = self._mark, (step, now)
    if before is None or step <= before[0] or now <= before[1]:
      return None
    steps = (step - before[0]) / (now - before[1])
    tokens = None if self._tokens is None else steps * self._tokens
    mfu = None if self._flops is None or self._peak is None else steps * self._flops / self._peak
    return Rates(steps, steps * self._examples, tokens, mfu)
