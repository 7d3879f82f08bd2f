"""train_distillation: makes the task of a language model learn from a larger one."""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.distilled_model import DistilledModel
from praxis_lite.models.language_model import sized_network
from praxis_lite.training.preferences import check_is_language_model, exclude, to_class
from praxis_lite.training.task import TaskT


def train_distillation(
  task: Config[TaskT], teacher: Config, *, temperature: float = 1.0, weight: float = 0.5
) -> Config[TaskT]:
  """Makes the model of a task a `DistilledModel`, in place, and returns the task.

  The learner does not train the teacher. If `task.train.init_from` names a run, that is the teacher's, and the model
  starts from the seed.

  Args:
    task: the config of a task of a `LanguageModel`.
    teacher: config of the `LanguageModel` of the teacher, without adapters, such as that of its run.
    temperature, weight: see `DistilledModel`.

  Raises:
    ConfigError: the teacher is no `LanguageModel`, has adapters, or is a prefix-LM.
  """
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
  model = to_class(task.model, DistilledModel)
  task.model = model.set(
    teacher_tpl=sized_network(teacher, 'teacher').set(mtp_tpl=None), temperature=temperature, weight=weight
  )
  exclude(task, r'teacher\..*')
  start = task.train.init_from
  start.rules = ((r'teacher\.(.*)', r'lm.\1'), (r'lm\..*', None), *start.rules)
  return task
