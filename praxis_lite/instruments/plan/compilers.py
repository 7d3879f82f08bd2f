"""Compiles steps for the devices of other machines, or reads them from a cache of compiled programs.

TPU programs are compiled by the package libtpu, GPU programs by JAX's plugin for CUDA; neither needs a chip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import importlib
import importlib.util
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from praxis_lite.common.errors import ConfigError, UserError, first_line
from praxis_lite.common.figures import number_of
from praxis_lite.common.jax_internals.lowering import pretend_cudnn
from praxis_lite.common.native_log import collected_log
from praxis_lite.common.versions import version_of
from praxis_lite.instruments.plan.targets import gpu_target_config
from praxis_lite.instruments.plan.topology import Topology
from praxis_lite.layers.base.expected_trips import find_expected_trips
from praxis_lite.sharding.xla_flags import Flag, XlaFlags
from praxis_lite.training.partitioned_step import PartitionedStep

# For each kind of target, the modules that can compile for it; one is enough.
_MODULES = {'tpu': ('libtpu',), 'gpu': ('jax_cuda12_plugin', 'jax_cuda13_plugin'), 'cpu': ()}
# The packages whose versions are part of the cache key.
_PACKAGES = ('jax', 'jaxlib', 'libtpu', 'jax-cuda12-pjrt', 'jax-cuda13-pjrt')
# The warning of XLA's partitioner, in its log, about a costly resharding.
_PARTITIONER = '[SPMD] Involuntary full rematerialization'
# The part of a compiler's error that says how much memory a refused step needs: 'Used 33.5G of 15.75G hbm'.
_USED = re.compile(r'Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm')
_UNITS = {'K': 10, 'M': 20, 'G': 30, 'T': 40}
_MOST_SHOWN = 400  # Messages show at most this many characters of a compiler's error.
_CUDNN_VERSION = 91000  # The same version as in `gpu_target_config`.
_INSTALL = {'tpu': 'libtpu', 'gpu': 'jax-cuda12-plugin and jax-cuda12-pjrt'}
# Without these variables, the compilers look for TPUs or GPUs on this machine.
_ENVIRONMENT = {
  'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # Allows several plans at a time.
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
}


class MissingCompilerError(UserError):
  """The compiler of a target is not installed."""


class CompileError(UserError):
  """The compiler of a target refuses a step.

  Attributes:
    does_not_fit: whether the step needs more memory than a device has.
  """

  does_not_fit = False

  @property
  def needs(self) -> int | None:
    """The bytes that the step needs on each device; None if the compiler does not say."""
    used = _USED.search(str(self))
    return int(float(used[1]) * 2 ** _UNITS[used[2]]) if used else None


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """The facts about a compiled step that plans use.

  Attributes:
    text: XLA's optimized HLO.
    arguments, outputs, aliased, temporaries, code: bytes on each device.
    seconds: compile time.
    is_cached: whether an earlier plan compiled it.
    messages: warnings of XLA's partitioner.
    added_flags: XLA flags that were needed to compile the step only because this machine has no GPU.
  """

  text: str
  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int
  seconds: float
  is_cached: bool = False
  messages: tuple[str, ...] = ()
  added_flags: tuple[str, ...] = ()


def missing_compiler(topology: Topology) -> str:
  """Returns a sentence that says which packages are missing to compile for a topology; '' if none are missing."""
  kind = topology.target.kind
  if kind == 'cpu' or any(importlib.util.find_spec(module) for module in _MODULES[kind]):
    return ''
  return f"compiling for {topology.target.name} takes {_INSTALL[kind]}: pip install 'praxis_lite[plan]'"


def devices_of(topology: Topology) -> list[jax.Device]:
  """Returns the devices of a topology, for a mesh to compile steps on.

  Raises:
    MissingCompilerError: the compiler of the target is not installed.
    ConfigError: this process has too few simulated devices, or the compiler does not know the topology.
  """
  if missing := missing_compiler(topology):
    raise MissingCompilerError(missing)
  target, count = topology.target, topology.num_devices
  if target.kind == 'cpu':
    devices = jax.devices('cpu')
    if len(devices) < count:
      raise ConfigError(
        f'topology {topology.name}: there are {number_of(len(devices), "CPU device")}; call '
        f'praxis_lite.simulate_cpu_devices({count}) before anything uses a device'
      )
    return devices[:count]
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  try:
    with collected_log():  # Hides log lines about missing devices.
      return _gpu_devices(topology) if target.kind == 'gpu' else _tpu_devices(topology)
  except (RuntimeError, ValueError, NotImplementedError) as error:
    raise ConfigError(f'topology {topology.name}: {first_line(error)[:_MOST_SHOWN].rstrip(".")}') from error


def _gpu_devices(topology: Topology) -> list[jax.Device]:
  domains, per_domain = topology.shape
  per_host = topology.target.chips_per_host
  # The numbers of domains of fast links, of hosts in a domain, and of GPUs in a host.
  sizes = (1, domains, per_domain)
  if per_domain > per_host and per_domain % per_host == 0:
    sizes = (domains, per_domain // per_host, per_host)
  description = topologies.get_topology_desc(
    platform='cuda',
    topology_name=topology.name,
    target_config=gpu_target_config(topology.target),
    topology='x'.join(map(str, sizes)),
  )
  return list(description.devices)


def _tpu_devices(topology: Topology) -> list[jax.Device]:
  target = topology.target
  prefix = 'tpu' if target.name[0].isdigit() else ''
  # Cloud TPU names slices by their number of cores. All chips except v5e and v6e have two cores.
  cores = topology.num_chips * (2 if target.torus == 3 or target.devices_per_chip == 2 else 1)
  kind = {'v5e': 'v5litepod'}.get(target.name, f'{prefix}{target.name}')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', f'{kind}-{cores}')
  options: dict[str, Any] = {'num_slices': topology.slices} if topology.slices > 1 else {}
  # A host has 2 chips in each dimension, or 1 in a dimension in which the slice has an odd number of chips.
  if any(size % 2 for size in topology.shape[:2]):
    options['chips_per_host_bounds'] = tuple([2 - size % 2 for size in topology.shape[:2]] + [1])
  name = f'{prefix}{target.name}:{"x".join(map(str, topology.shape))}'
  devices = topologies.get_topology_desc(platform='tpu', topology_name=name, **options).devices
  if target.devices_per_chip == 1:  # JAX treats a chip's two cores as one device.
    return [d for d in devices if getattr(d, 'core_on_chip', 0) == 0]
  return list(devices)


def places_of(topology: Topology, devices: Iterable[jax.Device]) -> np.ndarray:
  """Returns the coordinates of each device in `devices`, in that order; see `Topology.places`."""
  target = topology.target
  if target.kind == 'tpu':
    coordinates: list[Any] = [d.coords for d in devices]
    slices = [getattr(d, 'slice_index', None) or 0 for d in devices]
    return np.column_stack([slices, np.array(coordinates)[:, : target.torus]])
  return topology.places[[d.id for d in devices]]


def compile_step(
  step: PartitionedStep,
  topology: Topology,
  *,
  layers: Sequence[str] = (),
  flags: XlaFlags | None = None,
  cache: Path | None = None,
  elsewhere: Callable[[], None] | None = None,
  report: Callable[[str], object] = lambda stage: None,
) -> CompiledStep:
  """Compiles a step for the devices of its mesh, or reads it from the cache.

  Args:
    step, topology: a step on a mesh of the devices of the topology.
    layers: paths of the layers of the model, which are part of the key in the cache.
    flags: compiler flags; None means those of the step.
    cache, elsewhere, report: see `plan`.

  Raises:
    CompileError: the compiler refuses the step, or runs out of memory.
  """
  report('tracing')
  flags = step.flags if flags is None else flags
  with pretend_cudnn_for_plans():
    lowered = step.lower()
  file = None if cache is None else cache / f'{_key(lowered, step, flags, topology, layers)}.json.gz'
  if kept := _read(file):
    return kept
  report('compiling')
  if elsewhere is not None:
    elsewhere()
    if kept := _read(file):
      return dataclasses.replace(kept, is_cached=False)
  start = time.perf_counter()
  try:
    with collected_log() as log, _names_in_cache_key():
      compiled, text, added = _compile(lowered, flags, topology)
  except (RuntimeError, MemoryError, NotImplementedError) as error:  # JAX raises one type for any failure.
    why = first_line(error)[:_MOST_SHOWN].rstrip('.')
    refused = CompileError(f'{topology.target.name}: the compiler refuses the step: {why}')
    refused.does_not_fit = 'RESOURCE_EXHAUSTED' in str(error) and 'hbm' in str(error)
    raise refused from error
  found: Any = compiled.memory_analysis()
  result = CompiledStep(
    text,
    arguments=found.argument_size_in_bytes,
    outputs=found.output_size_in_bytes,
    aliased=found.alias_size_in_bytes,
    temporaries=found.temp_size_in_bytes,
    code=found.generated_code_size_in_bytes if topology.target.kind == 'tpu' else 0,
    seconds=time.perf_counter() - start,
    messages=tuple(line for line in log if _PARTITIONER in line),
    added_flags=tuple(added),
  )
  if file is not None:
    _write(file, result)
  return result


def pretend_cudnn_for_plans() -> contextlib.AbstractContextManager[None]:
  """Allows tracing fused attention without cuDNN. JAX reads cuDNN's version, but compiling does not need cuDNN."""
  return pretend_cudnn(_CUDNN_VERSION)


