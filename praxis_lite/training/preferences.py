"""train_preferences, train_rewards and train_policy: make the task of a language model learn which answers are good."""

from __future__ import annotations

from collections.abc import Collection

from praxis_lite.common.config import REQUIRED, Config, config_values, field_names, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding import Sampler
from praxis_lite.models.language_model import SIZES_OF_NETWORK, LanguageModel, sized_network
from praxis_lite.models.policy_losses import Grpo
from praxis_lite.models.policy_model import PolicyModel
from praxis_lite.models.preference_losses import Dpo
from praxis_lite.models.preference_model import PreferenceModel
from praxis_lite.models.reward_model import RewardModel
from praxis_lite.training.task import TaskT


def train_preferences(task: Config[TaskT], loss: Config | None = None) -> Config[TaskT]:
  """Makes the model of a task a `PreferenceModel`, in place, and returns the task.

      train_preferences(task, Config(Dpo, beta=0.1))

  If the loss needs a reference and the model has no adapters, the model gets a frozen copy, `reference`: the learner
  does not train it, and a run that starts from the variables of another one (`task.train.init_from`) copies them to
  both.

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
  """Makes the model of a task a `PolicyModel`, in place, and returns the task. It learns from rewards of its answers.

      train_policy(task, Config(Grpo, kl_weight=0.02))

  A reference is as in `train_preferences`. The training input must be a `RewardedInput`.

  Args:
    task: the config of a task of a `LanguageModel`; call `train_adapters` before this.
    loss: config of a `Grpo`; None means its defaults.
    sampler: config of the `Sampler` of training; None takes `max_decode_steps` and `stop_ids` of `decoder_tpl`.
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
  """Makes a run not train the frozen copy of the network, if the model has one, and start it from the same weights."""
  if not task.model.adapters:
    exclude(task, r'reference\..*')
    task.train.init_from.rules = ((r'reference\.(.*)', r'lm.\1'), *task.train.init_from.rules)


def train_rewards(task: Config[TaskT]) -> Config[TaskT]:
  """Makes the model of a task a `RewardModel`, in place, and returns the task.

  The head starts from the seed, and the network from the variables that `task.train.init_from` names. The learner does
  not train the softmax, unless its table is also that of the embeddings.

  Args:
    task: the config of a task of a `LanguageModel`; call `train_adapters` before this.
  """
  model = to_class(task.model, RewardModel, without=(*SIZES_OF_NETWORK, 'tokens_are_bytes', 'decoder_tpl'))
  task.model = model.set(lm_tpl=sized_network(task.model, 'task.model').set(mtp_tpl=None))
  if model.lm_tpl.embedding_tpl is not None:
    exclude(task, r'lm\.softmax\..*')
  learner, start = task.train.learner, task.train.init_from
  if included := learner.bprop_variable_inclusion:
    learner.bprop_variable_inclusion = (*_several(included), r'head\..*')
  start.rules = ((r'head\..*', None), *start.rules)
  return task


def to_class(model: Config, kind: type, without: Collection[str] = ()) -> Config:
  """Returns the config of a model of another class with the same fields, as far as it has them.

  Args:
    model: config of a `LanguageModel`.
    kind: the other class.
    without: fields that this class may lack, whatever their values.

  Raises:
    ConfigError: the model is no language model, or another field, which is not at its default, would be lost.
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
  """Raises a ConfigError if a config, whose path is `where`, is not that of a `LanguageModel`."""
  built = target(model)
  if not (isinstance(built, type) and issubclass(built, LanguageModel)):
    raise ConfigError(f'{where}: expected a LanguageModel, got {getattr(built, "__name__", built)}')


def exclude(task: Config[TaskT], pattern: str) -> None:
  """Makes the learner of a task not train the variables whose paths a regex matches."""
  learner = task.train.learner
  excluded = _several(learner.bprop_variable_exclusion)
  if pattern not in excluded:
    learner.bprop_variable_exclusion = (*excluded, pattern)


def _several(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
  return (patterns,) if isinstance(patterns, str) else tuple(patterns)
