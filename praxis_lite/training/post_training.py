"""Changes the task of a language model so that it learns from preferences, rewards, or a larger model."""

from __future__ import annotations

from collections.abc import Collection

from praxis_lite.common.config import REQUIRED, Config, config_values, field_names, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding import Sampler
from praxis_lite.models.distilled_model import DistilledModel
from praxis_lite.models.language_model import SIZES_OF_NETWORK, LanguageModel, sized_network
from praxis_lite.models.on_policy_model import OnPolicyModel
from praxis_lite.models.policy_losses import Grpo
from praxis_lite.models.policy_model import PolicyModel
from praxis_lite.models.preference_losses import Dpo
from praxis_lite.models.preference_model import PreferenceModel
from praxis_lite.models.reward_model import RewardModel
from praxis_lite.training.adapters import exclude, include
from praxis_lite.training.task import TaskT


def train_preferences(task: Config[TaskT], loss: Config | None = None) -> Config[TaskT]:
  """Makes the model of a task a `PreferenceModel`, in place, and returns the task.

      train_preferences(task, Config(Dpo, beta=0.1))

  If the loss needs a reference and the model has no adapters, the model gets a frozen copy of its network, `reference`,
  which the learner does not train. If `task.train.init_from` names another run, both the network and the copy get the
  variables of that run.

  Args:
    task: the config of a task of a `LanguageModel`; call `train_adapters` before this.
    loss: config of a loss; None means `Dpo`.
  """
  model = to_class(task.model, PreferenceModel)
  model.loss_tpl = Config(Dpo) if loss is None else loss
  task.model = model
  if target(model.loss_tpl).needs_reference:  # type: ignore[attr-defined]
    _keep_reference(task)
  return task


def train_policy(task: Config[TaskT], loss: Config | None = None, sampler: Config | None = None) -> Config[TaskT]:
  """Makes the model of a task a `PolicyModel`, which learns from rewards of its answers, in place; returns the task.

      train_policy(task, Config(Grpo, kl_weight=0.02))

  For a reference, see `train_preferences`. The training input must be a `RewardedInput`.

  Args:
    task: the config of a task of a `LanguageModel`; call `train_adapters` before this.
    loss: config of a `Grpo`; None means its defaults.
    sampler: config of the `Sampler` for training; None takes `max_decode_steps` and `stop_ids` from `decoder_tpl`.
  """
  model = to_class(task.model, PolicyModel)
  model.loss_tpl = Config(Grpo) if loss is None else loss
  decoder = model.decoder_tpl
  model.sampler_tpl = sampler or Config(Sampler, max_decode_steps=decoder.max_decode_steps, stop_ids=decoder.stop_ids)
  task.model = model
  if model.loss_tpl.kl_weight:
    _keep_reference(task)
  return task


def _keep_reference(task: Config[TaskT]) -> None:
  """Excludes the frozen copy of the network, if there is one, from training, and initializes it like the network."""
  if not task.model.adapters:
    exclude(task, r'reference\..*')
    task.train.init_from.rules = ((r'reference\.(.*)', r'lm.\1'), *task.train.init_from.rules)


def train_rewards(task: Config[TaskT]) -> Config[TaskT]:
  """Makes the model of a task a `RewardModel`, in place, and returns the task.

  The head gets random initial values, and the network gets the variables of the run that `task.train.init_from` names.
  The learner does not train the softmax, unless the softmax shares its table with the embedding. Call `train_adapters`
  before this.
  """
  model = to_class(task.model, RewardModel, without=(*SIZES_OF_NETWORK, 'tokens_are_bytes', 'decoder_tpl'))
  task.model = model.set(lm_tpl=sized_network(task.model, 'task.model').set(mtp_tpl=None))
  if model.lm_tpl.embedding_tpl is not None:
    exclude(task, r'lm\.softmax\..*')
  if task.train.learner.bprop_variable_inclusion:
    include(task, r'head\..*')
  task.train.init_from.rules = ((r'head\..*', None), *task.train.init_from.rules)
  return task


def to_class(model: Config, kind: type, without: Collection[str] = ()) -> Config:
  """Returns the config of a model of another class, with all fields that both classes have.

  Raises ConfigError if the model is not a language model, or if the other class lacks a field whose value is not the
  default. The other class may lack the fields in `without`; their values are lost.
  """
  check_is_language_model('task.model', model)
  known = set(field_names(Config(kind)) or ())
  values, defaults = config_values(model.clone()), config_values(Config(target(model)))
  for name in values.keys() - known - set(without):
    if values[name] != defaults[name]:
      raise ConfigError(
        f'task.model.{name}: a {kind.__name__} has no such field, so it would be lost; '
        + ('use a LanguageModel without it' if defaults[name] is REQUIRED else f'set it to {defaults[name]!r}')
      )
  return Config(kind, **{str(name): value for name, value in values.items() if name in known})


def check_is_language_model(where: str, model: Config) -> None:
  """Raises a ConfigError if a config is not that of a `LanguageModel`; `where` is its path."""
  built = target(model)
  if not (isinstance(built, type) and issubclass(built, LanguageModel)):
    raise ConfigError(f'{where}: expected a LanguageModel, got {getattr(built, "__name__", built)}')


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
  of `train_distillation` with the same teacher; that run contains the variables of model and teacher. For the arguments
  and errors, see `train_distillation` and `train_policy`.
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
