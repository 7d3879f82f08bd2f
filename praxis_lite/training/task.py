"""SingleTask: a model, how it is trained, evaluated and decoded, and the mesh over which it is split."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from praxis_lite.common.config import REQUIRED, Config, Configurable, build_at, field_names, target, template
from praxis_lite.common.config.fields_at_fault import name_settable_fields
from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import ConfigError, UserError, check_choice, check_range, prefix_errors
from praxis_lite.common.files import is_url
from praxis_lite.common.trees import path_name
from praxis_lite.models.base import BaseModel
from praxis_lite.sharding.mesh import GivenMeshShape, create_device_mesh, fill_mesh_shape, mesh_sizes, read_mesh_shape
from praxis_lite.sharding.xla_flags import Flag, check_xla_flags
from praxis_lite.training.learning import BaseLearner, Learner
from praxis_lite.training.learning.base_learner import BoundLearner
from praxis_lite.training.learning.multi_learner import nested_learners


def _build_sections(owner: Configurable, path: str, *sections: str) -> None:
  """Builds the configs in the fields `sections` of `owner`, and replaces the configs by the results."""
  for section in sections:
    config = getattr(owner, section)
    if not isinstance(config, Config):
      raise ConfigError(f'{path}.{section}: expected the config of its settings, got {config!r}')
    setattr(owner, section, build_at(f'{path}.{section}', config))


# Which values of a metric are better: 'auto' decides by the metric's name, 'min' means lower ones, 'max' higher ones.
MODES = ('auto', 'min', 'max')


class EarlyStoppingParams(Configurable):
  """Early stopping: ends a run when a metric of its evaluations no longer improves.

  Attributes:
    patience: the run stops after this many evaluations in a row without an improvement; None disables early stopping.
    metric: name of the metric, or `eval/<input>/<metric>` if several inputs are evaluated. If this has its default
      value and the run has a `best_metric`, that metric is used.
    mode: 'min', 'max' or 'auto', see `best_metric_mode` of the training. If `best_metric` is used, so is its mode.
    min_delta: a value is an improvement if it is better than the best value by more than this.
  """

  patience: int | None = None
  metric: str = 'loss'
  mode: str = 'auto'
  min_delta: float = 0.0

  def __post_init__(self) -> None:
    where = 'task.train.early_stopping'
    check_choice(f'{where}.mode', self.mode, MODES)
    check_range(f'{where}.patience', self.patience, least=1)
    check_range(f'{where}.min_delta', self.min_delta, least=0)


class LossSpikeParams(Configurable):
  """Detection of spikes of the training loss, and the reaction to them.

  Attributes:
    factor: a loss is too high if it exceeds factor * median of the previous losses; None disables detection.
    steps: how many losses in a row must be too high.
    window: the number of losses for the median, not counting those that are too high.
    action: with 'rollback', the run goes back to the last checkpoint before the spike, and skips the batches of the
      spike. With 'raise', the run ends with an error.
  """

  factor: float | None = None
  steps: int = 3
  window: int = 100
  action: str = 'rollback'

  def __post_init__(self) -> None:
    where = 'task.train.loss_spike'
    check_choice(f'{where}.action', self.action, ('rollback', 'raise'))
    check_range(f'{where}.factor', self.factor, above=1)
    check_range(f'{where}.steps', self.steps, least=1)
    check_range(f'{where}.window', self.window, least=2)


class EmergencyCopiesParams(Configurable):
  """Copies of the train state that each host keeps in a local folder, in addition to checkpoints.

  A restarted run uses the newest copy that is complete on all hosts, if it is newer than the newest checkpoint.

  Attributes:
    every_n_steps: steps between copies; None disables them. A killed process loses less than twice this many steps.
    directories: where each host keeps its copies: on a RAM disk or a disk. Each directory gets all copies. The first
      directory with a complete copy is read, so one of the directories may be on another host.
    peers: the number of other hosts to which each process sends its shards, so that a copy survives the loss of a host.
      Each peer is in another failure domain.
    failure_domain: the number of successive processes that may be lost together, such as those of a host, a rack or a
      slice. Processes that share a directory are always in one domain.
  """

  every_n_steps: int | None = None
  directories: tuple[str, ...] = ('/dev/shm',)
  peers: int = 0
  failure_domain: int = 1

  def __post_init__(self) -> None:
    where = 'task.train.emergency_copies'
    check_range(f'{where}.every_n_steps', self.every_n_steps, least=1)
    if isinstance(self.directories, str) or not self.directories:
      raise ConfigError(f'{where}.directories: expected paths, as in ("/dev/shm",), got {self.directories!r}')
    check_range(f'{where}.peers', self.peers, least=0)
    check_range(f'{where}.failure_domain', self.failure_domain, least=1)


def copies_kept(peers: int) -> int:
  """Returns how many emergency copies a process keeps at most in the first of its directories.

  One is complete, and one is being written. With peers, there may also be one that some of the peers do not have.
  """
  return 3 if peers else 2


class InitFromParams(Configurable):
  """A checkpoint of another run from which a new run takes initial values; a run that resumes ignores it.

  The optimizer state is not taken. A variable comes from the variable with the same path in the checkpoint, unless a
  rule says otherwise. Regular expressions match whole paths, such as `lm.softmax.w`, in the model to train. Learned
  positions of image patches are resampled if the other run has another image size, unless `partial` matches them.

  Attributes:
    path: the directory of the other run; None disables this, and variables get random initial values.
    step: step of the checkpoint, or 'best'; None means the newest.
    rules: pairs (regex, path in the checkpoint). The first match counts. The path may contain groups of the regex as
      \\1, \\2, ...; a path of None means random initial values.
    partial: regexes of variables whose shape may differ: entries that exist in both are copied, and the others get
      random initial values.
    use_ema: whether to take the moving averages, if the checkpoint has them.
    store_changes_only: whether checkpoints leave out variables that come from the other run and that the learner does
      not train, such as all variables except adapters. They are read from the checkpoint of the other run, which must
      therefore be kept: if that run still trains, its max_to_keep may remove it. Set this only when a run starts.
  """

  path: str | None = None
  step: int | str | None = None
  rules: tuple[tuple[str, str | None], ...] = ()
  partial: tuple[str, ...] = ()
  use_ema: bool = False
  store_changes_only: bool = False

  def __post_init__(self) -> None:
    for i, rule in enumerate(self.rules):
      if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise ConfigError(
          f'task.train.init_from.rules[{i}]: expected a pair (regex, path in the checkpoint or None), got {rule!r}'
        )
    if isinstance(self.partial, str):
      raise ConfigError(f'task.train.init_from.partial: expected a tuple of regexes, got the text {self.partial!r}')


class TrainParams(Configurable):
  """How the task is trained.

  Attributes:
    learner: optimizer, schedule, clipping, moving averages, and gradient accumulation.
    num_train_steps: number of steps of the whole run.
    inputs_split_mapping: `map_1d`, `map_2d`, ...: how inputs of each rank are split inside the step. None splits their
      batch dimension over all mesh axes.
    offload_optimizer_state: whether to keep the optimizer's state in host memory between updates; raises ConfigError if
      the devices do not support this.
    log_interval_steps: steps between lines on the console, and between scalars in the event files.
    eval_interval_steps: steps between evaluations; None evaluates only at the end.
    decode_interval_steps: steps between decoding runs; None decodes only in the command `decode`.
    save_interval_steps: steps between checkpoints; there is always one at the end.
    max_to_keep: how many of the newest checkpoints are kept.
    keep_interval_steps: checkpoints at multiples of this are never deleted; None disables it.
    best_metric: name of a metric, or `eval/<input>/<metric>`; the checkpoint of the evaluation with its best value is
      also kept. `early_stopping` uses this metric too. None means the metric of `early_stopping`, if that is enabled.
    best_metric_mode: 'min' if lower is better, 'max' if higher is better; 'auto' depends on the name of the metric, and
      is an error if the name does not say which.
    loggers: additional receivers of the metrics: names, such as 'wandb', or configs of loggers; see `runs/loggers`.
    mirror: URL of a folder in an object store, such as 's3://bucket/runs/1', that gets a copy of the run's directory,
      with each complete checkpoint that is kept. If the mirror is newer than the directory, the run resumes from it.
      None disables it.
    max_skipped_steps: the run ends with an error after this many steps in a row without a finite loss and gradient; 0
      and None set no limit.
    slow_step_factor: a step is reported if it takes longer than slow_step_factor * median of the previous steps; None
      disables the reports.
    max_rollbacks: how many times a run may go back because of a step that is not finite, or a spike of the loss.
    loss_spike, early_stopping, emergency_copies, init_from: see the classes.
  """

  learner: Config = template(Learner)
  num_train_steps: int = 1000
  inputs_split_mapping: dict[str, Any] | None = None
  offload_optimizer_state: bool = False
  log_interval_steps: int = 10
  eval_interval_steps: int | None = None
  decode_interval_steps: int | None = None
  save_interval_steps: int = 500
  max_to_keep: int = 3
  keep_interval_steps: int | None = None
  best_metric: str | None = None
  best_metric_mode: str = 'auto'
  loggers: tuple[Any, ...] = ()
  mirror: str | None = None
  max_skipped_steps: int | None = 100
  slow_step_factor: float | None = 5.0
  max_rollbacks: int = 10
  loss_spike: LossSpikeParams = template(LossSpikeParams)
  early_stopping: EarlyStoppingParams = template(EarlyStoppingParams)
  emergency_copies: EmergencyCopiesParams = template(EmergencyCopiesParams)
  init_from: InitFromParams = template(InitFromParams)

  def __post_init__(self) -> None:
    check_choice('task.train.best_metric_mode', self.best_metric_mode, MODES)
    optional = ('eval_interval_steps', 'decode_interval_steps')
    for name in ('num_train_steps', 'log_interval_steps', 'save_interval_steps', *optional):
      value, or_none = getattr(self, name), ' or None' if name in optional else ''
      if not (value is None and or_none) and (not isinstance(value, int) or value < 1):
        raise ConfigError(f'task.train.{name} = {value!r}: expected an integer of at least 1{or_none}')
    if self.mirror is not None and not is_url(self.mirror):
      raise ConfigError(
        f'task.train.mirror = {self.mirror!r}: expected the URL of a folder in an object store, such as '
        's3://bucket/runs/1, or None'
      )
    check_range('task.train.max_skipped_steps', self.max_skipped_steps, least=0)
    check_range('task.train.slow_step_factor', self.slow_step_factor, above=1)
    _build_sections(self, 'task.train', 'loss_spike', 'early_stopping', 'emergency_copies', 'init_from')


class DecodeParams(Configurable):
  """How the task decodes its `decode_datasets()`.

  Attributes:
    use_ema: whether to use the moving averages, if the learner keeps them.
    max_batches: number of batches; None means the whole data set.
  """

  use_ema: bool = True
  max_batches: int | None = None


class EvalParams(DecodeParams):
  """How the task is evaluated.

  Attributes: the same as for `DecodeParams`, and
    task_files: one or several configs of `TaskFile`s, with questions for language models; see `runs/task_files.py`.
  """

  task_files: Config | tuple[Any, ...] = ()


TaskT = TypeVar('TaskT', bound='SingleTask')


class SingleTask(Configurable):
  """A model and everything else that a training run needs, except data.

  In the config of a task, `model`, `train`, `evaluate` and `decode` are configs; in the task they are built objects.

  Attributes:
    name: name of the task, for logs.
    model: the model.
    mesh_axis_names: names of the mesh axes, in the order of the mesh shapes. A mesh shape of one size needs no names;
      its axis is then 'data'.
    ici_mesh_shape: mesh shape within a slice (devices with a fast interconnect); None means one device. One size may be
      -1 or 'auto', which stands for the rest of the devices; the shape `(-1, 1)` or 'auto' puts all devices along the
      first axis.
    dcn_mesh_shape: number of slices along each axis; None means one slice.
    logical_axis_rules: pairs (logical name, mesh axes) for mappings that name logical axes; earlier rules win.
    strategy: pairs (regex of variable paths, ops), such as `('.*', 'fsdp(axis="data")')`, for weights that declare no
      mapping.
    partitioning: how the train step communicates. With 'auto', XLA inserts collectives. With 'shard_map', they are
      explicit: each device computes its own rows, gathers weights before it uses them, and averages gradients.
    xla_flags: values of the XLA flags for compiling the steps, by name, as in {'xla_gpu_enable_triton_gemm': False}.
      None means XLA's default. The environment variable XLA_FLAGS takes precedence.
    default_xla_flags: whether to also use the default flags of the platform in `xla_flags.py`.
    train, evaluate, decode: see the classes.
  """

  _config_path = 'task'

  name: str = 'task'
  model: BaseModel = REQUIRED
  mesh_axis_names: tuple[str, ...] | None = None
  ici_mesh_shape: GivenMeshShape | None = None
  dcn_mesh_shape: tuple[int, ...] | None = None
  logical_axis_rules: tuple[tuple[str, Any], ...] | None = None
  strategy: list[tuple[str, str]] | None = None
  partitioning: str = 'auto'
  xla_flags: dict[str, Flag | None] | None = None
  default_xla_flags: bool = True
  train: TrainParams = template(TrainParams)
  evaluate: EvalParams = template(EvalParams)
  decode: DecodeParams = template(DecodeParams)

  def __post_init__(self) -> None:
    check_choice('task.partitioning', self.partitioning, ('auto', 'shard_map'))
    check_xla_flags('task.xla_flags', self.xla_flags)
    self.ici_mesh_shape = shape = read_mesh_shape(self.ici_mesh_shape, self.mesh_axis_names)
    if shape is not None and self.mesh_axis_names is None:
      if len(shape) != 1:
        raise ConfigError(
          f'task.mesh_axis_names: ici_mesh_shape = {shape}, and each of its axes needs a name, as in '
          f'--set "task.mesh_axis_names={("replica", "data", "mdl")[-len(shape) :]}"'
        )
      self.mesh_axis_names = ('data',)
    _build_sections(self, 'task', 'train', 'evaluate', 'decode')
    for section, params in (('evaluate', self.evaluate), ('decode', self.decode)):
      if params.max_batches is not None and params.max_batches < 1:
        raise ConfigError(f'task.{section}.max_batches = {params.max_batches}: expected at least 1, or None for all')
    built = target(self.train.learner)
    if not (isinstance(built, type) and issubclass(built, BaseLearner)):
      raise ConfigError(
        f'task.train.learner: expected the config of a Learner, got that of {getattr(built, "__name__", built)}; an '
        'optimizer is a field of it: Config(Learner, optimizer=Config(optax.adam), learning_rate=1e-3)'
      )
    with prefix_errors('task.train', 'learner'):
      learner = self.train.learner.clone()
      for one in nested_learners(learner).values():
        if getattr(one.schedule, 'total_steps', None) is REQUIRED:
          one.schedule.total_steps = self.train.num_train_steps
      self.learner: BaseLearner = learner.instantiate()
    model_p: object = self.model
    inherited = ('mesh_axis_names', 'logical_axis_rules')
    if not isinstance(model_p, Config) or not set(inherited) <= set(field_names(model_p) or inherited):
      raise ConfigError(f'task.model: expected the config of a BaseModel, got {model_p!r}')
    given = {f: getattr(self, f) for f in inherited if getattr(model_p, f) is None}
    self._model_config = model_p
    with self.name_fields():
      model = build_at('task.model', model_p, **given)
    if not isinstance(model, BaseModel):
      raise ConfigError(f'task.model: expected the config of a BaseModel, got {type(model).__name__}')
    self.model = model
    if model.frozen_variables is not None:
      self.bind_learner()

  @contextlib.contextmanager
  def name_fields(self) -> Iterator[None]:
    """Inside the block, the model's error messages name a layer's field by the path that `--set` takes."""
    try:
      yield
    except UserError as error:
      name_settable_fields(error, self._model_config, 'task.model')
      raise

  def bind_learner(self) -> BoundLearner:
    """Returns the learner for the variables of the model; its errors name fields of `task.train`."""
    with prefix_errors('task.train', 'learner'):
      bound = self.learner.bind(self.model.abstract_init())
    frozen = self.model.frozen_variables
    wrong = None if frozen is None else next((path for path in sorted(frozen.paths) if bound.is_trained(path)), None)
    if frozen is not None and wrong is not None:
      raise ConfigError(
        f'task.train.learner.{frozen.field}: {path_name(wrong)} would be trained, but {frozen.reason}; set it to '
        f'{(frozen.value,)!r}, or add this to it'
      )
    return bound

  def mesh_sizes(self, num_devices: int | None = None) -> dict[str, int]:
    """Returns the size of each mesh axis by name.

    If a size is -1, the mesh gets `num_devices`; None means all devices, for which JAX is started.
    """
    ici, dcn, names = self._mesh_shape()
    with prefix_errors('task'):
      return mesh_sizes(fill_mesh_shape(ici, dcn, names, num_devices), dcn, names)

  def create_mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of the task; without a mesh shape, one device with every axis of size 1.

    Raises ShardingError if the mesh needs more devices than there are, or its shape and names do not fit.
    """
    ici, dcn, names = self._mesh_shape()
    if devices is None:
      start_devices()
    with prefix_errors('task'):
      return create_device_mesh(ici, dcn, names, devices)

  def _mesh_shape(self) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[str, ...]]:
    names = self.mesh_axis_names or ('data',)
    return read_mesh_shape(self.ici_mesh_shape, names) or (1,) * len(names), self.dcn_mesh_shape, names
