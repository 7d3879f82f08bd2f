"""The single-learner steps: pure functions of a task, its state and one batch.

Each step is written once. The differences between one device, a mesh for which XLA inserts the communication, and a
mesh with `shard_map` are in the `Execution` that a step gets; by default, a step can be jitted directly, without a
mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.common.trees import NestedDict, Path, map_with_path, merge, node_at
from praxis_lite.common.weighted import WeightedScalar, WeightedScalars
from praxis_lite.layers.base.call import SideOutputs, Summary, Surroundings
from praxis_lite.layers.base.taps import ARRAY
from praxis_lite.models.base import check_is_trained, checked_outputs, checked_predictions
from praxis_lite.models.quantization import has_mask_shots, renew_masks
from praxis_lite.sharding.batch import batch_size
from praxis_lite.training.execution import Execution
from praxis_lite.training.gradient_taps import Probes, make_probes, watch_gradients
from praxis_lite.training.learning.base_learner import BoundLearner, total_loss
from praxis_lite.training.microbatches import Losses, LossOutput, value_and_grad
from praxis_lite.training.state import TrainState
from praxis_lite.training.taps import is_tapped, raw_name_of
from praxis_lite.training.task import SingleTask


class TrainStepOutput(NamedTuple):
  """Result of a train step.

  Attributes:
    state: the new train state.
    weighted_loss: float32 scalar, the differentiated loss: the model's loss plus its auxiliary losses; if rules of the
      learner have their own losses, the sum of all differentiated losses.
    mean_metrics: (mean, weight) of each metric of the model and the learner.
    per_example_out: tree of arrays with the batch as dimension 0.
    summaries: values that layers added with `add_summary`, by name.
  """

  state: TrainState[jax.Array]
  weighted_loss: jax.Array
  mean_metrics: WeightedScalars
  per_example_out: NestedDict
  summaries: dict[str, Summary]


class EvalStepOutput(NamedTuple):
  """Result of an eval step: the fields of a `TrainStepOutput` without the state."""

  weighted_loss: jax.Array
  mean_metrics: WeightedScalars
  per_example_out: NestedDict
  summaries: dict[str, Summary]


class DecodeStepOutput(NamedTuple):
  """Result of a decode step: (mean, weight) of each metric, and a tree of arrays with the batch as dimension 0."""

  metrics: WeightedScalars
  decoded: NestedDict


class PredictStepOutput(NamedTuple):
  """Result of a predict step: a tree of arrays with the batch as dimension 0."""

  predictions: Any


class TapStepOutput(NamedTuple):
  """Result of a tap step, by names of summaries: values between layers, [B, ...]; and parts of statistics."""

  arrays: dict[str, jax.Array]
  summaries: dict[str, Summary]


def train_step_single_learner(
  jax_task: SingleTask, states: TrainState, prng_key: jax.Array, inputs: NestedDict, execution: Execution | None = None
) -> TrainStepOutput:
  """Takes one step.

  Args:
    jax_task, states: the task, and its state with arrays in their true shapes; under `shard_map`, this device's shards.
    prng_key: key of the run; `states.step` is folded in.
    inputs: a batch; under `shard_map`, this device's rows.
    execution: how the step is executed on the mesh; None means no mesh.
  """
  execution = execution or Execution()
  learner = jax_task.bind_learner()
  if has_mask_shots(jax_task.model):
    if jax_task.partitioning == 'shard_map':
      raise ConfigError("task.partitioning: masks that training renews (num_shots) need 'auto'")
    states = states.replace(mdl_vars=renew_masks(jax_task.model, states.mdl_vars, states.step))
  losses, out, gradients = _loss_and_gradients(jax_task, learner, states, prng_key, inputs, execution)
  update = learner.update(
    *(gradients, losses, states.mdl_vars, states.opt_states, states.ema_vars, states.step),
    *(execution.sum_parts, execution.splits),
  )
  if (taps := execution.taps) is not None:
    tapped = {path: execution.whole(path, node_at(gradients, path)) for path in taps.variables_of('grad')}
    out = out._replace(summaries={**out.summaries, **taps.summarize('grad', tapped)})
  updates, finite = out.updates, update.finite
  if finite is not None:  # If the step is not finite, non-trained variables keep their values too.
    updates = map_with_path(lambda path, new: jnp.where(finite, new, node_at(states.mdl_vars, path)), updates)
  mdl_vars = merge(update.mdl_vars, updates)
  one = jnp.ones((), jnp.float32)
  metrics = {**out.metrics, **{name: (value, one) for name, value in update.stats.items()}}
  state = TrainState(states.step + 1, mdl_vars, update.opt_states, update.ema_vars)
  return TrainStepOutput(state, total_loss(losses), metrics, out.per_example, out.summaries)


def loss_and_gradients(
  jax_task: SingleTask, mdl_vars: NestedDict, step: jax.Array, prng_key: jax.Array, inputs: NestedDict
) -> tuple[jax.Array, NestedDict]:
  """Returns the loss of a step and its gradients, without a mesh; see `train_step_single_learner` for the arguments."""
  states = TrainState(step, mdl_vars, {}, None)
  learner = jax_task.bind_learner()
  losses, _, gradients = _loss_and_gradients(jax_task, learner, states, prng_key, inputs, Execution())
  return total_loss(losses), gradients


def gradient_norms(
  jax_task: SingleTask, states: TrainState[jax.Array], prng_key: jax.Array, inputs: NestedDict, execution: Execution
) -> TrainStepOutput:
  """Computes gradient norms as the metrics of a train step that leaves the state unchanged.

  `train_step_single_learner` describes the arguments. Each trained variable has a norm, float32: a scalar, or
  [layers, 1, ...] with one norm per repeated layer.
  """
  learner = jax_task.bind_learner()
  losses, _, gradients = _loss_and_gradients(jax_task, learner, states, prng_key, inputs, execution)
  return TrainStepOutput(states, total_loss(losses), learner.norms(gradients, execution.sum_parts), {}, {})


def _loss_and_gradients(
  jax_task: SingleTask,
  learner: BoundLearner,
  states: TrainState[jax.Array],
  prng_key: jax.Array,
  inputs: NestedDict,
  execution: Execution,
) -> tuple[Losses, LossOutput, NestedDict]:
  """Returns losses, outputs and gradients of the whole batch; under `shard_map`, gradients of this device's shards."""
  model, taps = jax_task.model, execution.taps
  probed: dict[str, Path] = {}
  key = execution.device_key(jax.random.fold_in(prng_key, states.step))

  def loss_fn(
    trained: NestedDict,
    others: NestedDict,
    key: jax.Array,
    batch: NestedDict,
    name: str = 'loss',
    probes: Probes | None = None,
  ) -> tuple[jax.Array, LossOutput]:
    variables, surroundings = execution.readable(merge(others, trained)), execution.surroundings
    if taps is not None:
      surroundings = taps.surround(surroundings, batch, probed, None if probes is None else probes.share)
    if probes is not None:
      variables = merge(variables, probes.arrays)
    out, side = model.apply(variables, batch, key=key, do_eval=False, surroundings=surroundings)
    metrics, per_example = checked_outputs(model, out, batch_size(batch))
    loss, metrics = add_aux_losses(metrics, side)
    weight = metrics['loss'][1]
    if name != 'loss':
      loss, weight = _loss_of_rule(metrics, name)
    check_is_trained(model, loss, weight, trained, name)
    loss, total = execution.share_of_loss(loss, weight)
    return loss, LossOutput(total, metrics, per_example, side.summaries, side.updates)

  trained, others = learner.split(states.mdl_vars)
  others = execution.updatable(others)
  by_loss = learner.paths_by_loss()
  several = None if by_loss.keys() == {'loss'} else by_loss
  reports_noise = jax_task.learner.report_noise_scale
  if reports_noise and several is not None:
    raise ConfigError('task.train.learner.report_noise_scale: rules with losses of their own have no common gradient')
  watch = None
  if taps is not None and taps.wants_gradients:
    if several is not None:
      raise ConfigError(
        f'tap {taps.wants_gradients!r}: rules of the learner have losses of their own, so activations have no common '
        'gradient; tap grad(...) of variables'
      )
    _, shapes = jax.eval_shape(loss_fn, trained, others, key, inputs)
    watch = watch_gradients(loss_fn, make_probes(shapes, probed, model.path, execution.num_losses))
  losses, out, gradients = value_and_grad(
    *(loss_fn, trained, others, key, inputs, learner.num_microbatches, several),
    reports_noise=reports_noise,
    watch=watch,
  )
  return execution.combine(losses, out, gradients)