@contextlib.contextmanager
def _names_in_cache_key() -> Iterator[None]:
  """Makes JAX's compilation cache tell apart programs that differ only in the names of operations, which plans read."""
  name = 'jax_compilation_cache_include_metadata_in_key'
  before = getattr(jax.config, name)
  jax.config.update(name, True)
  try:
    yield
  finally:
    jax.config.update(name, before)


def _compile(
  lowered: jax.stages.Lowered, flags: XlaFlags, topology: Topology
) -> tuple[jax.stages.Compiled, str, Sequence[str]]:
  """Returns a compiled program, its text, and the names of flags that were added to compile it here."""
  if topology.target.kind != 'tpu':
    compiled, added = _compile_for_gpu(lowered, flags)
    text = compiled.as_text() or ''
  else:
    added = {}
    with tempfile.TemporaryDirectory() as folder:  # The compiler dumps the text of the program to a file.
      compiled = flags.compile(lowered, xla_dump_to=folder, xla_dump_hlo_as_text=True)
      texts = [file.read_text() for file in Path(folder).glob('*.after_optimizations.txt')]
    text = max(texts, key=len, default='') or _text_of_tpu_program(compiled, lowered, flags)
  if not text:
    raise NotImplementedError('the compiled program has no text')
  return compiled, text, [*added]


