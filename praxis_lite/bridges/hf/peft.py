"""Reads and writes adapters in the format of the package peft: adapter_config.json and adapter_model.safetensors.

`adapter_config.py` handles the first file. For the second, `adapter_weights.py` says which adapter each tensor is of.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from praxis_lite.bridges.hf.adapter_config import (
  CONFIG_FILE,
  WRITE_MERGED,
  AdapterKind,
  adapters_of,
  kind_of_config,
  kind_of_network,
  make_config,
  read_adapter_config,
)
from praxis_lite.bridges.hf.adapter_weights import (
  PREFIX,
  AdaptableWeight,
  layer_at,
  modules_of,
  pieces_of,
  weights_below,
)
from praxis_lite.bridges.hf.families import describe_model
from praxis_lite.bridges.hf.files import Tensor, read_header, write_safetensors
from praxis_lite.bridges.hf.fused_adapters import split_experts
from praxis_lite.bridges.hf.tensors import Piece
from praxis_lite.bridges.hf.writer import tensors_to_write
from praxis_lite.checkpoints.streamed import StreamedArray, whole_box
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError, prefix_errors
from praxis_lite.common.trees import NestedDict, Path, leaves, merge, nest, node_at, path_name
from praxis_lite.layers.dora import LEAST_NORM
from praxis_lite.layers.lora import AdaptedLayer
from praxis_lite.models import BaseModel, add_adapters, dequantize_variables, remove_adapters
from praxis_lite.models.adapters import ADAPTER_VARIABLES

# For each weight, the names of the modules that have it, one for each layer and expert.
Modules = Mapping[AdaptableWeight, Sequence[str]]
Stored = Mapping[str, Tensor]
TENSORS_FILE = 'adapter_model.safetensors'


class ImportedAdapter(NamedTuple):
  """The config of a model with adapters, and the adapters' part of the tree of its variables."""

  model: Config
  variables: NestedDict


def write_adapter(
  folder: str | os.PathLike[str],
  model: BaseModel,
  variables: NestedDict,
  *,
  base: str | None = None,
  dtype: str | None = None,
) -> list[str]:
  """Writes the adapters of a model as a folder that peft loads; returns the names of the files.

      PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)

  Args:
    folder: the target, which is created if it does not exist; files in it with the same names are replaced.
    model: the built model, which has adapters, and belongs to a family of transformers.
    variables: the model's variables in their true shapes, or only the adapters' variables; for DoRA, also the weights
      that the adapters change.
    base: name or path of the checkpoint without adapters, for adapter_config.json; None if unknown.
    dtype: dtype to write, such as 'bfloat16'; None keeps the dtypes of the variables.

  Raises:
    ConfigError: the model belongs to no family, or has no adapters; or peft cannot express the adapters. It cannot if
      they are of several kinds, if the family stores their weights in a tensor that peft cannot adapt, or if it joins
      several weights that have adapters in one tensor, for example queries, keys and values.
  """
  family, values = describe_model(model)
  network = family.network_in(model)
  assert network is not None
  weights = list(weights_below(network, family, model))
  adapted = [w for w in weights if isinstance(layer_at(network, w.layer), AdaptedLayer)]
  if not adapted:
    raise ConfigError(
      'task.model.adapters: this model has no adapters to write; leave out --adapter, or in Python use '
      'write_model, to write its weights'
    )
  declared = family.part_of(model.abstract_init())
  kind = kind_of_network(network)
  found = pieces_of(adapted, declared)
  _check_all_are_written(found, declared)
  _check_not_shared(found)
  own = family.part_of(variables)
  if 'magnitude' in kind.parts:
    own = merge(own, nest({w.path_of('magnitude'): _their_lengths(w, own, declared) for w in adapted}))
  FilePath(folder).mkdir(parents=True, exist_ok=True)
  tensors, data = tensors_to_write(own, found, dtype)
  write_safetensors(os.path.join(folder, TENSORS_FILE), list(tensors), tensors, data)
  is_gpt2 = values.get('model_type') == 'gpt2'
  content = make_config(kind, model, adapted, weights, network, declared, base=base, fan_in_fan_out=is_gpt2)
  FilePath(folder, CONFIG_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + '\n', encoding='utf-8')
  return [CONFIG_FILE, TENSORS_FILE]