def _loss_of_rule(metrics: WeightedScalars, name: str) -> WeightedScalar:
  where = f'task.train.learner.rules: a rule has the loss {name!r}'
  if name not in metrics:
    known = f'{", ".join(sorted(metrics))}.{did_you_mean(name, metrics)}'
    raise ConfigError(f'{where}, but the model has only the metrics {known}')
  mean, weight = metrics[name]
  if mean.shape or weight.shape:
    raise ConfigError(
      f'{where}, a metric of shape {mean.shape} with a weight of shape {weight.shape}; both must be scalars, as '
      'weighted_mean(losses, weights) returns'
    )
  return mean.astype(jnp.float32), weight


def eval_step_single_learner(
  jax_task: SingleTask,
  mdl_vars: NestedDict,
  prng_key: jax.Array,
  global_step: jax.Array,
  inputs: NestedDict,
  surroundings: Surroundings | None = None,
) -> EvalStepOutput:
  """Evaluates one batch.

  Args:
    jax_task, mdl_vars: the task, and the model's variables, or their moving averages.
    prng_key: key of the run, for models that draw random numbers in evaluation; `global_step` is folded in.
    global_step: int32 scalar.
    inputs: a batch.
    surroundings: the surroundings of the layers on the mesh; None means no mesh.
  """
  key = jax.random.fold_in(prng_key, global_step)
  out, side = jax_task.model.apply(mdl_vars, inputs, key=key, do_eval=True, surroundings=surroundings)
  metrics, per_example = checked_outputs(jax_task.model, out, batch_size(inputs))
  loss, metrics = add_aux_losses(metrics, side)
  return EvalStepOutput(loss, metrics, per_example, side.summaries)


