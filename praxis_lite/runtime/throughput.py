"""How fast training goes: steps, examples and tokens a second, and the used share of the devices' peak (MFU)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

# Dense bfloat16 operations a second of one JAX device, from the makers' data sheets (TPU v2 and v3: one core of two).
# The first entry whose words are all in the device kind counts, so longer names come first.
_PEAK_FLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
  (('tpu', 'v6'), 918e12),
  (('tpu', 'v5', 'lite'), 197e12),
  (('tpu', 'v5e'), 197e12),
  (('tpu', 'v5'), 459e12),
  (('tpu', 'v4', 'lite'), 138e12),
  (('tpu', 'v4'), 275e12),
  (('tpu', 'v3'), 61.5e12),
  (('tpu', 'v2'), 22.5e12),
  (('gb200',), 2500e12),
  (('b200',), 2250e12),
  (('gh200',), 989e12),
  (('h200',), 989e12),
  (('h100', 'pcie'), 756e12),
  (('h100', 'nvl'), 835e12),
  (('h100',), 989e12),
  (('h800',), 989e12),
  (('a100',), 312e12),
  (('a800',), 312e12),
  (('l40s',), 362e12),
  (('l40',), 181e12),
  (('l4',), 121e12),
  (('a10g',), 70e12),
  (('a10',), 125e12),
  (('v100',), 125e12),
)


def peak_flops(device: Any) -> float | None:
  """Returns the dense bfloat16 peak of one device in operations a second; None where not known, as on a CPU."""
  words = device.device_kind.lower().replace('-', ' ').split()
  if device.platform == 'cpu':
    return None
  for parts, peak in _PEAK_FLOPS:
    if all(any(word.startswith(part) for word in words) for part in parts):
      return peak
  return None


class Rates(NamedTuple):
  """Speeds over the steps since the last call; tokens and MFU are None where there are none or they are not known."""

  steps_per_second: float
  examples_per_second: float
  tokens_per_second: float | None
  mfu: float | None

  def as_metrics(self) -> dict[str, float]:
    """The known ones by name, for summaries."""
    return {f'speed/{name}': value for name, value in self._asdict().items() if value is not None}


class Throughput:
  """Measures speed between calls of `rates`.

  Args:
    batch_struct: shapes of one global batch; a leaf `ids` of shape [B, T] makes tokens count.
    flops_per_step: model operations of one step over all devices, three times those of the forward pass; None if not
      known.
    devices: the devices of the mesh.
    clock: seconds, for tests.
  """

  def __init__(
    self,
    batch_struct: Mapping[str, Any],
    *,
    flops_per_step: float | None = None,
    devices: Any = (),
    clock: Callable[[], float] = time.perf_counter,
  ):
    self._examples = int(jax.tree.leaves(dict(batch_struct))[0].shape[0])
    self._tokens = _tokens_per_batch(batch_struct)
    self._flops = flops_per_step
    peaks = [peak_flops(device) for device in devices]
    self._peak = math.fsum(p for p in peaks if p) if peaks and all(peaks) else None
    self._clock = clock
    self._mark: tuple[int, float] | None = None

  def restart(self, step: int) -> None:
    """Starts measuring after `step`: what passed since the last call (an evaluation, say) does not count."""
    self._mark = (step, self._clock())

  def rates(self, step: int) -> Rates | None:
    """Returns the speeds of the steps up to `step` since the last call or restart; None if there were none."""
    now = self._clock()
    before, self._mark = self._mark, (step, now)
    if before is None or step <= before[0] or now <= before[1]:
      return None
    steps = (step - before[0]) / (now - before[1])
    tokens = None if self._tokens is None else steps * self._tokens
    known = self._flops is not None and self._peak is not None
    mfu = steps * self._flops / self._peak if known else None  # type: ignore[operator]
    return Rates(steps, steps * self._examples, tokens, mfu)


def _tokens_per_batch(batch_struct: Mapping[str, Any]) -> int | None:
  ids = batch_struct.get('ids')
  return math.prod(ids.shape) if ids is not None and len(ids.shape) == 2 else None
