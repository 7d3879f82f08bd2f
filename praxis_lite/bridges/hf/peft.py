"""Reads and writes adapters in the format of the package peft: adapter_config.json and adapter_model.safetensors.

`adapter_weights.py` says in which tensors they are.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from praxis_lite.bridges.hf.adapter_weights import (
  PREFIX,
  AdaptableWeight,
  layer_at,
  modules_of,
  pieces_of,
  weights_below,
)
from praxis_lite.bridges.hf.families import describe_model
from praxis_lite.bridges.hf.files import StoredTensor, read_header, write_safetensors
from praxis_lite.bridges.hf.fused_adapters import PartOfTensor, are_of_experts, split_experts
from praxis_lite.bridges.hf.hf_config import read_json
from praxis_lite.bridges.hf.tensors import Piece
from praxis_lite.bridges.hf.writer import tensors_to_write
from praxis_lite.checkpoints.streamed import StreamedArray, whole_box
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, merge, nest, node_at, path_name
from praxis_lite.layers import Dora, Ia3, Lora
from praxis_lite.layers.base import Layer
from praxis_lite.layers.dora import LEAST_NORM, DoraLayer
from praxis_lite.layers.ia3 import Ia3Layer
from praxis_lite.layers.lora import AdaptedLayer, Adapter, LoraLayer
from praxis_lite.models import BaseModel, LanguageModel, add_adapters, dequantize_variables, remove_adapters
from praxis_lite.models.adapters import ADAPTER_VARIABLES

# Beginnings of `init_lora_weights` with which peft subtracts the first update from the base.
_OF_ANOTHER_BASE = ('pissa', 'olora', 'corda', 'loftq')
# The names of the modules with each weight, one for each layer and expert.
Modules = Mapping[AdaptableWeight, Sequence[str]]
Stored = Mapping[str, StoredTensor | PartOfTensor]
CONFIG_FILE, TENSORS_FILE = 'adapter_config.json', 'adapter_model.safetensors'


class ImportedAdapter(NamedTuple):
  """The config of a model with adapters, and the variables of the adapters, a part of the tree of its variables."""

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
    variables: its variables in their true shapes, or only those of the adapters; for DoRA, also the weights that these
      change.
    base: name or path of the checkpoint without adapters, for adapter_config.json.
    dtype: dtype to write, such as 'bfloat16'; None keeps that of the variables.

  Raises:
    ConfigError: the model belongs to no family, or has no adapters; or peft cannot express them, because several
      weights, such as those of queries, keys and values, are one in the family, or adapters are of several kinds.
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
  kind = _kind_of(network)
  found = pieces_of(adapted, declared)
  _check_all_are_written(found, declared)
  _check_not_shared(found)
  own = family.part_of(variables)
  if kind is Dora:
    own = merge(own, nest({w.path_of('magnitude'): _their_lengths(w, own, declared) for w in adapted}))
  FilePath(folder).mkdir(parents=True, exist_ok=True)
  tensors, data = tensors_to_write(own, found, dtype)
  write_safetensors(os.path.join(folder, TENSORS_FILE), list(tensors), tensors, data)
  content = _adapter_config(kind, model, adapted, weights, network, declared, values, base)
  FilePath(folder, CONFIG_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + '\n', encoding='utf-8')
  return [CONFIG_FILE, TENSORS_FILE]


def read_adapter(
  folder: str | os.PathLike[str], model: Config[BaseModel], variables: NestedDict | None = None
) -> ImportedAdapter:
  """Reads adapters that peft has written: of LoRA, DoRA or IA3.

  Args:
    folder: a folder with adapter_config.json and adapter_model.safetensors.
    model: the config of the model that they belong to, such as an imported one, without adapters.
    variables: for DoRA, the variables of this model in their true shapes: peft stores lengths of changed weights, and
      ours are relative to the lengths before.

  Raises:
    ConfigError: the adapters are of another kind, have settings that ours do not have, or need `variables`.
    CheckpointError: files are missing or damaged, or their tensors do not fit the model.
  """
  config = _read_config(folder)
  file = os.path.join(folder, TENSORS_FILE)
  if not os.path.isfile(file):
    raise CheckpointError(f'{folder} has no {TENSORS_FILE}; save the adapter with peft as safetensors')
  in_file = {name.replace('.default.', '.'): tensor for name, tensor in read_header(file).items()}
  base = remove_adapters(model).instantiate()
  family, _ = describe_model(base)
  network = family.network_in(base)
  assert network is not None
  weights = list(weights_below(network, family, base))
  declared = family.part_of(base.abstract_init())
  modules = {weight: modules_of(weight, declared) for weight in weights}
  stored = split_experts(in_file, modules, declared) if config.get('target_parameters') else dict(in_file)
  kind = _kind_of_config(config)
  if kind is Ia3:
    adapted, adapters = _factors_in_file(modules, network, base, stored, str(folder))
  else:
    parts = ('a', 'b', 'magnitude') if kind is Dora else ('a', 'b')
    ranks = {w: rank for w in weights if (rank := _stored_rank(w, modules[w], stored, parts)) is not None}
    of_layers = {weight.layer for weight in ranks}  # Of experts, also weights without an adapter in the file.
    adapted = [w for w in weights if w.layer in of_layers]
    adapters = [*_to_adapters(ranks, modules, network, base, config, str(folder))]
  with_adapters = add_adapters(remove_adapters(model), *adapters)
  shapes = family.part_of(with_adapters.instantiate().abstract_init())
  found = pieces_of(adapted, shapes)
  known = {piece.name for of in found.values() for piece in of}
  left = sorted(stored.keys() - known - _copies_of_tables(modules, declared, stored))
  if left:
    raise CheckpointError(f'{file} has tensors that belong to no layer of this model: {", ".join(left[:3])}')
  # What layers of a stack that have no adapter in the file get: something that changes nothing.
  unchanged: dict[Path, ArrayLike] = {w.path_of('scale'): 1.0 for w in adapted}
  if kind is Dora:
    if variables is None:
      raise ConfigError(
        f'{folder}: DoRA stores the lengths of weights, so reading it takes the weights: read_adapter(.., variables)'
      )
    plain = model.instantiate()
    own = family.part_of(dequantize_variables(plain, variables) if plain.quantized else variables)
    unchanged |= {w.path_of('magnitude'): _lengths(w, own, declared) for w in adapted}
  read = {}
  for path, of_variable in found.items():
    read[path] = _read(of_variable, stored, node_at(shapes, path).full_shape, unchanged.get(path, 0.0))
  for path in (w.path_of('magnitude') for w in adapted if kind is Dora):
    read[path] = read[path] / np.maximum(unchanged[path], LEAST_NORM) - 1
  return ImportedAdapter(with_adapters, family.model_variables(nest(read)))


def kind_in_folder(folder: str | os.PathLike[str]) -> type[Adapter]:
  """Returns the kind of the adapters of a folder that peft has written: `Lora`, `Dora` or `Ia3`."""
  return _kind_of_config(_read_config(folder))


def _kind_of_config(config: Mapping[str, object]) -> type[Adapter]:
  return Ia3 if config['peft_type'] == 'IA3' else Dora if config.get('use_dora') else Lora


def _kind_of(network: Layer) -> type[Adapter]:
  """Returns the kind of all adapters of a network."""
  kinds: dict[type[Adapter], str] = {}
  for layer in network.descendants():
    if isinstance(layer, AdaptedLayer):
      kind = Ia3 if isinstance(layer, Ia3Layer) else Dora if isinstance(layer, DoraLayer) else Lora
      kinds.setdefault(kind, layer.path_name)
  if len(kinds) > 1:
    (first, one), (second, other), *_ = kinds.items()
    raise ConfigError(
      f'{one} has an adapter of {first.__name__}, and {other} one of {second.__name__}; a folder of peft has one kind; '
      'write merged weights: write_model(folder, model, variables)'
    )
  return next(iter(kinds))


# ---------------------------------------------------------------- DoRA and IA3


def _lengths(weight: AdaptableWeight, variables: NestedDict, declared: NestedDict) -> np.ndarray:
  """Returns |W|, the norm over the inputs of each output, [*stack, *O] float32.

  Args:
    weight: W.
    variables: those of the network; W may be an array that is read in parts.
    declared: their declarations.
  """
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
  """Returns (1 + m) |W|, which peft stores."""
  magnitude = node_at(variables, weight.path_of('magnitude'))
  m = magnitude.read(whole_box(magnitude.shape)) if isinstance(magnitude, StreamedArray) else np.asarray(magnitude)
  return ((1 + m.astype(np.float32)) * _lengths(weight, variables, declared)).astype(np.float32)


def _factors_in_file(
  modules: Modules, network: Layer, model: BaseModel, stored: Stored, file: str
) -> tuple[list[AdaptableWeight], list[Config]]:
  """Returns the weights with factors of IA3, and the configs of these; shapes say which belong to inputs."""
  adapted, of_inputs = [], dict[str, bool]()
  for weight, of_weight in modules.items():
    names = [f'{PREFIX}{module}.{weight.ending("scale")}' for module in of_weight]
    shapes = {stored[name].shape for name in names if name in stored}
    if not shapes:
      continue
    if weight.name or weight.is_table:
      raise ConfigError(f'{file}: {names[0]}: IA3 of experts and of tables of embeddings is not supported')
    if len(shapes) > 1:
      raise CheckpointError(f'{file}: {names[0]} and the same factors of other layers have shapes {sorted(shapes)}')
    (shape,) = shapes
    scales_inputs = len(shape) == 2 and shape[0] == 1
    adapted.append(weight._replace(scales_inputs=scales_inputs))
    of_inputs[path_name((*network.path, *weight.layer)[len(model.path) :])] = scales_inputs
  if not adapted:
    raise CheckpointError(f'{file} has no factors of a layer of this model')
  escaped = {scaled: tuple(re.escape(n) for n, of in of_inputs.items() if of == scaled) for scaled in (False, True)}
  return adapted, [Config(Ia3, layers=(*escaped[False], *escaped[True]), of_inputs=escaped[True])]


def _check_all_are_written(found: Mapping[Path, Sequence[Piece]], declared: NestedDict) -> None:
  for path in leaves(declared).keys() - found.keys():
    if re.fullmatch(ADAPTER_VARIABLES, path_name(path)):
      raise ConfigError(
        f'{path_name(path)}: this family stores the weight of this adapter in a tensor that peft cannot adapt; write '
        'merged weights: write_model(folder, model, variables)'
      )


def _check_not_shared(found: Mapping[Path, Sequence[Piece]]) -> None:
  owner: dict[str, Path] = {}
  for path, of_variable in found.items():
    for piece in of_variable:
      other = owner.setdefault(piece.name, path)
      if other != path:
        raise ConfigError(
          f'{path_name(path)} and {path_name(other)} are one tensor in this family, {piece.name}, and have adapters of '
          'their own, which peft cannot express; write merged weights: write_model(folder, model, variables)'
        )


# ---------------------------------------------------------------- writing


def _adapter_config(
  kind: type[Adapter],
  model: BaseModel,
  adapted: Sequence[AdaptableWeight],
  weights: Sequence[AdaptableWeight],
  network: Layer,
  declared: NestedDict,
  values: Mapping[str, object],
  base: str | None,
) -> dict[str, object]:
  modules = {module: weight for weight in adapted for module in modules_of(weight, declared)}
  others = {m for w in weights for m in modules_of(w, declared)} - modules.keys()
  of_inputs = {module for module, weight in modules.items() if weight.scales_inputs}
  of_outputs = modules.keys() - of_inputs
  are_last_names_enough = not _last_names(modules) & _last_names(others) and not _last_names(of_inputs) & _last_names(
    of_outputs
  )

  def name_modules(chosen: Iterable[str]) -> list[str]:
    return sorted(_last_names(chosen) if are_last_names_enough else chosen)

  content = {
    'task_type': 'CAUSAL_LM' if isinstance(model, LanguageModel) else None,
    'base_model_name_or_path': base,
    'inference_mode': True,
    'target_modules': name_modules(modules),
    'fan_in_fan_out': values.get('model_type') == 'gpt2',
    'modules_to_save': None,
  }
  if kind is Ia3:
    return {**content, 'peft_type': 'IA3', 'feedforward_modules': name_modules(of_inputs)}
  ranks, alphas = dict[str, int](), dict[str, float]()
  for module, weight in modules.items():
    layer = layer_at(network, weight.layer)
    assert isinstance(layer, AdaptedLayer)
    ranks[module] = node_at(declared, weight.path_of('a')).shape[-1]
    alphas[module] = layer.update_scale * ranks[module]
  most: int = max(ranks.values(), key=[*ranks.values()].count)
  alpha = max((alphas[m] for m in ranks if ranks[m] == most), key=[*alphas.values()].count)
  linear = (layer_at(network, w.layer) for w in adapted if not w.is_table)
  dropout = next((layer.lora.dropout_tpl.rate for layer in linear if isinstance(layer, LoraLayer)), 0.0)
  return {
    **content,
    'peft_type': 'LORA',
    'r': most,
    'lora_alpha': alpha,
    'lora_dropout': dropout,
    'rank_pattern': {module: rank for module, rank in ranks.items() if rank != most},
    'alpha_pattern': {m: a for m, a in alphas.items() if not math.isclose(a, alpha)},
    'bias': 'none',
    'use_rslora': False,
    'use_dora': kind is Dora,
  }


def _last_names(modules: Iterable[str]) -> set[str]:
  return {module.rpartition('.')[2] for module in modules}


# ---------------------------------------------------------------- reading


def _read_config(folder: str | os.PathLike[str]) -> dict[str, object]:
  path = os.path.join(folder, CONFIG_FILE)
  if not os.path.isfile(path):
    raise CheckpointError(f'{path} is no file; an adapter is a folder with this file')
  config = read_json(path)
  wanted: dict[str, tuple[object, ...]] = {
    'peft_type': ('LORA', 'IA3'),
    'bias': ('none',),
    'lora_bias': (False,),
    'modules_to_save': (None, []),
    'layer_replication': (None, []),
    'trainable_token_indices': (None, [], {}),
    'alora_invocation_tokens': (None, []),
  }
  for field, allowed in wanted.items():
    if config.setdefault(field, allowed[0]) not in allowed:
      raise ConfigError(f'{path}: {field} = {config[field]!r} is not supported; only {allowed[0]!r} is')
  if not are_of_experts(parameters := config.get('target_parameters') or []):
    raise ConfigError(
      f'{path}: target_parameters = {parameters!r} is not supported; only those of experts are: experts.gate_up_proj '
      'and experts.down_proj'
    )
  if parameters and config.get('alpha_pattern'):
    raise ConfigError(f'{path}: alpha_pattern is not supported together with target_parameters')
  if str(start := config.get('init_lora_weights', True)).startswith(_OF_ANOTHER_BASE):
    raise ConfigError(
      f'{path}: init_lora_weights = {start!r} changes the weights of the base, so the adapter does not fit the model '
      'itself; save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA'
    )
  for field in ('r', 'lora_alpha') if config['peft_type'] == 'LORA' else ():
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
      raise ConfigError(f'{path}: {field} must be a number above 0, got {value!r}')
  return config


def _copies_of_tables(modules: Modules, declared: NestedDict, stored: Stored) -> set[str]:
  """Returns the names of stored tables of embeddings: peft writes the base's table beside an adapter of it."""
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