def predict_step(
  jax_task: SingleTask,
  mdl_vars: NestedDict,
  prng_key: jax.Array,
  global_step: jax.Array,
  inputs: NestedDict,
  surroundings: Surroundings | None = None,
  method: str = 'predict',
) -> PredictStepOutput:
  """Returns the model's predictions for one batch, or for the method 'score' the log-probabilities of labels.

  Raises ConfigError if the model returns nothing, or an array that does not have the batch as dimension 0. See
  `eval_step_single_learner` for the arguments.
  """
  key = jax.random.fold_in(prng_key, global_step)
  model = jax_task.model
  predictions, _ = model.apply(mdl_vars, inputs, key=key, do_eval=True, method=method, surroundings=surroundings)
  return PredictStepOutput(checked_predictions(model, predictions, batch_size(inputs)))


def score_training_step(
  jax_task: SingleTask,
  mdl_vars: NestedDict,
  prng_key: jax.Array,
  global_step: jax.Array,
  inputs: NestedDict,
  surroundings: Surroundings | None = None,
) -> PredictStepOutput:
  """Returns the result of `predict_step` for 'score', but with layers in training mode, as in the loss of training.

  Raises:
    ConfigError: a layer draws random numbers in training, such as dropout; it gets no key.
  """
  method = 'compute_predictions'
  out, _ = jax_task.model.apply(mdl_vars, inputs, do_eval=False, method=method, surroundings=surroundings)
  return PredictStepOutput({'log_probs': -out.xent, 'is_greedy': out.correct})


