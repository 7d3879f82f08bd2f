"""PartitionedStep: a step jitted for a mesh, with arguments of known shapes, so it can be compiled in advance."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.sharding.batch import batch_size, check_batch, is_on_device, pad_batch, put_on_mesh
from praxis_lite.sharding.guards import Guarded, guard
from praxis_lite.sharding.layout import is_prng_key
from praxis_lite.sharding.mesh import bind_mesh
from praxis_lite.sharding.xla_flags import NO_FLAGS, XlaFlags


class CompileTimes(NamedTuple):
  """Seconds spent before a step can run."""

  trace: float
  lower: float
  compile: float


_OutT = TypeVar('_OutT')


class PartitionedStep(Generic[_OutT]):
  """A function of (state..., replicated..., inputs) on a mesh.

  Args:
    fn: the function.
    mesh: the mesh; it is the ambient mesh while the function is traced.
    arguments: arguments of the function as `jax.ShapeDtypeStruct`s with shardings; the last one is the batch of inputs.
    out_shardings: shardings of its result, or a prefix tree of them.
    donate_argnums: indices of arguments whose memory the result may reuse.
    flags: compiler flags.

  Attributes:
    guarded: the operations that XLA would have computed wrongly without the guards, set when the step is lowered; see
      `sharding/guards/`.
  """

  def __init__(
    self,
    fn: Callable[..., _OutT],
    arguments: tuple[Any, ...],
    out_shardings: object,
    *,
    mesh: Mesh,
    donate_argnums: tuple[int, ...] = (),
    flags: XlaFlags = NO_FLAGS,
  ):
    in_shardings = jax.tree.map(lambda x: x.sharding, arguments)
    self.mesh = mesh
    self.arguments = arguments
    self.flags = flags
    self.jitted = jax.jit(
      bind_mesh(fn, mesh), in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate_argnums
    )
    self._input_specs = jax.tree.map(lambda s: s.spec, in_shardings[-1])
    self._traced: jax.stages.Traced | None = None
    self._compiling: Future[jax.stages.Compiled] | None = None
    self._times = CompileTimes(0.0, 0.0, 0.0)
    self.guarded: list[Guarded] = []

  def put_inputs(self, batch: NestedDict) -> NestedDict:
    """Pads a host batch with zero-weight rows to the compiled shape and places it on the mesh, asynchronously.

    The batch is the global one, or with several processes, this process's share of it. Raises DataError if the arrays
    of the batch differ from those for which the step was built.
    """
    expected = self.arguments[-1]
    padded = pad_batch(batch, batch_size(expected) // jax.process_count())
    check_batch(padded, expected)
    return put_on_mesh(padded, self.mesh, self._input_specs)

  def trace(self) -> jax.stages.Traced:
    """Traces from shapes only, so errors about arguments are raised before anything is compiled."""
    if self._traced is None:
      start = time.perf_counter()
      self._traced = _check_no_strangers(self.jitted.trace(*self.arguments))
      self._times = self._times._replace(trace=time.perf_counter() - start)
    return self._traced

  def lower(self) -> jax.stages.Lowered:
    """Traces and lowers from shapes only, with the guards; the result is what `compiled` would compile."""
    traced, start = self.trace(), time.perf_counter()
    lowered, self._traced = traced.lower(), None
    at_lowered = time.perf_counter()
    self.guarded = guard(lowered)
    # The guards count as compilation, because only the compiler needs them.
    self._times = self._times._replace(lower=at_lowered - start, compile=time.perf_counter() - at_lowered)
    return lowered

  def compile(self) -> CompileTimes:
    """Traces, lowers and compiles from shapes only; later calls run the compiled program."""
    _ = self.compiled
    return self._times

  def begin_to_compile(self) -> None:
    """Traces and lowers, then compiles in another thread; code that needs the compiled program waits for it."""
    if self._compiling is None:
      lowered = self.lower()
      thread = ThreadPoolExecutor(1, 'compile')
      self._compiling = thread.submit(self._compile, lowered)
      thread.shutdown(wait=False)  # The thread ends when it has compiled.

  @functools.cached_property
  def compiled(self) -> jax.stages.Compiled:
    """The compiled program, for its text, cost and memory analysis."""
    return self._compile(self.lower()) if self._compiling is None else self._compiling.result()

  def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    start = time.perf_counter()
    compiled = self.flags.compile(lowered)
    self._times = self._times._replace(compile=self._times.compile + time.perf_counter() - start)
    return compiled

  def __call__(self, *args: Any) -> _OutT:
    *others, inputs = args
    if not is_on_device(inputs, self.arguments[-1]):
      inputs = self.put_inputs(inputs)
    others = [
      jax.random.wrap_key_data(x) if is_prng_key(expected) and not is_prng_key(x) else x  # From `jax.random.PRNGKey`.
      for x, expected in zip(others, self.arguments, strict=False)
    ]
    return self.compiled(*others, inputs)


def _check_no_strangers(traced: jax.stages.Traced) -> jax.stages.Traced:
  """Returns `traced`; raises ConfigError if it uses an array of another trace, which JAX would make an argument."""
  if len(traced.jaxpr.in_avals) > len(jax.tree.leaves(traced.in_avals)):
    raise ConfigError(
      f'task.model: {traced.fun_name} uses an array that another step has left in a global or in an object, where it '
      'has no value; return it, or keep it in a variable: create_variable(name, ..., trainable=False) and update_var'
    )
  return traced
