"""The options of `run_train`: how to train, apart from the config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from praxis_lite.checkpoints import OnDamage
from praxis_lite.common.errors import ConfigError, check_choice, did_you_mean
from praxis_lite.inputs.patient_thread import READ_TIMEOUT_S
from praxis_lite.inputs.rows import Struct
from praxis_lite.runs.corruption import OnCorruption
from praxis_lite.runs.hooks import Hook, check_hooks
from praxis_lite.runs.observer import Observer
from praxis_lite.runs.profiling import ProfiledSteps
from praxis_lite.runs.throughput import StartupTimes
from praxis_lite.training.taps import Tap
from praxis_lite.training.task import SingleTask

# (the instantiated task, shapes and dtypes of a training batch) -> lines to print.
Advice = Callable[[SingleTask, Struct], Iterable[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
  """How `run_train` trains a config. `run_train` also takes each option as a keyword argument.

  Attributes:
    devices: the devices to build the mesh from; None means all devices.
    seed: seed of the initial values and of all random numbers in training. None means the seed that the run records,
      or 0 for a new run.
    restore_input: whether a resumed run goes on reading the training data at the saved position; False reads it from
      its beginning.
    verify_numerics: before the first step, compute its gradient norms by a second method, too, and stop if they differ.
    advise: returns warnings about the task, which are printed before anything is compiled.
    hooks: called after steps, evaluations and checkpoints; see `praxis_lite.runs.hooks`.
    observers: notified of all events of the run; see `praxis_lite.runs.observer`. Unlike an error of a hook, an error
      of an observer ends the run without saving.
    tap: statistics of activations, gradients, updates and weights to write with the metrics, such as
      'lm.transformer.*.attention:rms,max'; see `praxis_lite.training.taps`.
    profile_steps: the first and the last step of a trace for TensorBoard.
    on_damage: what to do if the newest checkpoint is damaged: 'previous' renames it and continues from the one before,
      'fail' raises.
    debug_nans: wait for each step; after the first one that is not finite, end with an error that names the layer.
    check_determinism: run twice each step whose number is a multiple of this, and compare the results bit by bit.
    other_devices: when `check_determinism` runs a step twice, let each device do the work of another one in the first
      of the two runs. This also finds a device that computes the same wrong values each time. Compiles the step twice.
    check_replicas: compare the replicas of the train state after each step whose number is a multiple of this, and
      before each save; see `praxis_lite.runs.corruption`.
    on_corruption: what to do after a check found different bits: 'fail' ends the run with exit code 76, 'repeat' goes
      back to the last checkpoint and repeats the steps. Without `elastic`, 'repeat' ends the run when a device is at
      fault for the second time.
    grace_s, preemption_notice: see `grace_s` and `notice` in `praxis_lite.runs.cluster.preemption`.
    elastic: if there are fewer devices than the mesh needs, train on a smaller mesh; see `praxis_lite.runs.elastic`.
    input_timeout_s: seconds to wait for a batch. After that the run is saved and ends with HungInputError.
    alert_command: a command for the shell. It is called after steps that are not finite, when the run goes back to a
      checkpoint, when it fails, and when it ends; see `praxis_lite.runs.alerts`.
    accept_changed_data: continue at the saved position although files of the training data have changed since; by
      default, this is an error.
    startup: the times of earlier work of the caller, such as imports, which count as start-up; None counts none.

  Raises:
    ConfigError: an option has an invalid value.
  """

  devices: Sequence[jax.Device] | None = None
  seed: int | None = None
  restore_input: bool = True
  verify_numerics: bool = False
  advise: Advice | None = None
  hooks: Sequence[Hook] = ()
  observers: Sequence[Observer] = ()
  tap: Sequence[str] = ()
  profile_steps: tuple[int, int] | None = None
  on_damage: OnDamage = 'previous'
  debug_nans: bool = False
  check_determinism: int | None = None
  other_devices: bool = False
  check_replicas: int | None = None
  on_corruption: OnCorruption = 'fail'
  grace_s: float | None = None
  preemption_notice: str | None = None
  elastic: bool = False
  input_timeout_s: float = READ_TIMEOUT_S
  alert_command: str | None = None
  accept_changed_data: bool = False
  startup: StartupTimes | None = None

  def __post_init__(self) -> None:
    check_hooks(self.hooks)
    for name in ('check_determinism', 'check_replicas'):
      steps = getattr(self, name)
      if steps is not None and steps < 1:
        raise ConfigError(f'{name} = {steps}: expected a number of steps, at least 1')
    if self.other_devices and self.check_determinism is None:
      raise ConfigError('other_devices needs check_determinism: it says which steps to run on other devices, too')
    check_choice('on_corruption', self.on_corruption, ('fail', 'repeat'))
    if self.grace_s is not None and not self.grace_s > 0:
      raise ConfigError(f'grace_s = {self.grace_s:g}: expected more than 0 seconds')
    if not self.input_timeout_s > 0:
      raise ConfigError(f'input_timeout_s = {self.input_timeout_s:g}: expected more than 0 seconds')
    for text in (self.tap,) if isinstance(self.tap, str) else self.tap:
      Tap.parse(text)
    if self.profile_steps is not None:
      ProfiledSteps.parse(self.profile_steps)

  @classmethod
  def names(cls) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]

  def replace(self, changes: Mapping[str, Any]) -> TrainOptions:
    """Returns the options with other values for the names in `changes`; raises TypeError for an unknown name."""
    for name in changes:
      if name not in self.names():
        close = did_you_mean(name, self.names())
        raise TypeError(f'run_train: there is no option {name!r}.{close} The options are {", ".join(self.names())}.')
    return dataclasses.replace(self, **changes)
