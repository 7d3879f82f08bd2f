"""The chips that a plan is for: `v5p:8x16x16`, `v5e:16x16:2`, `h100:512x8`, `a100:8`, `cpu:64`.

TPU     sizes of the torus of a slice, then optionally `:` and the number of slices
GPU     hosts x GPUs in a host (for gb200, racks x GPUs in a rack), or the number of GPUs
cpu     the number of simulated devices
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from praxis_lite.common.errors import ConfigError, ShardingError, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.instruments.plan.targets import Target, find_target

_FORM = 'expected a form such as v5p:8x16x16, v5e:16x16:2 (two slices), h100:512x8 (hosts x GPUs of each) or cpu:64'


class Experience(NamedTuple):
  """The number of measured runs on a kind of chip; the typical, least and largest ratio of measured to planned time."""

  runs: int
  typical: float
  least: float
  largest: float


@dataclasses.dataclass(frozen=True)
class Topology:
  """Chips of one kind, and the links between them.

  Attributes:
    target: the kind of chip.
    shape: TPU: sizes of the torus of a slice. GPU: (domains of fast links, chips in a domain). cpu: (devices,).
    slices: number of slices, connected by the network of the data center.
    experience: the runs whose measurements have corrected the efficiency of the target; None without such runs.
  """

  target: Target
  shape: tuple[int, ...]
  slices: int = 1
  experience: Experience | None = None

  @property
  def name(self) -> str:
    """The name, in the form that `parse_topology` reads."""
    return ':'.join(
      [self.target.name, 'x'.join(map(str, self.shape)), *([str(self.slices)] if self.slices > 1 else [])]
    )

  @property
  def num_chips(self) -> int:
    return math.prod(self.shape) * self.slices

  @property
  def num_devices(self) -> int:
    """The number of JAX devices."""
    return self.num_chips * self.target.devices_per_chip

  @functools.cached_property
  def places(self) -> np.ndarray:
    """The location of each device, [devices, 1 + torus dimensions]: its domain of fast links, then its coordinates in
    the torus.

    Devices are numbered first along the first dimension of the torus.
    """
    if not self.target.torus:
      per_domain = self.shape[-1] if self.target.kind == 'gpu' else self.num_devices
      return (np.arange(self.num_devices) // per_domain)[:, None]
    one = np.indices(self.shape[::-1]).reshape(len(self.shape), -1).T[:, ::-1]
    one = np.repeat(one, self.target.devices_per_chip, axis=0)
    domains = np.repeat(np.arange(self.slices), len(one))
    return np.column_stack([domains, np.tile(one, (self.slices, 1))])

  def change_network(self, host_gigabits: float | None = None, oversubscription: float = 1.0) -> Topology:
    """Returns the topology with another network between domains of fast links.

    Args:
      host_gigabits: gigabits per second of all network adapters of a host, in one direction; by default as published.
      oversubscription: the bandwidth of all adapters divided by that of the switches between hosts; 2 means 2:1.
    """
    target = self.target
    share = target.network if host_gigabits is None else host_gigabits * 1e9 / 8 / target.chips_per_host
    return dataclasses.replace(self, target=dataclasses.replace(target, network=share / oversubscription))

  def change_chips(self, chips: int) -> Topology | None:
    """Returns the topology with another number of chips, in one slice or in full hosts; None if that is impossible."""
    target = self.target
    if target.kind == 'tpu':  # More chips than the largest slice would need several slices, with slower links.
      shape = nearest_torus(target, chips)
      return dataclasses.replace(self, shape=shape, slices=1) if math.prod(shape) == chips else None
    if target.kind == 'gpu':
      hosts, rest = divmod(chips, target.domain)
      if hosts and rest:
        return None
      return dataclasses.replace(self, shape=(max(hosts, 1), min(chips, target.domain)))
    return dataclasses.replace(self, shape=(chips,))

  def wraps(self, dim: int) -> bool:
    """Whether a dimension of the torus is a ring."""
    return self.shape[dim] % self.target.wraps_at == 0


def parse_topology(text: str) -> Topology:
  """Returns the topology of this name.

  Raises:
    ConfigError: the accelerator is not known or its chips have no such arrangement; the message says what is valid.
  """
  name, _, rest = text.partition(':')
  target = find_target(name.strip())
  parts = rest.strip().lower().split(':')
  if not rest or len(parts) > 2 or not all(re.fullmatch(r'[1-9]\d{0,8}(x[1-9]\d{0,8})*', part) for part in parts):
    raise ConfigError(f'topology {text!r}: {_FORM}')
  if len(parts) > 1 and (target.kind != 'tpu' or not parts[1].isdecimal()):
    raise ConfigError(f'topology {text!r}: a part after the sizes is a number of TPU slices, as in v5e:16x16:2')
  shape = tuple(int(n) for n in parts[0].split('x'))
  with prefix_errors(f'topology {text!r}'):
    if target.kind == 'cpu':
      return Topology(target, (math.prod(shape),))
    arranged = _torus(target, shape) if target.kind == 'tpu' else _hosts(target, shape)
  return Topology(target, arranged, int(parts[1]) if len(parts) > 1 else 1)


def smallest_of(name: str) -> str:
  """Returns the name of the topology with one chip of a kind; raises ConfigError if the kind is not known."""
  target = find_target(name)
  return f'{target.name}:{"x".join(["1"] * max(target.torus, 1))}'


def _torus(target: Target, shape: tuple[int, ...]) -> tuple[int, ...]:
  if len(shape) != target.torus:
    fit = nearest_torus(target, math.prod(shape))
    raise ConfigError(
      f'{target.name} is a torus of {number_of(target.torus, "dimension")}, not {len(shape)}. Did you mean '
      f'{target.name}:{"x".join(map(str, fit))}?'
    )
  if any(a > b for a, b in zip(sorted(shape), sorted(target.largest))):
    largest = 'x'.join(map(str, target.largest))
    raise ConfigError(
      f'the largest slice of {target.name} is {largest}, {math.prod(target.largest):,} chips; '
      f'several slices are written {target.name}:{largest}:2'
    )
  if not _is_sold(shape):
    nearest = 'x'.join(map(str, nearest_torus(target, math.prod(shape))))
    raise ConfigError(
      f'no slice of {target.name} has these sizes; they are {_SOLD[target.torus]}. '
      f'Did you mean {target.name}:{nearest}?'
    )
  return shape


# The available sizes of slices, by the number of torus dimensions; and the 3-D slices of fewer than 64 chips.
_SOLD = {
  2: '1x1, 2x2, 2x4, 4x4, 4x8 and so on, to powers of two',
  3: 'multiples of 4, or 1x1x1, 2x2x1, 2x2x2, 2x2x4, 2x4x4',
}
_FEW_CHIPS = ((1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4))


def _is_sold(shape: tuple[int, ...]) -> bool:
  """Whether slices of these sizes, in any order, are offered by Google Cloud."""
  if len(shape) == 3:
    return all(size % 4 == 0 for size in shape) or tuple(sorted(shape)) in _FEW_CHIPS
  less, more = sorted(shape)
  return more & (more - 1) == 0 and less & (less - 1) == 0 and (more == less or (more == 2 * less and less > 1))


def nearest_torus(target: Target, chips: int) -> tuple[int, ...]:
  """Returns the sizes of a slice of about `chips` chips, as close to a cube as powers of two allow."""
  sizes, left = [1] * target.torus, max(round(math.log2(chips)), 0)
  for i in range(left):
    sizes[-1 - i % target.torus] *= 2
  fit = tuple(min(a, b) for a, b in zip(sizes, sorted(target.largest)))
  fit = fit if _is_sold(fit) else (1,) * (target.torus - 2) + (2, 2)
  return tuple(sorted(fit, key=lambda size: (size == 1, size)))  # The usual order puts 1 last, as in 2x2x1.


def _hosts(target: Target, shape: tuple[int, ...]) -> tuple[int, ...]:
  if len(shape) > 2:
    raise ConfigError(f'GPUs are hosts x GPUs of each, as in {target.name}:4x{target.domain}')
  if len(shape) == 1:
    (count,) = shape
    if count > target.domain and count % target.domain:
      below = count // target.domain
      raise ConfigError(
        f'{count} GPUs are not a whole number of hosts of {target.domain}. Did you mean '
        f'{target.name}:{below}x{target.domain} or {target.name}:{below + 1}x{target.domain}?'
      )
    shape = (max(count // target.domain, 1), min(count, target.domain))
  if shape[1] > target.domain:
    hosts = math.ceil(math.prod(shape) / target.domain)
    raise ConfigError(
      f'fast links connect {target.domain} {target.name} GPUs at most, not {shape[1]}. Did you mean '
      f'{target.name}:{hosts}x{target.domain}?'
    )
  return shape


def check_mesh(sizes: Mapping[str, int], topology: Topology) -> None:
  """Raises ShardingError if a mesh has more or fewer devices than a topology; the message names meshes that fit."""
  devices = math.prod(sizes.values())
  if devices == topology.num_devices:
    return
  ways = [f"--set 'task.ici_mesh_shape={tuple(fit.values())}'" for fit in fitting_meshes(sizes, topology.num_devices)]
  mesh = ' x '.join(f'{name} {size}' for name, size in sizes.items())
  remedy = f'use {" or ".join(ways)}' if ways else 'no axis can be made larger or smaller so that it fits'
  raise ShardingError(
    f'task.ici_mesh_shape: the mesh {mesh} has {number_of(devices, "device")}, and the topology {topology.name} has '
    f'{topology.num_devices:,}; {remedy}, or another topology'
  )


def fitting_meshes(sizes: Mapping[str, int], devices: int) -> list[dict[str, int]]:
  """Returns at most two meshes of `devices` devices that differ from `sizes` in one axis, the largest axis first."""
  fits = []
  for axis in sorted(sizes, key=lambda name: -sizes[name]):
    others = math.prod(size for name, size in sizes.items() if name != axis)
    if devices % others == 0:
      fits.append(dict(sizes) | {axis: devices // others})
  return fits[:2]


# ---------------------------------------------------------------- how far times may be off


class TimeFactors(NamedTuple):
  """For the time of a step: the least and the largest known quotient of the real time and the planned time."""

  least: float
  largest: float


# Published times of steps, divided by the times in plans of their compiled programs.
_ONE_HOST_OF_GPUS = TimeFactors(0.98, 1.35)
_HOSTS_OF_GPUS = TimeFactors(0.98, 1.57)
_TPU = TimeFactors(0.98, 1.27)
# For the same step, the time in the plan of the compiled program, divided by the time in the plan by formulas.
_FORMULAS = TimeFactors(0.88, 1.67)


def time_factors(topology: Topology, is_compiled: bool) -> TimeFactors | None:
  """Returns the known errors of plans for these chips.

  If several runs on this kind of chip were measured, these are the errors of their plans. If none was measured, they
  come from published times of steps. Returns None if the errors are not known: if only one run was measured; or if none
  was measured and the chips are calibrated, or are simulated devices.
  """
  target, runs = topology.target, topology.experience
  if runs is not None:
    return TimeFactors(runs.least / runs.typical, runs.largest / runs.typical) if runs.runs > 1 else None
  if target.kind == 'cpu' or target.efficiency.calibrated:
    return None
  if target.kind == 'gpu':
    factors = _HOSTS_OF_GPUS if topology.shape[0] > 1 else _ONE_HOST_OF_GPUS
  else:
    factors = _TPU
  if is_compiled:
    return factors
  return TimeFactors(*(round(a * b, 2) for a, b in zip(factors, _FORMULAS)))
