"""A step jitted for a mesh. Its arguments are known shapes, so it can be compiled and measured before it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from praxis_lite.partitioning.batch import batch_size, check_batch, is_on_device, pad_batch, put_on_mesh
from praxis_lite.partitioning.mesh import on_mesh


class CompileTimes(NamedTuple):
  """Seconds spent before a step can run."""

  trace: float
  lower: float
  compile: float


class PartitionedStep:
  """A function of (state..., replicated..., inputs) on a mesh.

  Args:
    fn: the function; it is traced with `mesh` as the ambient mesh.
    arguments: its arguments as `jax.ShapeDtypeStruct`s with shardings; the last is the batch of inputs.
    out_shardings: shardings of its result, or a prefix of them.
    mesh: the mesh.
    donate_argnums: arguments whose memory the result may reuse.
  """

  def __init__(
    self,
    fn: Callable[..., Any],
    arguments: tuple[Any, ...],
    out_shardings: Any,
    *,
    mesh: Mesh,
    donate_argnums: tuple[int, ...] = (),
  ):
    in_shardings = jax.tree.map(lambda x: x.sharding, arguments)
    self.mesh = mesh
    self.arguments = arguments
    self.jitted = jax.jit(
      on_mesh(fn, mesh), in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate_argnums
    )
    self._input_specs = jax.tree.map(lambda s: s.spec, in_shardings[-1])
    self._traced: Any = None
    self._compiled: Any = None
    self._times = CompileTimes(0.0, 0.0, 0.0)

  def put_inputs(self, batch: Any) -> Any:
    """Pads a host batch with zero-weight rows to the compiled shape and places it on the mesh, asynchronously.

    Args:
      batch: arrays of the host: the global batch, or with several processes this process's share of it.

    Raises:
      DataError: the batch has other arrays than the step was built for.
    """
    expected = self.arguments[-1]
    padded = pad_batch(batch, batch_size(expected) // jax.process_count())
    check_batch(padded, expected)
    return put_on_mesh(padded, self.mesh, self._input_specs)

  def trace(self) -> None:
    """Traces from shapes alone: what does not fit shows now, before anything is compiled."""
    if self._traced is None and self._compiled is None:
      start = time.perf_counter()
      self._traced = self.jitted.trace(*self.arguments)
      self._times = self._times._replace(trace=time.perf_counter() - start)

  def compile(self) -> CompileTimes:
    """Traces, lowers and compiles from shapes alone; later calls run what was compiled."""
    if self._compiled is None:
      self.trace()
      start = time.perf_counter()
      lowered = self._traced.lower()
      at_lowered = time.perf_counter()
      self._compiled, self._traced = lowered.compile(), None
      self._times = self._times._replace(lower=at_lowered - start, compile=time.perf_counter() - at_lowered)
    return self._times

  @property
  def compiled(self) -> Any:
    """The compiled program, for its text, cost and memory analysis."""
    if self._compiled is None:
      self.compile()
    return self._compiled

  def __call__(self, *args: Any) -> Any:
    *others, inputs = args
    if not is_on_device(inputs, self.arguments[-1]):
      inputs = self.put_inputs(inputs)
    others = [_as_key(x) if _is_key(expected) else x for x, expected in zip(others, self.arguments, strict=False)]
    return self.compiled(*others, inputs)


def _is_key(x: Any) -> bool:
  return isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_key(key: jax.Array) -> jax.Array:
  """A key as it is, or as `jax.random.key` makes it if `jax.random.PRNGKey` has made it."""
  return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