def _text_of_tpu_program(compiled: jax.stages.Compiled, lowered: jax.stages.Lowered, flags: XlaFlags) -> str:
  try:
    return compiled.as_text() or ''
  except RuntimeError:
    # A program with asynchronous collectives that span several fusions cannot be printed, so compile without them.
    return flags.compile(lowered, xla_tpu_enable_async_collective_fusion=False).as_text() or ''


# Flags for programs that the GPU compiler refuses only because this machine has no GPU, by a part of the error message.
_WITHOUT_GPU: dict[str, dict[str, Flag]] = {
  # Since JAX 0.11, the compiler asks the GPU how much memory CUB's sort needs. XLA's own sort replaces CUB's.
  'CUB': {'xla_gpu_enable_cub_radix_sort': False},
  # Triton's kernels for products, which also transpose operands, work on blocks. On a GPU, the autotuner skips blocks
  # that do not fit an operand. Without a GPU, blocks always have 64 rows, which do not fit 512 x 197 rows. So plans use
  # cuBLAS instead.
  'output tile sizes': {'xla_gpu_enable_triton_gemm': False},
}


def _compile_for_gpu(lowered: jax.stages.Lowered, flags: XlaFlags) -> tuple[jax.stages.Compiled, dict[str, Flag]]:
  """Returns a compiled GPU program, and the flags that had to be added to compile it on this machine."""
  more: dict[str, Flag] = {}
  while True:
    try:
      return flags.compile(lowered, **more), more
    except RuntimeError as error:
      added = next((x for part, x in _WITHOUT_GPU.items() if part in str(error)), {})
      if added.keys() <= more.keys():
        raise
      more |= added


# The memory address of a partitioning rule, which JAX passes to XLA. It is different in each process.
_ADDRESS = re.compile(r'(?<=api_version = 2 : i32, backend_config = ")\d+')


def flags_of_plan(step: PartitionedStep, topology: Topology) -> XlaFlags:
  """Returns the flags for the plan of a train step.

  With whole logits, as on a single GPU, XLA measures cuBLAS and Triton for the products of the head, and chooses
  cuBLAS, which needs the gradient of the logits as an array. Without a GPU, it cannot measure, and would choose Triton.
  """
  if topology.target.kind != 'gpu' or topology.num_devices > 1:
    return step.flags
  return step.flags._replace(defaults={'xla_gpu_enable_triton_gemm': False, **step.flags.defaults})


def _key(
  lowered: jax.stages.Lowered, step: PartitionedStep, flags: XlaFlags, topology: Topology, layers: Sequence[str]
) -> str:
  """Returns a cache key: a hash of the paths of layers, and of everything that a compiled program depends on."""
  digest = hashlib.sha256()
  versions = [f'{name} {version_of(name)}' for name in _PACKAGES]
  chip = [gpu_target_config(topology.target)] if topology.target.cuda else []
  given = [os.environ.get('XLA_FLAGS', ''), *([str(sorted(flags.all.items()))] if flags.all else [])]
  order = str([d.id for d in step.mesh.devices.flat])
  for part in (topology.name, *chip, *versions, *layers, order, *given):
    digest.update(part.encode() + b'\0')
  digest.update(_ADDRESS.sub('', lowered.as_text()).encode())
  digest.update(repr(find_expected_trips(lowered.as_text(debug_info=True))).encode())
  return digest.hexdigest()[:32]


def _read(file: Path | None) -> CompiledStep | None:
  """Returns a cached program; None if it is missing or unreadable."""
  try:
    return None if file is None else CompiledStep(**json.loads(gzip.decompress(file.read_bytes())), is_cached=True)
  except (OSError, ValueError, TypeError, EOFError):
    return None


def _write(file: Path, step: CompiledStep) -> None:
  """Stores a program; does nothing if the cache cannot be written."""
  fields = {name: value for name, value in dataclasses.asdict(step).items() if name != 'is_cached'}
  with contextlib.suppress(OSError):
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f'.{os.getpid()}')
    part.write_bytes(gzip.compress(json.dumps(fields).encode(), compresslevel=3))
    part.replace(file)