def read_adapter(
  folder: str | os.PathLike[str], model: Config[BaseModel], variables: NestedDict | None = None
) -> ImportedAdapter:
  """Reads adapters of LoRA, DoRA or IA3 that peft has written.

  Args:
    folder: a folder with adapter_config.json and adapter_model.safetensors.
    model: the config of the model that they belong to, such as an imported one, without adapters.
    variables: needed only for DoRA: the model's variables in their true shapes. peft stores the norms of the changed
      weights, but our variable is relative to the norms of the original weights.

  Raises:
    ConfigError: the adapters are of another kind, have settings that ours lack, or need `variables`.
    CheckpointError: files are missing or damaged, or their tensors do not fit the model.
  """
  config = read_adapter_config(folder)
  file = os.path.join(folder, TENSORS_FILE)
  if not os.path.isfile(file):
    raise CheckpointError(f'{folder} has no {TENSORS_FILE}; save the adapter with peft as safetensors')
  in_file = {name.replace('.default.', '.'): tensor for name, tensor in read_header(file).items()}
  base, kind = remove_adapters(model).instantiate(), kind_of_config(config)
  family, _ = describe_model(base)
  network = family.network_in(base)
  assert network is not None
  declared = family.part_of(base.abstract_init())
  modules = {weight: modules_of(weight, declared) for weight in weights_below(network, family, base)}
  stored = split_experts(in_file, modules, declared) if config.get('target_parameters') else dict(in_file)
  shapes = _shapes_in_file(kind, modules, stored)
  if not shapes:
    raise CheckpointError(f'{file} has no adapter of a layer of this model')
  names = {weight: path_name((*network.path, *weight.layer)[len(base.path) :]) for weight in shapes}
  with prefix_errors(str(folder)):
    with_adapters = add_adapters(remove_adapters(model), *adapters_of(kind, shapes, names, modules, config))
  layers = {weight.layer for weight in shapes}  # An expert layer adapts all of its weights, or none.
  built = with_adapters.instantiate()
  adapted = [w for w in weights_below(family.network_in(built) or built, family, built) if w.layer in layers]
  declared_there = family.part_of(built.abstract_init())
  found = pieces_of(adapted, declared_there)
  known = {piece.name for of in found.values() for piece in of}
  left = sorted(stored.keys() - known - _copies_of_tables(modules, declared, stored))
  if left:
    raise CheckpointError(f'{file} has tensors that belong to no layer of this model: {", ".join(left[:3])}')
  # Values that change nothing, for the layers of a stack that have no adapter in the file.
  unchanged: dict[Path, ArrayLike] = {w.path_of('scale'): 1.0 for w in adapted}
  if 'magnitude' in kind.parts:
    if variables is None:
      raise ConfigError(
        f'{folder}: DoRA stores the lengths of weights, so reading it takes the weights: read_adapter(.., variables)'
      )
    plain = model.instantiate()
    own = family.part_of(dequantize_variables(plain, variables) if plain.quantized else variables)
    unchanged |= {w.path_of('magnitude'): _lengths(w, own, declared) for w in adapted}
  read = {}
  for path, of_variable in found.items():
    read[path] = _read(of_variable, stored, node_at(declared_there, path).full_shape, unchanged.get(path, 0.0))
  for path in (w.path_of('magnitude') for w in adapted if 'magnitude' in kind.parts):
    read[path] = read[path] / np.maximum(unchanged[path], LEAST_NORM) - 1
  return ImportedAdapter(with_adapters, family.model_variables(nest(read)))


def _shapes_in_file(kind: AdapterKind, modules: Modules, stored: Stored) -> dict[AdaptableWeight, tuple[int, ...]]:
  """Returns, for each weight with an adapter in the file, the shape of the adapter's first part.

  Raises:
    CheckpointError: an adapter lacks a part, or layers of a stack have different shapes.
  """
  found: dict[AdaptableWeight, tuple[int, ...]] = {}
  for weight, of_weight in modules.items():
    shapes: dict[str, tuple[int, ...]] = {}
    for module in of_weight:
      names = [f'{PREFIX}{module}.{weight.ending(part)}' for part in kind.parts]
      there, missing = ([name for name in names if (name in stored) == is_there] for is_there in (True, False))
      if there and missing:
        raise CheckpointError(
          f'{stored[there[0]].file} has {there[0]}, but not {missing[0]}; an adapter needs '
          f'{"both" if len(names) == 2 else "all three"}'
        )
      if there:
        shapes[names[0]] = stored[names[0]].shape
    if len({*shapes.values()}) > 1 or any(len(shape) != 2 or not shape[0] for shape in shapes.values()):
      raise CheckpointError(
        f'{next(iter(shapes))} and the same factors of other layers have shapes {sorted({*shapes.values()})}; in a '
        'stack of layers, all have one rank, and belong to inputs or to outputs'
      )
    if shapes:
      found[weight] = next(iter(shapes.values()))
  return found


