"""Weights of a model in few bits: adds them to its config, and converts variables to and from these."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config
from praxis_lite.common.errors import DataError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers.base import Layer
from praxis_lite.models.base import BaseModel

ModelT = TypeVar('ModelT', bound=BaseModel)


def quantize_weights(model: Config[ModelT], *rules: Config) -> Config[ModelT]:
  """Stores weights of a model in few bits: adds rules to its config, in place, and returns it.

      quantize_weights(model, Config(QuantizedWeights, format='int4', group_size=64))

  A weight `w` becomes the variables `w`, integers, and `w_quantized_scale`, which are split over the mesh like the
  weight. They are frozen. Adapters may be added too: they train on the frozen weights (QLoRA; Dettmers et al., 2023).

  Args:
    model: the config.
    *rules: configs such as `Config(QuantizedWeights)`; the first one that is for a layer wins.
  """
  present = (model.quantized,) if isinstance(model.quantized, Config) else tuple(model.quantized or ())
  return model.set(quantized=(*present, *rules))


def remove_quantization(model: Config[ModelT]) -> Config[ModelT]:
  """Returns a copy of a model's config with plain weights, for variables that `dequantize_variables` returns."""
  return model.clone(quantized=())


def quantize_variables(model: Layer, variables: NestedDict) -> NestedDict:
  """Returns the variables of a model with weights in few bits, for those of the model with plain weights.

  Args:
    model: the built model with weights in few bits.
    variables: variables of the plain model, in their true shapes. Weights may be missing.

  Raises:
    DataError: a weight has NaN or infinities.
  """
  children = dict(model.children())
  stored = {
    name: quantize_variables(children[name], value) if name in children else value for name, value in variables.items()
  }
  for name, form in model._stored.items():
    if name not in variables:
      continue
    w = jnp.asarray(variables[name])
    if not isinstance(w, jax.core.Tracer) and not bool(jnp.isfinite(w).all()):
      raise DataError(f'{model.path_name}.{name} has NaN or infinities, so it cannot be quantized')
    stored |= form.store(w)
  return stored


def dequantize_variables(model: Layer, variables: NestedDict) -> NestedDict:
  """Returns the variables of the model with plain weights that computes the same, in the dtypes of the weights.

  Args:
    model: the built model with weights in few bits.
    variables: its variables, in their true shapes.
  """
  children = dict(model.children())
  plain = {
    name: dequantize_variables(children[name], value) if name in children else value
    for name, value in variables.items()
  }
  for name, form in model._stored.items():
    parts = {part: jnp.asarray(plain.pop(part)) for part in form.parts if part in plain}
    if parts:
      plain[name] = jax.jit(form.read, static_argnums=1)(parts, form.weight.dtype)
  return plain
