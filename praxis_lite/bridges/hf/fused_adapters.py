"""Adapters in which one tensor serves all experts of a layer, as peft saves them for `target_parameters`.

    ...mlp.experts.lora_A.weight               [E R, in]     row e R + r belongs to expert e
    ...mlp.experts.lora_B.weight               [out, R E]    column r E + e belongs to expert e
    ...mlp.experts.base_layer.lora_A.weight    the second parameter's A; peft nests the two adapters

transformers 5 keeps the weights of experts in two parameters, gate_up_proj and down_proj. Of the `out` rows of
gate_up_proj, the first half belongs to the gate and the second to up; both have the same A. Only the shapes say which
parameter an adapter belongs to.

E is the number of experts, R the rank.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from praxis_lite.bridges.hf.adapter_weights import PREFIX, AdaptableWeight
from praxis_lite.bridges.hf.files import DerivedTensor, StoredTensor, Tensor
from praxis_lite.common.trees import NestedDict, node_at

_EXPERT = re.compile(r'(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.\w+')
_PARAMETERS = re.compile(r'(.*\.)?experts\.(gate_up_proj|down_proj)')
_PLACES = ('', 'base_layer.')


def are_of_experts(parameters: object) -> bool:
  """Whether all of these `target_parameters` belong to experts."""
  return isinstance(parameters, list) and all(isinstance(p, str) and _PARAMETERS.fullmatch(p) for p in parameters)


def split_experts(
  stored: Mapping[str, StoredTensor], modules: Mapping[AdaptableWeight, Sequence[str]], declared: NestedDict
) -> dict[str, Tensor]:
  """Returns tensors by name, where each tensor for all experts is replaced by one for each expert.

  The new tensors are named like those of separate adapters. `modules` maps each weight to the names of its modules;
  `declared` are the declarations of the network's variables.
  """
  found: dict[str, Tensor] = dict(stored)
  read_once = functools.cache(StoredTensor.read_all)  # A tensor is read once, because each expert takes a part of it.
  for weight, names in modules.items():
    if not weight.name:
      continue
    experts, inputs, outputs = node_at(declared, weight.weight_path).shape[-3:]
    of_both = weight.name in ('gate', 'up')
    for module in names:
      if (match := _EXPERT.fullmatch(module)) is None:
        continue
      both = _pair_of(stored, f'{PREFIX}{match[1]}.mlp.experts.', inputs, 2 * outputs if of_both else outputs, experts)
      if both is None:
        continue
      a, b = both
      expert, rank = int(match[2]), a.shape[0] // experts
      value_b = read_once(b).reshape(b.shape[0], rank, experts)[:, :, expert]
      if of_both:
        value_b = value_b[:outputs] if weight.name == 'gate' else value_b[outputs:]
      value_a = read_once(a).reshape(experts, rank, inputs)[expert]
      for part, whole, value in (('a', a, value_a), ('b', b, value_b)):
        name = f'{PREFIX}{module}.{weight.ending(part)}'
        found[name] = DerivedTensor(name, whole.file, value.shape, whole.dtype, value.__getitem__)
        found.pop(whole.name, None)
  return found


def _pair_of(
  stored: Mapping[str, StoredTensor], prefix: str, inputs: int, outputs: int, experts: int
) -> tuple[StoredTensor, StoredTensor] | None:
  """Returns A and B of an adapter for these numbers of inputs and outputs; None if the file has none that fits."""
  for place in _PLACES:
    a, b = (stored.get(f'{prefix}{place}lora_{x}.weight') for x in 'AB')
    if a is None or b is None:
      continue
    rows, columns = a.shape[0], b.shape[-1]
    if a.shape[1:] == (inputs,) and b.shape[:1] == (outputs,) and rows == columns and rows and rows % experts == 0:
      return a, b
  return None
