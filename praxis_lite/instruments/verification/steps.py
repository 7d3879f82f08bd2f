"""The steps that `verify` compares: steps of a small task on a mesh and on one device, with the same values.

gradient     the loss, and the gradient of each variable, before clipping
update       one step of the task's own learner, at a constant learning rate: new variables, slots and averages
evaluation   the metrics, and each row's outputs
decoding     the metrics, and each row's outputs
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from praxis_lite.common.config import Config, config_values, nested_configs, target
from praxis_lite.common.trees import NestedDict, Path, leaves, leaves_by_path, map_with_path, path_name
from praxis_lite.common.weighted import WeightedScalars
from praxis_lite.instruments.verification.shrink import replace_dtypes, replace_rows
from praxis_lite.sharding.guards import Guarded
from praxis_lite.sharding.layout import StateLayout, is_prng_key
from praxis_lite.sharding.padding import pad_to, slice_to
from praxis_lite.sharding.slots import owner_of
from praxis_lite.training.learning import Constant, Learner
from praxis_lite.training.learning.multi_learner import nested_learners, nested_rules
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState, state_layout
from praxis_lite.training.task import SingleTask

# The least learning rate for comparing updates: with a smaller one, rounding errors are almost as large as the updates.
_LEARNING_RATE = 0.01


class StepKind(enum.StrEnum):
  """Kinds of steps that are compared."""

  GRADIENT = 'gradients'
  UPDATE = 'a step of the optimizer'
  EVALUATION = 'evaluation'
  DECODING = 'decoding'


class Name(NamedTuple):
  """The name of a result of a step: its kind, such as 'gradient', and its variable, metric or output."""

  what: str
  of: str

  def __str__(self) -> str:
    return f'{self.what} of {self.of}' if self.of else self.what


StepResults = dict[Name, np.ndarray]


class Case(NamedTuple):
  """A step to run: its kind, the task that `task_of` built from `config`, and a train state and a batch on the host."""

  kind: StepKind
  rows: int
  config: Config[SingleTask]
  task: SingleTask
  state: TrainState
  batch: NestedDict

  def run(self, mesh: Mesh, specs: NestedDict | None = None) -> StepResults:
    """Returns the results of the step on a mesh, with these specs for the variables; None uses the task's own specs."""
    return Runner(self, mesh, specs).results()


class Runner:
  """Runs a case on a mesh, any number of times; the step is compiled only once."""

  def __init__(self, case: Case, mesh: Mesh, specs: NestedDict | None = None):
    self._case = case
    self._layout = state_layout(case.task, mesh, specs)
    struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch)
    self._partitioned = PartitionedTask(case.task, struct, layout=self._layout)

  def trace(self) -> None:
    """Traces the step. Raises whatever the model raises for a batch of these shapes."""
    self._step.trace()

  @property
  def _step(self) -> PartitionedStep:
    if self._case.kind is StepKind.EVALUATION:
      return self._partitioned.eval_step
    return self._partitioned.decode_step if self._case.kind is StepKind.DECODING else self._partitioned.train_step

  @property
  def guarded(self) -> list[Guarded]:
    """The operations that a guard changed; known after the first call of `results`."""
    return self._step.guarded

  def results(self, noise: int = 0, seed: int = 0) -> StepResults:
    """Runs the step, with random draws by `seed`, and returns its results.

    `noise` is the seed of relative changes of the variables by about one float32 rounding error; 0 changes nothing.
    """
    case, variables = self._case, self._case.state.mdl_vars
    if noise:
      variables = map_with_path(lambda path, x: _rounded_otherwise(path, x, noise), variables)
    with jax.default_device(jax.devices('cpu')[0]):
      key = jax.random.key(seed)
    if case.kind in (StepKind.GRADIENT, StepKind.UPDATE):
      return self._train(variables, key)
    arguments = _store_on_mesh(variables, self._layout.mdl_vars), key, jnp.zeros((), jnp.int32), case.batch
    if case.kind is StepKind.EVALUATION:
      evaluated = self._partitioned.eval_step(*arguments)
      loss = {Name('loss', ''): np.asarray(evaluated.weighted_loss)}
      return loss | _batch_results(evaluated.mean_metrics, evaluated.per_example_out)
    return _batch_results(*self._partitioned.decode_step(*arguments))

  def _train(self, variables: NestedDict, key: jax.Array) -> StepResults:
    case, learner = self._case, self._case.task.bind_learner()
    before = case.state.replace(mdl_vars=variables)
    out = self._partitioned.train_step(_store_on_mesh(before, self._layout), key, case.batch)
    after = slice_to(jax.tree.map(_host, out.state), self._layout.unpadded_shapes)
    found = {Name('loss', ''): np.asarray(out.weighted_loss)}
    declared, values = leaves(case.task.model.abstract_init()), leaves(after.mdl_vars)
    if case.kind is StepKind.GRADIENT:
      owned = ((owner_of(path, declared), x) for path, x in leaves_by_path(after.opt_states).items())
      found |= {Name('gradient', path_name(owner)): x for owner, x in owned if owner is not None}
      found |= {Name('new value', path_name(p)): x for p, x in values.items() if not learner.is_trained(p)}
    else:
      old, slots = leaves(variables), leaves_by_path(after.opt_states)
      found |= {Name('update', path_name(p)): x - old[p] for p, x in values.items() if learner.is_trained(p)}
      found |= {Name('slot', path_name(p)): x for p, x in slots.items() if isinstance(x, np.ndarray)}
      found |= {Name('average', path_name(p)): x for p, x in leaves_by_path(after.ema_vars).items()}
    metrics = {name: metric for name, metric in out.mean_metrics.items() if name != 'loss'}
    return found | _batch_results(metrics, out.per_example_out)


