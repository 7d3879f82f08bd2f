"""How a run is trained, beside its config: the keyword arguments of `run_train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax

from praxis_lite.checkpoints import OnDamage
from praxis_lite.errors import ConfigError
from praxis_lite.inputs.rows import Struct
from praxis_lite.runtime.hooks import Hook, check_hooks
from praxis_lite.runtime.profiling import ProfiledSteps
from praxis_lite.task import SingleTask

# (the built task, shapes and dtypes of a training batch) -> lines to print.
Advice = Callable[[SingleTask, Struct], Iterable[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
  """The keyword arguments of `run_train`, which says what they mean."""

  devices: Sequence[jax.Device] | None
  seed: int | None
  restore_input: bool
  verify_numerics: bool
  advise: Advice | None
  hooks: Sequence[Hook]
  profile_steps: tuple[int, int] | None
  on_damage: OnDamage
  debug_nans: bool
  check_determinism: int | None
  grace_s: float | None
  preemption_notice: str | None
  elastic: bool
  input_timeout_s: float
  accept_changed_data: bool

  def check(self, task: SingleTask) -> None:
    """Raises ConfigError if one of them is not valid, or not together with the task."""
    check_hooks(self.hooks)
    if self.check_determinism is not None and self.check_determinism < 1:
      raise ConfigError(f'check_determinism = {self.check_determinism}: expected a number of steps, at least 1')
    if self.debug_nans and task.learner.on_nonfinite == 'ignore':
      raise ConfigError("task.train.learner.on_nonfinite = 'ignore' changes the state that debug_nans looks at")
    if not self.input_timeout_s > 0:
      raise ConfigError(f'input_timeout_s = {self.input_timeout_s:g}: expected more than 0 seconds')
    if self.profile_steps is not None:
      ProfiledSteps.parse(self.profile_steps)