def _stored_rank(weight: AdaptableWeight, modules: Sequence[str], stored: Stored, parts: Sequence[str]) -> int | None:
  """Returns the rank of a weight's adapter; None if it has none. `parts` are the variables that it must have."""
  names = [f'{PREFIX}{module}.{weight.ending("a")}' for module in modules]
  for module in modules:
    of_module = [f'{PREFIX}{module}.{weight.ending(part)}' for part in parts]
    there, missing = ([name for name in of_module if (name in stored) == is_there] for is_there in (True, False))
    if there and missing:
      raise CheckpointError(
        f'{stored[there[0]].file} has {there[0]}, but not {missing[0]}; an adapter needs '
        f'{"both" if len(parts) == 2 else "all three"}'
      )
  shapes = {name: stored[name].shape for name in names if name in stored}
  ranks = {shape[0] if len(shape) == 2 else 0 for shape in shapes.values()}
  if len(ranks) > 1 or 0 in ranks:
    raise CheckpointError(
      f'{next(iter(shapes))} and the same adapter of other layers have shapes {sorted({*shapes.values()})}; in a stack '
      'of layers, all have one rank'
    )
  return next(iter(ranks), None)


def _to_adapters(
  ranks: Mapping[AdaptableWeight, int],
  modules: Modules,
  network: Layer,
  model: BaseModel,
  config: Mapping[str, object],
  folder: str,
) -> Iterator[Config]:
  """Yields the configs of adapters of these ranks: one for all layers of the same rank and scale."""
  if not ranks:
    raise CheckpointError(f'{folder}: {TENSORS_FILE} has no adapter of a layer of this model')
  rate = config.get('lora_dropout', 0.0)
  groups: dict[tuple[int, float, object], dict[str, None]] = {}
  for weight, rank in ranks.items():
    dropout = 0.0 if weight.name else rate  # Experts have no dropout.
    name = path_name((*network.path, *weight.layer)[len(model.path) :])
    group = rank, _alpha(weight, modules[weight], config), dropout
    for other, names in groups.items():
      if other != group and name in names:
        raise ConfigError(
          f'{folder}: the weights of {name} have adapters of different ranks or alphas; experts have one'
        )
    groups.setdefault(group, {})[name] = None
  for (rank, alpha, dropout), names in groups.items():
    yield Config(
      Dora if config.get('use_dora') else Lora,
      layers=tuple(map(re.escape, names)),
      rank=rank,
      alpha=alpha,
      rank_stabilized=bool(config.get('use_rslora', False)),
      dropout_rate=dropout,
    )


def _alpha(weight: AdaptableWeight, modules: Sequence[str], config: Mapping[str, object]) -> float:
  """Returns alpha of a weight; `alpha_pattern` may give some modules one of their own."""
  alphas = {module: _alpha_of_module(module, config) for module in modules}
  if len({*alphas.values()}) > 1:
    raise ConfigError(
      f'alpha_pattern gives different values to the layers of {weight.module}: {sorted({*alphas.values()})}; in a '
      'stack of layers, all have one alpha'
    )
  return next(iter(alphas.values()))


def _alpha_of_module(module: str, config: Mapping[str, object]) -> float:
  patterns = config.get('alpha_pattern') or {}
  for pattern, alpha in patterns.items() if isinstance(patterns, dict) else ():
    if re.fullmatch(rf'(.*\.)?({pattern})', module):
      return float(alpha)
  return float(str(config['lora_alpha']))


def _read(of_variable: Sequence[Piece], stored: Stored, shape: tuple[int, ...], otherwise: ArrayLike) -> np.ndarray:
  """Returns a variable, float32; `otherwise` where a layer of a stack has no adapter."""
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