def _batch_results(metrics: WeightedScalars, by_row: NestedDict) -> StepResults:
  means = {Name('metric', name): np.asarray(mean) for name, (mean, _) in metrics.items()}
  return means | {Name('output', path_name(path)): np.asarray(x) for path, x in leaves_by_path(by_row).items()}


def results_in_float64(case: Case, one_device: Mesh, noise: Sequence[int]) -> tuple[StepResults, list[StepResults]]:
  """Returns the results of a case in float64, without noise, and a list of results with noise, one for each seed.

  They decide which of two float32 results is wrong. Results of one device in float32 are not a reliable reference: they
  are rounded, and XLA has faults on one CPU device too, for example in the gradient of a convolution with batch groups.
  Variables and batch have the same values as in the case.

  Raises:
    Exception: any error of a layer that does not support float64.
  """
  with jax.enable_x64(True):
    config = replace_dtypes(case.config, jnp.float64)
    config.model.dtype = jnp.float64
    task = task_of(config, case.kind)
    # Averages, such as those of batch norms, are float32, whatever dtype the layer computes in.
    declared = jax.tree.map(lambda weight: weight.dtype, task.model.abstract_init())
    state = values_of_state(task, jax.tree.map(np.ndarray.astype, case.state.mdl_vars, declared))
    batch = jax.tree.map(lambda x: x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x, case.batch)
    runner = Runner(case._replace(config=config, task=task, state=state, batch=batch), one_device)
    return runner.results(), [runner.results(seed) for seed in noise]


# ---------------------------------------------------------------- tasks


def task_of(config: Config[SingleTask], kind: StepKind) -> SingleTask:
  """Builds a task with the same model for steps of this kind. For gradients, its learner only stores the gradients."""
  config = config.clone()
  learner = config.train.learner
  if kind is StepKind.UPDATE:
    for one in nested_learners(learner).values():
      one.set(schedule=Config(Constant), learning_rate=max(one.learning_rate, _LEARNING_RATE))
    for rule in nested_rules(learner):  # Makes all learners train in the first step.
      rule.set(train_from_step=0, train_until_step=None)
  elif kind is StepKind.GRADIENT:
    config.train.learner = Config(
      Learner,
      optimizer=Config(keep_gradients),
      per_layer_statistics=False,
      on_nonfinite='ignore',
      num_microbatches=learner.num_microbatches,
      bprop_variable_inclusion=learner.bprop_variable_inclusion,
      bprop_variable_exclusion=learner.bprop_variable_exclusion,
    )
  return config.instantiate()


def keep_gradients(learning_rate: float | jax.Array) -> optax.GradientTransformation:
  """Returns an optimizer that changes no variable; its state is the last gradient."""
  del learning_rate
  zeros = jax.tree_util.Partial(jax.tree.map, jnp.zeros_like)
  return optax.GradientTransformation(zeros, lambda gradients, state, params=None: (zeros(gradients), gradients))


def disable_dropout(config: Config) -> Config:
  """Returns a copy without noise: rates that layers declare, and floats with 'dropout' in their name, are 0."""
  copy = config.clone()
  for nested in nested_configs(copy):
    rates = getattr(target(nested), 'noise_fields', ())
    for name, value in config_values(nested).items():
      if isinstance(name, str) and isinstance(value, float) and ('dropout' in name or name in rates):
        setattr(nested, name, 0.0)
  return copy


# ---------------------------------------------------------------- values


def values_of_variables(task: SingleTask, seed: int = 0) -> NestedDict:
  """Returns initial values of all variables, on the host. Weights get noise, because zeros could hide faults."""
  rng = np.random.default_rng(seed)
  with jax.default_device(jax.devices('cpu')[0]):
    variables = jax.jit(task.model.init)(jax.random.key(seed))
  declared = leaves(task.model.abstract_init())

  def value(path: Path, x: jax.Array) -> np.ndarray:
    first = np.asarray(x)
    if not declared[path].trainable or not np.issubdtype(first.dtype, np.floating):
      return first
    scale = min(0.2, 1 / np.sqrt(max(first.shape[-2:], default=1)))
    return (first + scale * rng.standard_normal(first.shape)).astype(first.dtype)

  return map_with_path(value, variables)


