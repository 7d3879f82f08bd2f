"""Adapters of a model: adds them to its config, and merges trained ones into its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

import numpy as np

from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, merge, nest, node_at, path_name, select
from praxis_lite.layers.base import Layer
from praxis_lite.layers.latent_attention import LatentAttention
from praxis_lite.layers.lora import AdaptedLayer, Lora, LoraLayer, LoraLinear, LoraProjection
from praxis_lite.models.base import BaseModel
from praxis_lite.models.quantization import ModelT, append_rules, change_variables, dequantize_variables

ADAPTER_VARIABLES = r'.*\.(lora\.[ab]|(gate|up|down)_lora_[ab]|dora_magnitude|ia3_scale)'
"""A regex that matches the paths of all variables of adapters, and of no other layers of this package."""


def add_adapters(model: Config[ModelT], *adapters: Config) -> Config[ModelT]:
  """Adds adapters to the config of a model, in place, and returns it.

      add_adapters(model, Config(Lora, layers=r'lm\\..*\\.attention\\.(query|value)', rank=16))

  The model keeps its own variables at their paths, next to the new variables of the adapters. Its outputs do not change
  until the adapters are trained. Building the model raises a ConfigError if an adapter matches no layer, or a layer
  that does not support it. Each adapter is split over the mesh in the same way as the weight of its layer.

  Args:
    model: the config.
    *adapters: configs such as `Config(Lora)`; each layer gets the first one that matches it.
  """
  return append_rules(model, 'adapters', adapters)


def remove_adapters(model: Config[ModelT]) -> Config[ModelT]:
  """Returns the config of the model for the result of `merge_adapters`: without adapters, and without quantization."""
  return model.clone(adapters=(), quantized=())


def adapter_paths(model: Layer) -> frozenset[Path]:
  """Returns the paths of the variables of adapters."""
  layers = (layer for layer in model.descendants() if isinstance(layer, AdaptedLayer))
  return frozenset(
    (*layer.path, *path) for layer in layers for paths in layer.adapted_weights.values() for path in paths
  )


def merge_adapters(model: BaseModel, variables: NestedDict) -> NestedDict:
  """Adds adapters to the weights; returns variables with which the model without adapters computes the same.

  The sum is computed in float32, and rounded to the dtype of the weight. Quantized weights become plain ones.

  Args:
    model: the built model, with adapters.
    variables: its variables in their true shapes; see `praxis_lite.unpad`.
  """
  return _merge(model, dequantize_variables(model, variables), sign=1)


def unmerge_adapters(model: BaseModel, merged: NestedDict, variables: NestedDict) -> NestedDict:
  """Returns the variables of a model with adapters, given the merged variables and the variables of the adapters.

  Args:
    model: the built model, with adapters.
    merged: the result of `merge_adapters`.
    variables: variables of the model; only the variables of adapters are used.

  Raises:
    ConfigError: a variable of an adapter is missing; or an adapter, such as `Dora`, cannot be subtracted again; or the
      model has quantized weights, which merging has replaced by plain ones.
  """
  if model.quantized:
    raise ConfigError(
      f'{model.path_name}.quantized: adapters cannot be taken out of weights in few bits; keep the variables '
      'before the merge'
    )
  for path in leaves(model.abstract_init()):
    if node_at(merged, path) is None and node_at(variables, path) is None:
      raise ConfigError(f'{path_name(path)} is neither among the merged variables nor among those of the adapters')
  adapters = select(variables, lambda path: node_at(merged, path) is None)
  base = _merge(model, merge(merged, adapters), sign=-1)
  return merge(base, adapters)


def combine_adapters(
  model: Config[ModelT], adapters: Mapping[str, tuple[Config[ModelT], NestedDict]]
) -> tuple[Config[ModelT], NestedDict]:
  """Puts several adapters on one base model; in decoding, each row uses one of them or none.

      config, own = combine_adapters(base, {'legal': read_adapter('legal', base), 'poems': (tuned, variables)})
      model.decode({..., 'adapters': np.array([0, 1, -1])})

  The adapters may differ in rank, scale and layers: smaller ranks are padded with zeros, and the matrices B are
  multiplied by the scales.

  Args:
    model: the config of the model without adapters.
    adapters: for each name, the config of the model with `Lora` adapters, and its variables in their true shapes; the
      variables of the adapters are enough.

  Returns:
    The config of the model with all adapters, and the variables of the adapters, to be merged with those of the base.

  Raises:
    ConfigError: `adapters` is empty; a config has no adapters, or adapters that are not `Lora`; an adapter is on
      experts, embedding tables, or the keys and values of latent attention; or its variables are missing or do not fit
      the model.
  """
  if not adapters:
    raise ConfigError('combine_adapters: there are no adapters; expected at least one')
  base = model.clone(adapters=()).instantiate()
  of_base = {layer.path[len(base.path) :] for layer in base.descendants()}
  absorbed = _absorbed_layers(base)
  found: dict[Path, dict[str, tuple[LoraLayer, NestedDict]]] = {}
  for name, (config, variables) in adapters.items():
    own = config.instantiate()
    adapted = [layer for layer in own.descendants() if isinstance(layer, AdaptedLayer)]
    if not adapted:
      raise ConfigError(
        f'combine_adapters: {name!r} has no adapters; expected the config of a model with some, as `add_adapters` '
        'returns it'
      )
    for layer in adapted:
      if type(layer) not in (LoraLinear, LoraProjection) or cast(LoraLayer, layer).lora.num_adapters is not None:
        raise ConfigError(
          f'combine_adapters: {name!r} has a {type(layer).__name__} at {layer.path_name}; expected adapters of Lora, '
          'one each, for linear layers and projections'
        )
      path = layer.path[len(own.path) :]
      if path not in of_base:
        raise ConfigError(f'combine_adapters: {name!r} has an adapter of {path_name(path)}, which the model lacks')
      if path in absorbed:
        raise ConfigError(
          f'combine_adapters: {name!r} has an adapter of {path_name(path)}, whose weight latent attention multiplies '
          'with queries and contexts, for all rows at once; merge this adapter, or train one without this layer'
        )
      found.setdefault(path, {})[name] = cast(LoraLayer, layer), node_at(variables, (*path, 'lora'))
  ranks = {path: max(layer.lora.rank for layer, _ in of.values()) for path, of in found.items()}
  rules = []
  for rank in sorted({*ranks.values()}):
    layers = tuple(re.escape(path_name(path)) for path in ranks if ranks[path] == rank)
    rules.append(Config(Lora, layers=layers, rank=rank, alpha=float(rank), names=tuple(adapters)))
  combined = add_adapters(model.clone(adapters=()), *rules)
  declared = leaves(combined.instantiate().abstract_init())
  arrays: dict[Path, np.ndarray] = {}
  for path, of_layer in found.items():
    a_path, b_path = (*path, 'lora', 'a'), (*path, 'lora', 'b')
    a, b = (np.zeros(declared[p].full_shape, np.float32) for p in (a_path, b_path))
    n = len(declared[a_path].repeat_prefix)
    a_KIR, b_KRO = np.moveaxis(a, n, 0), np.moveaxis(b, n, 0)  # Views; the index of an adapter comes first.
    for i, name in enumerate(adapters):
      if name in of_layer:
        layer, own_arrays = of_layer[name]
        rank = layer.lora.rank
        wanted = {'a': (*a_KIR.shape[1:-1], rank), 'b': (*b_KRO.shape[1 : n + 1], rank, *b_KRO.shape[n + 2 :])}
        _check_shapes(name, path_name(path), own_arrays, wanted)
        a_KIR[i][..., :rank] = own_arrays['a']
        np.moveaxis(b_KRO[i], n, 0)[:rank] = np.moveaxis(layer.update_scale * np.asarray(own_arrays['b']), n, 0)
    arrays |= {a_path: a, b_path: b}
  return combined, nest(arrays)


def _absorbed_layers(model: BaseModel) -> frozenset[Path]:
  """Returns the paths, below the model, of layers whose weights are multiplied into other products in decoding."""
  attentions = (layer for layer in model.descendants() if isinstance(layer, LatentAttention))
  return frozenset((*of.path[len(model.path) :], name) for of in attentions for name in ('key', 'value'))


def _check_shapes(adapter: str, layer: str, arrays: NestedDict | None, wanted: Mapping[str, tuple[int, ...]]) -> None:
  for name, shape in wanted.items():
    array = node_at(arrays or {}, (name,))
    if array is None or np.shape(array) != shape:
      has = 'is missing' if array is None else f'has shape {np.shape(array)}'
      raise ConfigError(f'combine_adapters: {adapter!r}: {layer}.lora.{name} {has}; this model needs {shape}')


def names_of_adapters(model: BaseModel) -> tuple[str, ...]:
  """Returns the names of a model's adapters if each row chooses one of them; otherwise ()."""
  rules = (model.adapters,) if isinstance(model.adapters, Config) else tuple(model.adapters)
  names = {tuple(rule.names) for rule in rules if target(rule) is Lora and rule.names is not None}
  if len(names) > 1:
    raise ConfigError(f'{model.path_name}.adapters: rules name different adapters: {sorted(names)}; expected the same')
  return next(iter(names), ())


def _merge(model: Layer, variables: NestedDict, sign: int) -> NestedDict:
  def merge_layer(layer: Layer, own: NestedDict) -> NestedDict:
    return layer.merge_variables(own, sign) if isinstance(layer, AdaptedLayer) else own

  return change_variables(model, variables, merge_layer)
