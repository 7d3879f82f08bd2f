"""The two steps of the overhead benchmark: ours, and one written by hand, on the same mesh with the same splits."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from praxis_lite.common.config import Config
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.sharding.guards import guard
from praxis_lite.sharding.mesh import create_device_mesh
from praxis_lite.training import PartitionedTask, TrainState
from praxis_lite.training.learning import Learner
from praxis_lite.training.task import SingleTask
from tools.handwritten_lm import Size, init_params, make_optimizer, make_step, sharding_specs

sizes = {
  'small': Size(),
  'large': Size(batch=8, length=512, model_dims=512, num_layers=6, num_heads=8, hidden_dims=2048, vocab=1024),
}
_LEARNING_RATE = 1e-3
_AXES = ('data', 'mdl')
ContestantStateT = TypeVar('ContestantStateT')


class Contestant(Generic[ContestantStateT]):
  """A training step that can be compiled, measured and run.

  Args:
    lower: traces and lowers the step from shapes.
    start: returns the state before the first step, with the batch.
    advance: (compiled step, state) -> (state, loss).
    num_params: number of parameters.
    prepare: what is done with the lowered step before it is compiled.
  """

  def __init__(
    self,
    lower: Callable[[], jax.stages.Lowered],
    start: Callable[[], ContestantStateT],
    advance: Callable[[jax.stages.Compiled, ContestantStateT], tuple[ContestantStateT, jax.Array]],
    num_params: int,
    prepare: Callable[[jax.stages.Lowered], object] = lambda lowered: None,
  ):
    self._lower, self.start, self.advance = lower, start, advance
    self.num_params, self._prepare = num_params, prepare
    self._state: ContestantStateT | None = None
    self._loss: jax.Array
    self.compiled: jax.stages.Compiled

  def lower(self) -> float:
    """Traces and lowers the step, with JAX's caches empty; returns the seconds of CPU time.

    This uses one thread, so CPU time equals the time on an idle machine.
    """
    jax.clear_caches()
    gc.collect()
    begin = time.process_time()
    self._lowered = self._lower()
    return time.process_time() - begin

  def compile(self) -> float:
    """Lowers and compiles the step; returns the seconds of compiling and, if the step has guards, of guarding."""
    self.lower()
    begin = time.perf_counter()
    self._prepare(self._lowered)
    self.compiled = self._lowered.compile()
    return time.perf_counter() - begin

  def step(self) -> float:
    """Takes a step, waits for it, and returns the seconds it took."""
    if self._state is None:
      self._state = self.start()
    begin = time.perf_counter()
    self._state, self._loss = self.advance(self.compiled, self._state)
    jax.block_until_ready((self._state, self._loss))
    return time.perf_counter() - begin

  def loss(self) -> float:
    """The loss of the last step."""
    return float(self._loss)

  @property
  def cost(self) -> dict[str, float]:
    """The compiler's estimate of the program's cost on a device."""
    analysis = self.compiled.cost_analysis() or {}
    return analysis[0] if isinstance(analysis, list) else analysis

  @property
  def peak_bytes(self) -> int:
    """The memory on a device: arguments, results and temporaries. Donated arguments count once."""
    m = self.compiled.memory_analysis()
    if m is None:
      raise RuntimeError('this backend does not report the memory of compiled programs')
    sizes = (m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes)
    return sum(sizes) - m.alias_size_in_bytes


Batch = dict[str, jax.Array]
OurState = tuple[TrainState, Batch]
HandState = tuple[dict[str, jax.Array], optax.OptState, Batch]


def praxis_lite_step(size: Size, num_devices: int) -> Contestant[OurState]:
  """The framework's step."""
  model = transformer_lm(
    vocab_size=size.vocab,
    model_dims=size.model_dims,
    num_layers=size.num_layers,
    num_heads=size.num_heads,
    dims_per_head=size.dims_per_head,
    hidden_dims=size.hidden_dims,
  )
  task = Config(SingleTask, model=set_sharding(model.set(packed=False), batch_axes='data'))
  task.set(mesh_axis_names=_AXES, ici_mesh_shape=_mesh_shape(num_devices))
  task.train.inputs_split_mapping = {'map_2d': ('data', None)}
  task.train.learner = Config(
    Learner,
    optimizer=Config(optax.adamw, b2=0.95, weight_decay=0.1),
    learning_rate=_LEARNING_RATE,
    clip_gradient_norm_to_value=1.0,
  )
  partitioned = PartitionedTask(task.instantiate(), _batch_struct(size))
  step = partitioned.train_step
  key = jax.random.key(1)

  def lower() -> jax.stages.Lowered:
    return step.jitted.lower(*step.arguments)

  def start() -> OurState:
    return partitioned.init_state(jax.random.key(0)), step.put_inputs(_batch(size))

  def advance(compiled: jax.stages.Compiled, state: OurState) -> tuple[OurState, jax.Array]:
    train_state, batch = state
    out = compiled(train_state, key, batch)
    return (out.state, batch), out.weighted_loss

  return Contestant(lower, start, advance, partitioned.total_num_params, prepare=guard)


def handwritten_step(size: Size, num_devices: int) -> Contestant[HandState]:
  """The step of `handwritten_lm.py`."""
  mesh = create_device_mesh(_mesh_shape(num_devices), mesh_axis_names=_AXES)
  params = jax.eval_shape(lambda: init_params(size, jax.random.key(0)))
  tx = make_optimizer(_LEARNING_RATE, {name: 'norm' not in name for name in params})
  state = jax.eval_shape(tx.init, params)
  by_name = {name: NamedSharding(mesh, spec) for name, spec in sharding_specs().items()}
  whole = NamedSharding(mesh, P())
  of_state = optax.tree_utils.tree_map_params(
    tx, lambda _, sharding: sharding, state, by_name, transform_non_params=lambda _: whole
  )
  of_batch = {name: NamedSharding(mesh, P(_AXES, None)) for name in _batch_struct(size)}
  step = make_step(size, tx, mesh if num_devices > 1 else None)
  jitted = jax.jit(
    step, in_shardings=(by_name, of_state, of_batch), out_shardings=(by_name, of_state, whole), donate_argnums=(0, 1)
  )

  def start() -> HandState:
    first = jax.jit(lambda key: init_params(size, key), out_shardings=by_name)(jax.random.key(0))
    return first, jax.jit(tx.init, out_shardings=of_state)(first), jax.device_put(_batch(size), of_batch)

  def advance(compiled: jax.stages.Compiled, state: HandState) -> tuple[HandState, jax.Array]:
    params, opt_state, batch = state
    params, opt_state, metrics = compiled(params, opt_state, batch)
    return (params, opt_state, batch), metrics['loss']

  count = sum(int(np.prod(p.shape)) for p in params.values())
  return Contestant(lambda: jitted.lower(params, state, _batch_struct(size)), start, advance, count)


def _mesh_shape(num_devices: int) -> tuple[int, int]:
  return (2, 4) if num_devices == 8 else (1, 1)


def _batch_struct(size: Size) -> dict[str, jax.ShapeDtypeStruct]:
  dtypes = {'ids': jnp.int32, 'labels': jnp.int32, 'weights': jnp.float32}
  return {name: jax.ShapeDtypeStruct((size.batch, size.length), dtype) for name, dtype in dtypes.items()}


def _batch(size: Size) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  ids = ((rng.integers(0, size.vocab, (size.batch, 1)) + np.arange(size.length + 1)) % size.vocab).astype(np.int32)
  return {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': np.ones((size.batch, size.length), np.float32)}