def _lengths(weight: AdaptableWeight, variables: NestedDict, declared: NestedDict) -> np.ndarray:
  """Returns the norm of the weights of each output, taken over all inputs: float32 [*stack, *O]."""
  path = weight.weight_path
  if (w := node_at(variables, path)) is None:
    raise ConfigError(
      f'{path_name(path)}: peft stores the lengths of the weights that DoRA changes; pass variables with these, '
      'not only those of the adapters'
    )
  stack = tuple(node_at(declared, path).repeat_prefix)
  lengths = []
  for at in np.ndindex(*stack):
    box = (*(slice(i, i + 1) for i in at), *whole_box(w.shape)[len(stack) :])
    part = w.read(box) if isinstance(w, StreamedArray) else np.asarray(w[box])
    inputs_first = part.astype(np.float32).reshape(-1, *part.shape[len(stack) + weight.rank_in :])
    lengths.append(np.linalg.norm(inputs_first, axis=0))
  return np.reshape(lengths, (*stack, *np.shape(lengths)[1:]))


def _their_lengths(weight: AdaptableWeight, variables: NestedDict, declared: NestedDict) -> np.ndarray:
  """Returns the magnitude vector that peft stores: (1 + m) |W|, where m is our variable `magnitude`."""
  magnitude = node_at(variables, weight.path_of('magnitude'))
  m = magnitude.read(whole_box(magnitude.shape)) if isinstance(magnitude, StreamedArray) else np.asarray(magnitude)
  return ((1 + m.astype(np.float32)) * _lengths(weight, variables, declared)).astype(np.float32)


def _check_all_are_written(found: Mapping[Path, Sequence[Piece]], declared: NestedDict) -> None:
  for path in leaves(declared).keys() - found.keys():
    if re.fullmatch(ADAPTER_VARIABLES, path_name(path)):
      raise ConfigError(
        f'{path_name(path)}: this family stores the weight of this adapter in a tensor that peft cannot adapt; '
        f'{WRITE_MERGED}'
      )


def _check_not_shared(found: Mapping[Path, Sequence[Piece]]) -> None:
  owner: dict[str, Path] = {}
  for path, of_variable in found.items():
    for piece in of_variable:
      other = owner.setdefault(piece.name, path)
      if other != path:
        raise ConfigError(
          f'{path_name(path)} and {path_name(other)} are one tensor in this family, {piece.name}, and have adapters of '
          f'their own, which peft cannot express; {WRITE_MERGED}'
        )


def _copies_of_tables(modules: Modules, declared: NestedDict, stored: Stored) -> set[str]:
  """Returns the names of the copies that peft stores of embedding tables which have adapters; checks their shapes."""
  found = set()
  for weight, names in modules.items():
    shape = tuple(node_at(declared, weight.weight_path).full_shape)
    for module in names if weight.is_table else ():
      name = f'{PREFIX}{module}.base_layer.weight'
      if name in stored and stored[name].shape != shape:
        raise CheckpointError(
          f'{stored[name].file}: {name} has shape {list(stored[name].shape)}, and the table of this model '
          f'{list(shape)}; an adapter of a resized vocabulary needs a model of that size'
        )
      found.add(name)
  return found


def _read(of_variable: Sequence[Piece], stored: Stored, shape: tuple[int, ...], otherwise: ArrayLike) -> np.ndarray:
  """Returns a variable in float32, with the value `otherwise` for layers of a stack that have no adapter."""
  value = np.array(np.broadcast_to(np.asarray(otherwise, np.float32), shape))
  for piece in of_variable:
    tensor = stored.get(piece.name)
    if tensor is None:
      continue
    if tensor.shape != piece.view.their_shape:
      raise CheckpointError(
        f'{tensor.file}: {tensor.name} has shape {list(tensor.shape)}; of this model, {list(piece.view.their_shape)}'
      )
    inside = tuple(slice(0, size) for size in piece.view.shape)
    value[piece.at] = piece.view.read(tensor, inside)
  return value
