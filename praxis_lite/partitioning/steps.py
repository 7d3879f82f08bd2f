"""The single-learner steps: pure functions of a task, its state and one batch, with no thought of a mesh.

`spmd.py` wraps them for a mesh; without one they can be jitted as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from praxis_lite.call import SideOutputs, Summary, merge_updates
from praxis_lite.partitioning.accumulate import LossOutput, WeightedScalars, value_and_grad
from praxis_lite.partitioning.train_state import TrainState


class Task(Protocol):
  """What the steps need of a task; `SingleTask` is one."""

  model: Any
  learner: Any
  train: Any
  logical_axis_rules: Any
  strategy: Any
  partitioning: str

  def create_mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh: ...


class TrainStepOutput(NamedTuple):
  """Result of a train step.

  Attributes:
    state: the new train state.
    weighted_loss: float32 scalar, what was differentiated: the model's loss and its auxiliary losses.
    mean_metrics: (mean, weight) of each metric of the model and the learner.
    per_example_out: tree of arrays with the batch as dimension 0.
    summaries: what layers added with `add_summary`, by name.
  """

  state: TrainState
  weighted_loss: jax.Array
  mean_metrics: WeightedScalars
  per_example_out: Any
  summaries: dict[str, Summary]


class EvalStepOutput(NamedTuple):
  """Result of an eval step: as of a train step, without the state."""

  weighted_loss: jax.Array
  mean_metrics: WeightedScalars
  per_example_out: Any
  summaries: dict[str, Summary]


class DecodeStepOutput(NamedTuple):
  """Result of a decode step: (mean, weight) of each metric, and a tree of arrays with the batch as dimension 0."""

  metrics: WeightedScalars
  decoded: Any


def initialize_opt_states(jax_task: Task, mdl_vars: Any) -> Any:
  """Returns the first optimizer state for `mdl_vars`."""
  return jax_task.learner.init(mdl_vars, jax_task.model.abstract_init())


def initialize_train_state(jax_task: Task, init_key: jax.Array) -> TrainState:
  """Returns the state before the first step, unpadded and unpartitioned."""
  mdl_vars = jax_task.model.init(init_key)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    mdl_vars=mdl_vars,
    opt_states=initialize_opt_states(jax_task, mdl_vars),
    ema_vars=jax_task.learner.init_ema(mdl_vars, jax_task.model.abstract_init()),
  )


def train_step_single_learner(jax_task: Task, states: TrainState, prng_key: jax.Array, inputs: Any) -> TrainStepOutput:
  """Takes one step.

  Args:
    jax_task: the task.
    states: the state before the step, every array in its true shape.
    prng_key: key of the run; the step's own is folded in from `states.step`.
    inputs: a batch, dim 0 the batch.
  """
  learner, model = jax_task.learner, jax_task.model
  weights = model.abstract_init()
  key = jax.random.fold_in(prng_key, states.step)

  def loss_fn(trained: Any, others: Any, key: jax.Array, batch: Any) -> tuple[jax.Array, LossOutput]:
    (metrics, per_example), side = model.apply(merge_updates(others, trained), batch, key=key, do_eval=False)
    loss, metrics = with_aux_losses(metrics, side)
    return loss, LossOutput(metrics['loss'][1], metrics, per_example, side.summaries, side.updates)

  trained, others = learner.split(states.mdl_vars, weights)
  loss, out, gradients = value_and_grad(loss_fn, trained, others, key, inputs, learner.num_microbatches)
  update = learner.update(gradients, loss, states.mdl_vars, states.opt_states, states.ema_vars, states.step, weights)
  mdl_vars = merge_updates(update.mdl_vars, _counted(update.finite, out.updates, states.mdl_vars))
  one = jnp.ones((), jnp.float32)
  metrics = {**out.metrics, **{name: (value, one) for name, value in update.stats.items()}}
  state = TrainState(states.step + 1, mdl_vars, update.opt_states, update.ema_vars)
  return TrainStepOutput(state, loss, metrics, out.per_example, out.summaries)


def eval_step_single_learner(
  jax_task: Task, mdl_vars: Any, prng_key: jax.Array, global_step: jax.Array, inputs: Any
) -> EvalStepOutput:
  """Evaluates one batch.

  Args:
    jax_task: the task.
    mdl_vars: the model's variables, or their moving averages.
    prng_key: folded with `global_step`, for models that draw while they evaluate.
    global_step: int32 scalar.
    inputs: a batch, dim 0 the batch.
  """
  key = jax.random.fold_in(prng_key, global_step)
  (metrics, per_example), side = jax_task.model.apply(mdl_vars, inputs, key=key, do_eval=True)
  loss, metrics = with_aux_losses(metrics, side)
  return EvalStepOutput(loss, metrics, per_example, side.summaries)


def decode_step(
  jax_task: Task, mdl_vars: Any, prng_key: jax.Array, global_step: jax.Array, inputs: Any
) -> DecodeStepOutput:
  """Decodes one batch of prompts; arguments as of `eval_step_single_learner`."""
  key = jax.random.fold_in(prng_key, global_step)
  (metrics, decoded), _ = jax_task.model.apply(mdl_vars, inputs, key=key, do_eval=True, method='decode')
  return DecodeStepOutput(metrics, decoded)


def _counted(finite: jax.Array | None, updates: Any, mdl_vars: Any) -> Any:
  """The updates of non-trainable variables, or their old values after a step that does not count."""
  if finite is None:
    return updates
  return {
    name: _counted(finite, new, mdl_vars[name]) if isinstance(new, dict) else jnp.where(finite, new, mdl_vars[name])
    for name, new in updates.items()
  }


def with_aux_losses(metrics: WeightedScalars, side: SideOutputs) -> tuple[jax.Array, WeightedScalars]:
  """Returns the total loss, and the metrics with the auxiliary losses among them as `aux/<name>`."""
  loss, weight = metrics['loss']
  total = loss.astype(jnp.float32)
  for name, (value, scale) in side.aux_losses.items():
    total = total + scale * value
    metrics = {**metrics, f'aux/{name}': (value, weight)}
  return total, metrics