def tap_step(
  jax_task: SingleTask,
  mdl_vars: NestedDict,
  prng_key: jax.Array,
  global_step: jax.Array,
  inputs: NestedDict,
  surroundings: Surroundings | None = None,
) -> TapStepOutput:
  """Returns what the taps of the surroundings report while the model predicts; see `predict_step` for the arguments."""
  key = jax.random.fold_in(prng_key, global_step)
  _, side = jax_task.model.apply(mdl_vars, inputs, key=key, do_eval=True, method='predict', surroundings=surroundings)
  return _tap_output(side.summaries)


def tap_loss_step(
  jax_task: SingleTask,
  mdl_vars: NestedDict,
  prng_key: jax.Array,
  global_step: jax.Array,
  inputs: NestedDict,
  surroundings: Surroundings,
) -> TapStepOutput:
  """Returns what taps report in an evaluation, including gradients of its loss; see `tap_step` for the arguments."""
  taps, probed = surroundings.taps, dict[str, Path]()
  assert taps is not None

  def loss_fn(
    trained: NestedDict, others: NestedDict, key: jax.Array, batch: NestedDict, probes: Probes | None = None
  ) -> tuple[jax.Array, LossOutput]:
    del trained
    variables = others if probes is None else merge(others, probes.arrays)
    watched = dataclasses.replace(taps, probed=probed, share=None if probes is None else probes.share)
    around = dataclasses.replace(surroundings, taps=watched)
    out = eval_step_single_learner(jax_task, variables, key, global_step, batch, around)
    return out.weighted_loss, LossOutput(out.mean_metrics['loss'][1], {}, {}, out.summaries, {})

  arguments: Any = ({}, mdl_vars, prng_key, inputs)
  probes = make_probes(jax.eval_shape(loss_fn, *arguments)[1], probed, jax_task.model.path)
  (_, out), _ = watch_gradients(loss_fn, probes)(jnp.ones((), jnp.float32))(*arguments)
  return _tap_output(out.summaries)


def _tap_output(found: Mapping[str, Summary]) -> TapStepOutput:
  arrays, summaries = {}, {}
  for name, summary in found.items():
    if summary.kind == ARRAY:  # Stacks of layers come before the rows.
      _, (rank, *_), _ = raw_name_of(name)
      arrays[name] = jnp.moveaxis(summary.value, summary.value.ndim - int(rank), 0)
    elif is_tapped(name):
      summaries[name] = summary
  return TapStepOutput(arrays, summaries)


def decode_step(
  jax_task: SingleTask,
  mdl_vars: NestedDict,
  prng_key: jax.Array,
  global_step: jax.Array,
  inputs: NestedDict,
  surroundings: Surroundings | None = None,
  method: str = 'decode',
) -> DecodeStepOutput:
  """Decodes one batch of prompts, or for the method 'sample' draws answers that a `PolicyModel` learns from.

  See `eval_step_single_learner` for the arguments.
  """
  key = jax.random.fold_in(prng_key, global_step)
  out, _ = jax_task.model.apply(mdl_vars, inputs, key=key, do_eval=True, method=method, surroundings=surroundings)
  return DecodeStepOutput(*checked_outputs(jax_task.model, out, batch_size(inputs), method=method))


def add_aux_losses(metrics: WeightedScalars, side: SideOutputs) -> tuple[jax.Array, WeightedScalars]:
  """Returns the total loss, and the metrics, in which the auxiliary losses are named `aux/<name>`."""
  loss, weight = metrics['loss']
  total = loss.astype(jnp.float32)
  for name, (value, scale) in side.aux_losses.items():
    total = total + scale * value
    metrics = {**metrics, f'aux/{name}': (value, weight)}
  return total, metrics