def values_of_state(task: SingleTask, variables: NestedDict) -> TrainState:
  """Returns the train state of a task before its first step, on the host."""
  learner = task.bind_learner()
  with jax.default_device(jax.devices('cpu')[0]):
    slots, averages = jax.jit(lambda v: (learner.init(v), learner.init_ema(v)))(variables)
  return TrainState(np.zeros((), np.int32), variables, jax.tree.map(_host, slots), jax.tree.map(_host, averages))


def values_of_batch(task: SingleTask, inputs: NestedDict, rows: int, seed: int = 0) -> NestedDict:
  """Returns a batch of random values.

  Integers are ids below the smallest `vocab_size` or `num_classes` of the model's layers. Leaves that language models
  know get valid values: `segment_ids` number two segments, `prompt_lengths` are at least 1, and some
  `weights` are zero. Recordings have at least half of their samples, and few labels before the blanks, so that a model
  of speech has enough frames for them.
  """
  fields = [layer.__dict__ for layer in task.model.descendants()]
  ids = [n for of_layer in fields for name in ('vocab_size', 'num_classes') if isinstance(n := of_layer.get(name), int)]
  most = min((n for n in ids if n > 1), default=2)
  rng = np.random.default_rng(seed)
  blanks = [of_layer['blank_id'] for of_layer in fields if 'blank_id' in of_layer]
  lengths = {x.shape[1] for x in jax.tree.leaves(inputs) if len(x.shape) > 1}
  sound = {'audio_lengths': 'audio', 'feature_lengths': 'features'}
  recorded = {name: inputs[leaf].shape[1] for name, leaf in sound.items() if leaf in inputs}

  def value(path: Path, x: jax.ShapeDtypeStruct) -> np.ndarray:
    shape, name = x.shape, path[-1]
    if name == 'segment_ids' and len(shape) == 2:
      made = 1 + (np.arange(shape[1]) >= _ends(shape)) * np.ones(shape)
    elif name == 'segment_pos' and len(shape) == 2:
      made = np.arange(shape[1]) - np.where(np.arange(shape[1]) >= _ends(shape), _ends(shape), 0)
    elif name == 'prompt_lengths':
      made = rng.integers(1, 1 + min(lengths, default=1), shape)
    elif name in recorded:
      made = rng.integers(recorded[name] // 2, recorded[name] + 1, shape)
    elif name == 'labels' and blanks and len(shape) == 2:
      made = np.where(np.arange(shape[1]) < max(1, shape[1] // 8), rng.integers(0, most, shape), blanks[0])
    elif name == 'weights':
      made = rng.uniform(0.5, 1.5, shape) * (rng.random(shape) < 0.9)
    elif np.issubdtype(x.dtype, np.integer):
      made = rng.integers(0, most, shape)
    elif x.dtype == np.bool_:
      made = rng.random(shape) < 0.5
    else:
      made = rng.standard_normal(shape)
    return made.astype(x.dtype)

  batch = map_with_path(value, replace_rows(inputs, rows))
  if 'weights' in batch:
    batch['weights'].reshape(-1)[0] = 1.0  # A batch of one row needs a weight above zero.
  return batch


def decode_inputs(inputs: NestedDict) -> NestedDict:
  """Returns the shapes of a batch to decode, given those of a training batch: the first half of `ids` is the prompt.

  If the batch has parts, such as the answers of pairs, this uses the first part with `ids`. A batch without `ids` stays
  as it is.
  """
  parts = (inputs, *(part for part in inputs.values() if isinstance(part, dict)))
  inputs = next((part for part in parts if 'ids' in part), inputs)
  if 'ids' not in inputs:
    return inputs
  rows, length = inputs['ids'].shape
  prompts = jax.ShapeDtypeStruct((rows, max(1, length // 2)), inputs['ids'].dtype)
  return {'ids': prompts, 'prompt_lengths': jax.ShapeDtypeStruct((rows,), np.int32)}


def _ends(shape: tuple[int, ...]) -> np.ndarray:
  """Returns the position at which the second segment of each row begins, [B, 1]."""
  return (1 + np.arange(shape[0]) % max(shape[1] - 1, 1))[:, None]


def _rounded_otherwise(path: Path, x: np.ndarray, seed: int) -> np.ndarray:
  if not np.issubdtype(x.dtype, np.floating):
    return x
  rng = np.random.default_rng([seed, zlib.crc32(path_name(path).encode())])
  return (x * (1 + 2.0**-22 * rng.choice([-1.0, 1.0], x.shape))).astype(x.dtype)


def _store_on_mesh(tree: object, layout: StateLayout) -> object:
  """Pads host arrays and copies them to the mesh. The copies get their own memory, because a step donates its state."""
  return jax.device_put(pad_to(tree, layout.padded_shapes), layout.shardings, may_alias=False)


def _host(x: jax.Array) -> np.ndarray | jax.Array:
  return x if is_prng_key(x) else np.asarray(x)
