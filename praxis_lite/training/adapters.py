"""train_adapters: makes a task train only the adapters of its model. Also warns of training that is rarely meant."""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.models.adapters import ADAPTER_VARIABLES, add_adapters
from praxis_lite.training.task import SingleTask, TaskT


def train_adapters(task: Config[TaskT], *adapters: Config) -> Config[TaskT]:
  """Adds adapters to the model of a task, in place, and returns the task.

      train_adapters(task, Config(Lora, rank=16))

  The learner then trains only adapters: the other variables have no gradients, no slots and no moving averages. If
  `task.train.init_from` names another run, the adapters still get random initial values. To train other variables too,
  such as a new head, add regexes for them to `task.train.learner.bprop_variable_inclusion`.

  For `adapters`, see `praxis_lite.models.add_adapters`.
  """
  add_adapters(task.model, *adapters)
  include(task, ADAPTER_VARIABLES)
  start = task.train.init_from
  if (rule := (ADAPTER_VARIABLES, None)) not in start.rules:
    start.rules = (rule, *start.rules)  # The first rule that matches a variable applies.
  return task


def describe_untypical_training(task: SingleTask) -> str:
  """Returns a warning, which says what to set, if a task trains in a way that is rarely meant; otherwise ''.

  There are two such ways: weights that are not trained keep random initial values; or a model has adapters, and all
  weights are trained.
  """
  learner, start = task.train.learner, task.train.init_from
  narrowed = any(getattr(learner, f'bprop_variable_{what}', None) for what in ('inclusion', 'exclusion'))
  begins, more = '', ''
  if start.path is None:
    begins = ', and begins from the seed, so weights of an imported run are not used'
    more = ' --set task.train.init_from.path=RUN'
    if task.model.adapters:
      more += ' --set "task.train.init_from.rules=((\'.*lora.*\',None),)"'
  if narrowed and start.path is None:
    return (
      'warning: task.train.init_from.path: it is not set, so weights that are not trained keep random initial values; '
      f'to begin with the weights of a run:{more}'
    )
  if not task.model.adapters or narrowed or getattr(learner, 'rules', None):
    return ''
  return (
    f'warning: task.model.adapters: training changes all weights, not only the adapters{begins}; to train only '
    f"adapters: --set 'task.train.learner.bprop_variable_inclusion=.*lora.*'{more}"
  )


def exclude(task: Config[TaskT], pattern: str) -> None:
  """Excludes the variables whose paths match a regex from the training of a task."""
  _add_regex(task, 'bprop_variable_exclusion', pattern)


def include(task: Config[TaskT], pattern: str) -> None:
  """Adds the variables whose paths match a regex to those that a task trains."""
  _add_regex(task, 'bprop_variable_inclusion', pattern)


def _add_regex(task: Config[TaskT], field: str, pattern: str) -> None:
  given = getattr(task.train.learner, field)
  known = (given,) if isinstance(given, str) else tuple(given)
  if pattern not in known:
    setattr(task.train.learner, field, (*known, pattern))
