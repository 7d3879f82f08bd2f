"""The file adapter_config.json of the package peft: the kind of adapters, their settings, and their layers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from praxis_lite.bridges.hf.adapter_weights import AdaptableWeight, layer_at, modules_of
from praxis_lite.bridges.hf.fused_adapters import are_of_experts
from praxis_lite.bridges.hf.hf_config import read_json
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import NestedDict, node_at
from praxis_lite.layers import Dora, Ia3, Lora
from praxis_lite.layers.base import Layer
from praxis_lite.layers.dora import DoraLayer
from praxis_lite.layers.ia3 import Ia3Layer
from praxis_lite.layers.lora import AdaptedLayer, Adapter, LoraLayer
from praxis_lite.models import BaseModel, LanguageModel

CONFIG_FILE = 'adapter_config.json'
# The advice to users whose adapters peft cannot express.
WRITE_MERGED = 'write merged weights: leave out --adapter, or call write_model(folder, model, variables)'
# peft subtracts the initial update from the base weights if `init_lora_weights` begins with one of these.
_OF_ANOTHER_BASE = ('pissa', 'olora', 'corda', 'loftq')


class AdapterKind(NamedTuple):
  """A kind of adapters."""

  adapter: type[Adapter]  # The class of its config.
  layer: type[AdaptedLayer]  # The class of its layers.
  parts: tuple[str, ...]  # Which of `adapter_weights.PARTS` a file has for each weight with an adapter.
  in_config: Mapping[str, Any]  # The fields of adapter_config.json that identify the kind.


KINDS = (
  AdapterKind(Ia3, Ia3Layer, ('scale',), {'peft_type': 'IA3'}),
  AdapterKind(Dora, DoraLayer, ('a', 'b', 'magnitude'), {'peft_type': 'LORA', 'use_dora': True}),
  AdapterKind(Lora, AdaptedLayer, ('a', 'b'), {'peft_type': 'LORA', 'use_dora': False}),
)


def kind_of_config(config: Mapping[str, Any]) -> AdapterKind:
  """Returns the kind of adapters that adapter_config.json describes."""
  return next(kind for kind in KINDS if all(config[name] == value for name, value in kind.in_config.items()))


def kind_in_folder(folder: str | os.PathLike[str]) -> type[Adapter]:
  """Returns the kind of the adapters in a folder that peft has written: `Lora`, `Dora` or `Ia3`."""
  return kind_of_config(read_adapter_config(folder)).adapter


def kind_of_network(network: Layer) -> AdapterKind:
  """Returns the kind of the adapters of a network, which must have some; raises ConfigError if their kinds differ."""
  adapted = [layer for layer in network.descendants() if isinstance(layer, AdaptedLayer)]
  kinds = [next(kind for kind in KINDS if isinstance(layer, kind.layer)) for layer in adapted]
  for layer, kind in zip(adapted, kinds):
    if kind is not kinds[0]:
      raise ConfigError(
        f'{adapted[0].path_name} has an adapter of {kinds[0].adapter.__name__}, and {layer.path_name} one of '
        f'{kind.adapter.__name__}; a folder of peft has one kind; {WRITE_MERGED}'
      )
  return kinds[0]


def read_adapter_config(folder: str | os.PathLike[str]) -> dict[str, object]:
  """Returns the content of adapter_config.json in a folder; raises UserError unless it describes supported adapters."""
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
  config['use_dora'] = bool(config.get('use_dora'))
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


def make_config(
  kind: AdapterKind,
  model: BaseModel,
  adapted: Sequence[AdaptableWeight],
  weights: Sequence[AdaptableWeight],
  network: Layer,
  declared: NestedDict,
  *,
  base: str | None,
  fan_in_fan_out: bool,
) -> dict[str, object]:
  """Returns the content of adapter_config.json for a model with adapters.

  `weights` are all weights of its `network` that can have adapters; `adapted` are those that have one. `declared` are
  the declarations of the variables, and `base` names the checkpoint without adapters.
  """
  of_weights = {weight: modules_of(weight, declared) for weight in weights}
  modules = {module: weight for weight in adapted for module in of_weights[weight]}
  others = set().union(*of_weights.values()) - modules.keys()
  of_inputs = {module for module, weight in modules.items() if weight.scales_inputs}
  groups = [_last_names(group) for group in (of_inputs, modules.keys() - of_inputs, others)]
  are_last_names_enough = sum(map(len, groups)) == len(set().union(*groups))

  def name_modules(chosen: Iterable[str]) -> list[str]:
    return sorted(_last_names(chosen) if are_last_names_enough else chosen)

  content = {
    **kind.in_config,
    'task_type': 'CAUSAL_LM' if isinstance(model, LanguageModel) else None,
    'base_model_name_or_path': base,
    'inference_mode': True,
    'target_modules': name_modules(modules),
    'fan_in_fan_out': fan_in_fan_out,
    'modules_to_save': None,
  }
  if 'scale' in kind.parts:
    return {**content, 'feedforward_modules': name_modules(of_inputs)}
  ranks, alphas = dict[str, int](), dict[str, float]()
  for module, weight in modules.items():
    layer = layer_at(network, weight.layer)
    assert isinstance(layer, AdaptedLayer)
    ranks[module] = node_at(declared, weight.path_of('a')).shape[-1]
    alphas[module] = layer.update_scale * ranks[module]
  most: int = max(ranks.values(), key=[*ranks.values()].count)
  alpha = max((alphas[m] for m in ranks if ranks[m] == most), key=[*alphas.values()].count)
  linear = (layer_at(network, w.layer) for w in adapted if not w.is_table)
  return {
    **content,
    'r': most,
    'lora_alpha': alpha,
    'lora_dropout': next((layer.lora.dropout_tpl.rate for layer in linear if isinstance(layer, LoraLayer)), 0.0),
    'rank_pattern': {module: rank for module, rank in ranks.items() if rank != most},
    'alpha_pattern': {m: a for m, a in alphas.items() if not math.isclose(a, alpha)},
    'bias': 'none',
    'use_rslora': False,
  }


def _last_names(modules: Iterable[str]) -> set[str]:
  return {module.rpartition('.')[2] for module in modules}


def adapters_of(
  kind: AdapterKind,
  shapes: Mapping[AdaptableWeight, tuple[int, ...]],
  names: Mapping[AdaptableWeight, str],
  modules: Mapping[AdaptableWeight, Sequence[str]],
  config: Mapping[str, Any],
) -> Iterator[Config]:
  """Yields configs of our adapters that compute the same as the adapters in a file.

  Args:
    kind: the kind of the adapters.
    shapes: for each weight with an adapter, the shape of the adapter's first part.
    names: for each weight, the path of its layer.
    modules: for each weight, the names of the modules that have it.
    config: the content of adapter_config.json.

  Raises:
    ConfigError: IA3 of experts or of tables of embeddings; or ranks or alphas that differ within one layer.
  """
  if 'scale' in kind.parts:
    if of_others := [modules[w][0] for w in shapes if w.name or w.is_table]:
      raise ConfigError(f'{of_others[0]}: IA3 of experts and of tables of embeddings is not supported')
    of_inputs = [names[w] for w, shape in shapes.items() if shape[0] == 1]
    of_outputs = [name for name in names.values() if name not in of_inputs]
    yield Config(Ia3, layers=_escape([*of_outputs, *of_inputs]), of_inputs=_escape(of_inputs))
    return
  groups: dict[tuple[int, float, object], dict[str, None]] = {}  # Layers by their rank, alpha and dropout.
  for weight, (rank, _) in shapes.items():
    dropout = 0.0 if weight.name else config.get('lora_dropout', 0.0)  # Experts have no dropout.
    group = rank, _alpha(weight, modules[weight], config), dropout
    for other, of_other in groups.items():
      if other != group and names[weight] in of_other:
        raise ConfigError(
          f'the weights of {names[weight]} have adapters of different ranks or alphas; experts have one'
        )
    groups.setdefault(group, {})[names[weight]] = None
  for (rank, alpha, dropout), layers_of_group in groups.items():
    yield Config(
      kind.adapter,
      layers=_escape(layers_of_group),
      rank=rank,
      alpha=alpha,
      rank_stabilized=bool(config.get('use_rslora', False)),
      dropout_rate=dropout,
    )


def _escape(names: Iterable[str]) -> tuple[str, ...]:
  return tuple(map(re.escape, names))


def _alpha(weight: AdaptableWeight, modules: Sequence[str], config: Mapping[str, Any]) -> float:
  """Returns the alpha of a weight's adapters. `modules` are the modules with this weight, one for each layer or expert.

  Raises ConfigError if the modules have different alphas.
  """
  patterns = config.get('alpha_pattern')
  own = [*patterns.items()] if isinstance(patterns, dict) else []
  alphas = {
    module: float(next((a for p, a in own if re.fullmatch(rf'(.*\.)?({p})', module)), config['lora_alpha']))
    for module in modules
  }
  if len({*alphas.values()}) > 1:
    raise ConfigError(
      f'alpha_pattern gives different values to the layers of {weight.module}: {sorted({*alphas.values()})}; in a '
      'stack of layers, all have one alpha'
    )
  return next(iter(alphas.values()))
