"""Quantized weights: adds them to the config of a model, and converts its variables from and to plain weights."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config
from praxis_lite.common.errors import DataError
from praxis_lite.common.trees import NestedDict, Path
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.stored import StoredWeight
from praxis_lite.layers.quantized_weights import RoundedWeight
from praxis_lite.models.base import BaseModel

ModelT = TypeVar('ModelT', bound=BaseModel)


def quantize_weights(model: Config[ModelT], *rules: Config) -> Config[ModelT]:
  """Quantizes weights of a model: adds rules to its config, in place, and returns it.

      quantize_weights(model, Config(QuantizedWeights, format='int4', group_size=64))

  A weight `w` becomes two variables: `w`, which now has integers, and `w_quantized_scale`. Both are split over the mesh
  like the weight. They are frozen, but adapters on them can be trained (QLoRA; Dettmers et al., 2023).

  Args:
    model: the config.
    *rules: configs such as `Config(QuantizedWeights)`; each layer gets the first one that matches it.
  """
  return append_rules(model, 'quantized', rules)


def append_rules(model: Config[ModelT], field: str, rules: Sequence[Config]) -> Config[ModelT]:
  """Appends rules to a field of a model's config that holds one rule, several or None; returns the config."""
  present = getattr(model, field)
  return model.set(**{field: (*((present,) if isinstance(present, Config) else present or ()), *rules)})


def stored_weights(model: Layer) -> Iterator[tuple[Path, Layer, StoredWeight]]:
  """Yields the path of each weight that is stored in another form, below the model; its layer; and the form."""
  for layer in model.descendants():
    for name, stored in layer._stored.items():
      yield (*layer.path[len(model.path) :], name), layer, stored


def change_variables(
  layer: Layer, variables: NestedDict, change: Callable[[Layer, NestedDict], NestedDict]
) -> NestedDict:
  """Applies `change(layer, variables)` to the variables of a layer and of all layers below it, children first."""
  children = dict(layer.named_children())
  below = {
    name: change_variables(children[name], value, change) if name in children else value
    for name, value in variables.items()
  }
  return change(layer, below)


def remove_quantization(model: Config[ModelT]) -> Config[ModelT]:
  """Returns a copy of a model's config with plain weights, for variables that `dequantize_variables` returns."""
  return model.clone(quantized=())


def quantize_variables(model: Layer, variables: NestedDict) -> NestedDict:
  """Returns the variables of a model with quantized weights, given those of the same model with plain weights.

  Args:
    model: the built model with quantized weights.
    variables: variables of the plain model, in their true shapes. Weights may be missing.

  Raises:
    DataError: a weight has NaN or infinities.
  """
  return change_variables(model, variables, _store)


def _store(layer: Layer, variables: NestedDict) -> NestedDict:
  stored = dict(variables)
  for name, form in layer._stored.items():
    if name not in variables:
      continue
    w = jnp.asarray(variables[name])
    if not isinstance(w, jax.core.Tracer) and not bool(jnp.isfinite(w).all()):
      raise DataError(f'{layer.path_name}.{name} has NaN or infinities, so it cannot be quantized')
    stored |= form.store(w)
  return stored


def dequantize_variables(model: Layer, variables: NestedDict) -> NestedDict:
  """Returns plain variables, in their declared dtypes.

  With them, the model without quantization computes what the quantized model computes.

  Args:
    model: the built model with quantized weights.
    variables: its variables, in their true shapes.
  """
  return change_variables(model, variables, _read)


def _read(layer: Layer, variables: NestedDict) -> NestedDict:
  plain = dict(variables)
  for name, form in layer._stored.items():
    parts = {part: jnp.asarray(plain.pop(part)) for part in form.parts if part in plain}
    if parts:
      plain[name] = jax.jit(form.read, static_argnums=1)(parts, form.weight.dtype)
  return plain


def has_mask_shots(model: Layer) -> bool:
  """Whether training chooses at some steps which weights are kept; see `QuantizedWeights.num_shots`."""
  return any(isinstance(w, RoundedWeight) and w.shots is not None for _, _, w in stored_weights(model))


def renew_masks(model: Layer, variables: NestedDict, step: jax.Array) -> NestedDict:
  """Returns variables with the masks of kept weights that a train step uses; see `QuantizedWeights.num_shots`.

  Args:
    model: the built model.
    variables: its variables, in their true shapes.
    step: int32 scalar, the number of steps before this one.
  """

  def renew(layer: Layer, variables: NestedDict) -> NestedDict:
    masks = [w.renew_mask(variables, step) for w in layer._stored.values() if isinstance(w, RoundedWeight)]
    return functools.reduce(operator.or_, masks, dict(variables))

  return change_variables(model, variables, renew)
