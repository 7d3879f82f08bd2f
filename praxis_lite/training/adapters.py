"""train_adapters: makes a task train adapters of its model, and nothing else."""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.models.adapters import ADAPTER_VARIABLES, add_adapters
from praxis_lite.training.task import TaskT


def train_adapters(task: Config[TaskT], *adapters: Config) -> Config[TaskT]:
  """Adds adapters to the model of a task, in place, and returns the task.

      train_adapters(task, Config(Lora, rank=16))

  The learner then trains only adapters: the other variables have no gradients, no slots and no moving averages. If the
  run starts from the variables of another one (`task.train.init_from`), adapters start from the seed. To train other
  variables too, such as a new head, add their regexes to `task.train.learner.bprop_variable_inclusion`.

  Args:
    task: the config of a task.
    *adapters: see `praxis_lite.models.add_adapters`.
  """
  add_adapters(task.model, *adapters)
  learner, start = task.train.learner, task.train.init_from
  included = learner.bprop_variable_inclusion
  others = (included,) if isinstance(included, str) else tuple(included)
  if ADAPTER_VARIABLES not in others:
    learner.bprop_variable_inclusion = (*others, ADAPTER_VARIABLES)
  if (rule := (ADAPTER_VARIABLES, None)) not in start.rules:
    start.rules = (rule, *start.rules)  # Of several that match, the first counts.
  return task
