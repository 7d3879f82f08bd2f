"""The teacher of a language model: a frozen network, the child `teacher`, whose probabilities the model imitates.

B batch, T length, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.frozen import FrozenVariables
from praxis_lite.models.language_model import LanguageModel


def create_teacher(model: LanguageModel, teacher_tpl: Config) -> None:
  """Builds the child `teacher` in `setup` of a model; raises ConfigError if the model cannot learn from it."""
  where = model.path_name
  if model.adapters:
    raise ConfigError(f'{where}.adapters: a model with a teacher trains its own weights; remove the adapters')
  teacher = model.create_child('teacher', teacher_tpl)
  for name, network in (('lm_tpl', model.lm), ('teacher_tpl', teacher)):
    if not isinstance(network, TransformerLm):
      raise ConfigError(f'{where}.{name}: distillation needs a TransformerLm, got {type(network).__name__}')
  if teacher.vocab_size != model.lm.vocab_size:
    raise ConfigError(
      f'{where}.teacher_tpl.vocab_size: the teacher has {teacher.vocab_size} tokens, and the model '
      f'{model.lm.vocab_size}; both need the same tokenizer'
    )


def frozen_teacher(model: LanguageModel) -> FrozenVariables:
  """Returns the `FrozenVariables` of the teacher."""
  paths = frozenset(path for path in leaves(model.abstract_init()) if path[0] == 'teacher')
  return FrozenVariables(paths, 'bprop_variable_exclusion', r'teacher\..*', 'the teacher must keep its values')


def teacher_logits(teacher: TransformerLm, ids_BT: jax.Array, weights_BT: jax.Array, visible: Any) -> jax.Array:
  """Returns the teacher's logits, [B, T, V], without gradients; `visible` are keyword arguments for attention masks."""
  variables = jax.lax.stop_gradient(teacher.variables)
  logits_BTV, _ = teacher.apply(variables, ids_BT, weights_BT, **visible, do_eval=True, method='logits')
  return to_sum_dtype(jax.lax.stop_gradient(logits_BTV))
