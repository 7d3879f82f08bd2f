"""Reads and writes models and their variables as Hugging Face checkpoints, for programs without a run or a task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from praxis_lite.bridges.hf.families import describe_model
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.reader import checked_pieces, open_checkpoint, read_variables
from praxis_lite.bridges.hf.tensors import add_copies, pieces
from praxis_lite.bridges.hf.writer import MAX_FILE_BYTES, write_checkpoint
from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, node_at, select
from praxis_lite.models import BaseModel, merge_adapters
from praxis_lite.sharding.layout import layout_of


class ImportedModel(NamedTuple):
  """A built model, and its variables in the form that `model.apply(variables, batch)` accepts."""

  model: BaseModel
  variables: NestedDict


def read_model(folder: str | os.PathLike[str], device: jax.Device | None = None) -> ImportedModel:
  """Returns the model of a checkpoint and its variables, float32, on one device.

  Args:
    folder: a folder with config.json and *.safetensors.
    device: the device; None uses the first one. To split a model over a mesh, use `import_run`.

  Raises:
    UserError: the checkpoint cannot be imported; the message says why.
  """
  checkpoint = open_checkpoint(folder)
  family = checkpoint.family
  model = family.model(checkpoint.config).instantiate()
  weights = family.part_of(model.abstract_init())
  if device is None:
    start_devices()
  mesh = Mesh([device or jax.devices()[0]], ('data',))
  layout = layout_of(jax.tree.map(lambda weight: weight.as_struct(), weights), PartitionSpec(), mesh)
  part = read_variables(checkpoint, checked_pieces(checkpoint, weights), layout)
  return ImportedModel(model, family.model_variables(part))


def write_model(
  folder: str | os.PathLike[str], model: BaseModel, variables: NestedDict, max_file_bytes: int = MAX_FILE_BYTES
) -> list[str]:
  """Writes a model as a checkpoint that transformers loads; returns the names of the files.

  Args:
    folder: the target, which is created if it does not exist; files in it with the same names are replaced.
    model: must belong to a family of transformers. Its adapters, if it has any, are merged into the weights.
    variables: its variables, as `model.apply` accepts them; they may be split over devices.
    max_file_bytes: larger checkpoints are written as several files and an index.

  Raises:
    ConfigError: the model belongs to no family; the message names the nearest one and the differences.
  """
  family, values = describe_model(model)
  Path(folder).mkdir(parents=True, exist_ok=True)
  if model.quantized:
    raise ConfigError(
      'task.model.quantized: write_model writes plain weights; pass remove_quantization(model) built, and '
      'dequantize_variables(model, variables)'
    )
  if model.adapters:
    variables = merge_adapters(model, variables)
  weights = family.part_of(select(model.abstract_init(), lambda path: node_at(variables, path) is not None))
  found = add_copies(pieces(family.table_of(weights), weights), family.written_copies(HfConfig(values)))
  return write_checkpoint(folder, values, family.part_of(variables), found, max_file_bytes)
