"""train_distillation and train_on_policy: make the task of a language model learn from a larger model."""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.distilled_model import DistilledModel
from praxis_lite.models.language_model import sized_network
from praxis_lite.models.on_policy_model import OnPolicyModel
from praxis_lite.training.preferences import check_is_language_model, exclude, to_class, train_policy
from praxis_lite.training.task import TaskT


def train_distillation(
  task: Config[TaskT], teacher: Config | None, *, temperature: float = 1.0, weight: float = 0.5
) -> Config[TaskT]:
  """Makes the model of a task a `DistilledModel`, in place, and returns the task.

  The learner does not train the teacher. If `task.train.init_from` names a run, the teacher's variables are taken from
  it, and the other variables get random initial values.

  Args:
    task: the config of a task of a `LanguageModel`.
    teacher: config of the teacher, a `LanguageModel` without adapters, such as the one recorded in its run. None if the
      data contains the teacher's probabilities, see `praxis_lite.inputs.teacher_rows`.
    temperature, weight: see `DistilledModel`.

  Raises:
    ConfigError: the teacher is not a `LanguageModel`, has adapters, or is a prefix-LM.
  """
  model = to_class(task.model, DistilledModel).set(temperature=temperature, weight=weight)
  if teacher is None:
    task.model = model.set(teacher_tpl=None)
    return task
  task.model = model.set(teacher_tpl=_teacher_network(teacher))
  exclude(task, r'teacher\..*')
  start = task.train.init_from
  start.rules = ((r'teacher\.(.*)', r'lm.\1'), (r'lm\..*', None), *start.rules)
  return task


def train_on_policy(task: Config[TaskT], teacher: Config, sampler: Config | None = None) -> Config[TaskT]:
  """Makes the model of a task an `OnPolicyModel`, which learns from a teacher on its own answers; returns the task.

  The config is changed in place. The training input must be a `RewardedInput`. `task.train.init_from` should name a run
  of `train_distillation` with the same teacher, which contains the variables of both.

  Args:
    task: the config of a task of a `LanguageModel`.
    teacher: see `train_distillation`.
    sampler: see `train_policy`.

  Raises:
    ConfigError: see `train_distillation`.
  """
  network = _teacher_network(teacher)
  train_policy(task, sampler=sampler)
  task.model = to_class(task.model, OnPolicyModel).set(teacher_tpl=network)
  exclude(task, r'teacher\..*')
  return task


def _teacher_network(teacher: Config) -> Config:
  """Returns the config of the network of a teacher; raises ConfigError if a model cannot be a teacher."""
  check_is_language_model('teacher', teacher)
  if teacher.adapters:
    raise ConfigError(
      'teacher.adapters: the teacher would be the model before it was tuned; merge them first, by '
      '`praxis-lite export-hf` and `import-hf`, or merge_adapters, and give the model without adapters'
    )
  if teacher.model_type != 'causal':
    raise ConfigError(
      f"teacher.model_type: a teacher must be 'causal', as the model that learns from it, got {teacher.model_type!r}"
    )
  return sized_network(teacher, 'teacher').set(mtp_tpl=None)
