"""Reads and writes adapters in the format of the package peft: adapter_config.json and adapter_model.safetensors.

`adapter_weights.py` says in which tensors they are.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

import numpy as np

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
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, nest, node_at, path_name
from praxis_lite.layers import Lora
from praxis_lite.layers.base import Layer
from praxis_lite.layers.dora import DoraLayer
from praxis_lite.layers.ia3 import Ia3Layer
from praxis_lite.layers.lora import AdaptedLayer, LoraLayer
from praxis_lite.models import BaseModel, LanguageModel, add_adapters, remove_adapters
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
    variables: its variables in their true shapes, or only those of the adapters.
    base: name or path of the checkpoint without adapters, for adapter_config.json.
    dtype: dtype to write, such as 'bfloat16'; None keeps that of the variables.

  Raises:
    ConfigError: the model belongs to no family, or has no adapters; or peft cannot express them, because several
      weights, such as those of queries, keys and values, are one in the family.
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
  _check_is_lora(network)
  found = pieces_of(adapted, declared)
  _check_all_are_written(found, declared)
  _check_not_shared(found)
  FilePath(folder).mkdir(parents=True, exist_ok=True)
  tensors, data = tensors_to_write(family.part_of(variables), found, dtype)
  write_safetensors(os.path.join(folder, TENSORS_FILE), list(tensors), tensors, data)
  content = _adapter_config(model, adapted, weights, network, declared, values, base)
  FilePath(folder, CONFIG_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + '\n', encoding='utf-8')
  return [CONFIG_FILE, TENSORS_FILE]


def read_adapter(folder: str | os.PathLike[str], model: Config[BaseModel]) -> ImportedAdapter:
  """Reads adapters that peft has written.

  Args:
    folder: a folder with adapter_config.json and adapter_model.safetensors.
    model: the config of the model that they belong to, such as an imported one, without adapters.

  Raises:
    ConfigError: the adapters are of another kind than LoRA, or have settings that `Lora` does not have.
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
  ranks = {}
  for weight in weights:
    if (rank := _stored_rank(weight, modules[weight], stored)) is not None:
      ranks[weight] = rank
  adapters = [*_to_adapters(ranks, modules, network, base, config, str(folder))]
  with_adapters = add_adapters(remove_adapters(model), *adapters)
  built = with_adapters.instantiate()
  adapted = {weight.layer for weight in ranks}  # Of experts, also weights without an adapter in the file.
  found = pieces_of([w for w in weights if w.layer in adapted], family.part_of(built.abstract_init()))
  known = {piece.name for of in found.values() for piece in of}
  left = sorted(stored.keys() - known - _copies_of_tables(modules, declared, stored))
  if left:
    raise CheckpointError(f'{file} has tensors that belong to no layer of this model: {", ".join(left[:3])}')
  shapes = family.part_of(built.abstract_init())
  read = {path: _read(of, stored, node_at(shapes, path).full_shape) for path, of in found.items()}
  return ImportedAdapter(with_adapters, family.model_variables(nest(read)))


def _check_is_lora(network: Layer) -> None:
  for layer in network.descendants():
    if isinstance(layer, DoraLayer | Ia3Layer):
      raise ConfigError(
        f'{layer.path_name}: adapters of DoRA and IA3 are not written for peft; write merged weights: '
        'write_model(folder, model, variables)'
      )


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
  model: BaseModel,
  adapted: Sequence[AdaptableWeight],
  weights: Sequence[AdaptableWeight],
  network: Layer,
  declared: NestedDict,
  values: Mapping[str, object],
  base: str | None,
) -> dict[str, object]:
  ranks, alphas = dict[str, int](), dict[str, float]()
  for weight in adapted:
    layer = layer_at(network, weight.layer)
    assert isinstance(layer, AdaptedLayer)
    scale, rank = layer.update_scale, node_at(declared, weight.path_of('a')).shape[-1]
    for module in modules_of(weight, declared):
      ranks[module], alphas[module] = rank, scale * rank
  most: int = max(ranks.values(), key=[*ranks.values()].count)
  alpha = max((alphas[m] for m in ranks if ranks[m] == most), key=[*alphas.values()].count)
  others = {m for w in weights for m in modules_of(w, declared)} - ranks.keys()
  endings = {module.rpartition('.')[2] for module in ranks}
  has_all = not any(module.rpartition('.')[2] in endings for module in others)
  linear = (layer_at(network, w.layer) for w in adapted if not w.is_table)
  dropout = next((layer.lora.dropout_tpl.rate for layer in linear if isinstance(layer, LoraLayer)), 0.0)
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM' if isinstance(model, LanguageModel) else None,
    'base_model_name_or_path': base,
    'inference_mode': True,
    'r': most,
    'lora_alpha': alpha,
    'lora_dropout': dropout,
    'target_modules': sorted(endings if has_all else ranks),
    'rank_pattern': {module: rank for module, rank in ranks.items() if rank != most},
    'alpha_pattern': {m: a for m, a in alphas.items() if not math.isclose(a, alpha)},
    'fan_in_fan_out': values.get('model_type') == 'gpt2',
    'bias': 'none',
    'use_rslora': False,
    'use_dora': False,
    'modules_to_save': None,
  }


# ---------------------------------------------------------------- reading


def _read_config(folder: str | os.PathLike[str]) -> dict[str, object]:
  path = os.path.join(folder, CONFIG_FILE)
  if not os.path.isfile(path):
    raise CheckpointError(f'{path} is no file; an adapter is a folder with this file')
  config = read_json(path)
  wanted = {
    'peft_type': ('LORA',),
    'bias': ('none',),
    'lora_bias': (False,),
    'use_dora': (False,),
    'modules_to_save': (None, []),
    'layer_replication': (None, []),
    'trainable_token_indices': (None, [], {}),
    'alora_invocation_tokens': (None, []),
  }
  for field, allowed in wanted.items():
    if config.get(field, allowed[0]) not in allowed:
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
  for field in ('r', 'lora_alpha'):
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


def _stored_rank(weight: AdaptableWeight, modules: Sequence[str], stored: Stored) -> int | None:
  """Returns the rank of a weight's adapter; None if it has none."""
  names, others = ([f'{PREFIX}{module}.{weight.ending(part)}' for module in modules] for part in 'ab')
  for a, b in zip(names, others):
    if (a in stored) != (b in stored):
      there, missing = (a, b) if a in stored else (b, a)
      raise CheckpointError(f'{stored[there].file} has {there}, but not {missing}; an adapter needs both')
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
      Lora,
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


def _read(of_variable: Sequence[Piece], stored: Stored, shape: tuple[int, ...]) -> np.ndarray:
  """Returns a variable, float32; zeros where a layer of a stack has no adapter."""
  value = np.zeros(shape, np.float32)
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
