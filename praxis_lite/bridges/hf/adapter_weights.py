"""The weights of a model that may have adapters, and the tensors in which peft stores the adapters.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [R, in]     A, transposed
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [out, R]    B, transposed
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector    [out]     of DoRA: (1 + m) |W|
    base_model.model.model.layers.0.self_attn.q_proj.ia3_l            [out, 1]; [1, in] if it scales the inputs
    base_model.model.model.embed_tokens.lora_embedding_A              [R, V]
    base_model.model.model.embed_tokens.lora_embedding_B              [D, R]

R is the rank, V the size of the vocabulary, D the model dims. After `base_model.model.` comes the name of the weight's
tensor in a checkpoint of the family, without `.weight`. So the family's table, which locates weights, also locates
adapters. If a tensor holds several of our weights, such as the weights of queries, keys and values, they share one A.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from praxis_lite.bridges.hf.family import Family, class_without_adapter
from praxis_lite.bridges.hf.tensors import Pair, Piece, path_in_table, pieces
from praxis_lite.common.trees import NestedDict, Path, leaves, node_at, select
from praxis_lite.layers import Embedding, Lora, LoraMoeFeedForward, Projection
from praxis_lite.layers.base import Layer
from praxis_lite.layers.ia3 import Ia3Layer
from praxis_lite.models import BaseModel

PREFIX = 'base_model.model.'
_ENDINGS = {'a': 'lora_A.weight', 'b': 'lora_B.weight', 'magnitude': 'lora_magnitude_vector', 'scale': 'ia3_l'}
# The paths of the variables of DoRA and IA3, relative to their layer.
_OF_LAYER = {'magnitude': 'dora_magnitude', 'scale': 'ia3_scale'}
PARTS = ('a', 'b', 'magnitude', 'scale')
_TABLE_ENDINGS = {'a': 'lora_embedding_A', 'b': 'lora_embedding_B'}


class AdaptableWeight(NamedTuple):
  """A weight that may have an adapter."""

  layer: Path  # The path, relative to the network, of the layer that has the weight.
  # How the names of its adapter's variables begin: 'gate' for `gate_lora_a`; '' if they are `lora.a` and `lora.b`.
  name: str
  pair: Pair  # The row of the family's table.
  rank_in: int  # Number of the weight's dimensions that are inputs, in one layer and for one expert.
  is_table: bool  # Whether it is a table of embeddings.
  scales_inputs: bool = False  # Whether its adapter is an IA3 that scales its inputs, not its outputs.

  def path_of(self, part: str) -> Path:
    """Returns the path, relative to the network, of the variable that holds `part`, one of `PARTS`."""
    if part in _OF_LAYER:
      return (*self.layer, _OF_LAYER[part])
    return (*self.layer, f'{self.name}_lora_{part}') if self.name else (*self.layer, 'lora', part)

  @property
  def weight_path(self) -> Path:
    """The path of the weight, relative to the network."""
    return (*self.layer, self.name or 'w')

  @property
  def module(self) -> str:
    """The name of the module in transformers, with the placeholders {layer} and {expert}."""
    return self.pair.theirs.removesuffix('.weight')

  def ending(self, part: str) -> str:
    """Returns the end of the name of the tensor that stores `part`, one of `PARTS`."""
    return (_ENDINGS | _TABLE_ENDINGS if self.is_table else _ENDINGS)[part]

  def pair_of(self, part: str) -> Pair:
    """Returns the tensor and the axes of `part`, one of `PARTS`: a `Pair`, as in a row of the family's table."""
    experts, _, axes = self.pair.axes.rpartition(': ')
    names, theirs = (axes or 'I O -> I O').split(' -> ')
    dims = _DIMS.findall(names)
    inputs, outputs = dims[: self.rank_in], dims[self.rank_in :]
    of_inputs = part == 'a' or (part == 'scale' and self.scales_inputs)
    own = inputs if of_inputs else outputs
    group = next(group for group in _DIMS.findall(theirs) if _letters([group]) & _letters(own))
    if part in _OF_LAYER:
      ours, order = own, {'magnitude': [group], 'scale': ['.', group] if of_inputs else [group, '.']}[part]
    else:
      ours = [*inputs, 'Z'] if of_inputs else ['Z', *outputs]  # Z, the rank, names no dimension of a table.
      order = ['Z', group] if of_inputs else [group, 'Z']
    prefix = f'{experts}: ' if experts else ''
    axes = f'{prefix}{" ".join(ours)} -> {" ".join(order)}'
    return Pair(f'{PREFIX}{self.module}.{self.ending(part)}', path_in_table(self.path_of(part)), axes)


_DIMS = re.compile(r'(?:\d+\|)?\([^)]*\)(?:\|\d+)?|\S+')


def _letters(dims: Iterable[str]) -> set[str]:
  return {*re.findall('[A-Za-z]', ' '.join(dims))}


def weights_below(network: Layer, family: Family, model: BaseModel) -> Iterator[AdaptableWeight]:
  """Yields the weights of layers in `Lora.adapted` that have a row in the family's table."""
  rows = {pair.ours: pair for pair in family.table_of(family.part_of(model.abstract_init()))}
  for layer in network.descendants():
    kind, path = class_without_adapter(layer), layer.path[len(network.path) :]
    if kind not in Lora.adapted:
      continue
    of_experts = issubclass(Lora.adapted[kind], LoraMoeFeedForward)
    for name in ('gate', 'up', 'down') if of_experts else ('w',):
      pair = rows.get(path_in_table((*path, name)))
      if pair is not None and pair.theirs.endswith('.weight'):
        rank_in = len(layer.in_shape) if isinstance(layer, Projection) else 1
        of_inputs = isinstance(layer, Ia3Layer) and layer.ia3_of_inputs
        yield AdaptableWeight(path, name if of_experts else '', pair, rank_in, kind is Embedding, of_inputs)


def layer_at(network: Layer, path: Path) -> Layer:
  for name in path:
    network = dict(network.named_children())[name]
  return network


def pieces_of(weights: Iterable[AdaptableWeight], declared: NestedDict) -> dict[Path, list[Piece]]:
  """Returns the pieces of the variables of these weights' adapters, by path; skips parts that are not declared."""
  chosen = [(w, part) for w in weights for part in PARTS if node_at(declared, w.path_of(part)) is not None]
  paths = {w.path_of(part) for w, part in chosen}
  table = [w.pair_of(part) for w, part in chosen]
  # `pieces` also needs the other variables: they give the order of the layers in a stack.
  others = select(declared, lambda path: path not in paths)
  rest = [Pair('', path_in_table(path)) for path in leaves(others)]
  found = pieces([*rest, *table], declared)
  return {path: found[path] for path in found if path in paths}


def modules_of(weight: AdaptableWeight, declared: NestedDict) -> list[str]:
  """Returns the names of the modules with this weight: one for each layer and expert."""
  path = weight.weight_path
  rest = [Pair('', path_in_table(p)) for p in leaves(declared) if p != path]
  row = weight.pair._replace(ours=path_in_table(path))
  return [piece.name.removesuffix('.weight') for piece in pieces([*rest, row], declared)[path]]
