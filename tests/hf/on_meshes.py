"""A checkpoint on a mesh, as `import-hf` reads it, and what its model computes there."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.bridges.hf.families import describe_model
from praxis_lite.bridges.hf.reader import HfCheckpoint, checked_pieces, open_checkpoint, read_variables
from praxis_lite.bridges.hf.writer import write_checkpoint
from praxis_lite.models import LanguageModel, set_sharding
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.layout import StateLayout, layout_of
from praxis_lite.sharding.mesh import bind_mesh
from praxis_lite.sharding.padding import slice_to
from praxis_lite.sharding.placement import place_variables, placed_specs

AXES = ('replica', 'data', 'mdl')
MESHES = ((1, 1, 1), (2, 2, 2), (1, 3, 1))


class OnMesh(NamedTuple):
  """A model and its variables, padded, on a mesh."""

  checkpoint: HfCheckpoint
  model: LanguageModel
  variables: dict
  layout: StateLayout
  pieces: dict

  @property
  def true_variables(self):
    return slice_to(jax.tree.map(np.asarray, self.variables), self.layout.unpadded_shapes)

  def logits(self, ids):
    """Logits of ids, computed on the mesh."""

    def logits(variables):
      return self.model.lm.apply(self.layout.unpad(variables), ids, method='logits', do_eval=True)[0]

    return np.asarray(GuardedJit(bind_mesh(logits, self.layout.mesh))(self.variables))

  def greedy(self, ids, count):
    """The likeliest tokens after ids, through the cache of the sampler."""
    batch = {'ids': ids, 'prompt_lengths': np.full(len(ids), ids.shape[1], np.int32)}

    def decode(variables):
      variables = {'lm': self.layout.unpad(variables)}
      return self.model.apply(variables, batch, method='decode', do_eval=True)[0][1]['ids']

    return np.asarray(GuardedJit(bind_mesh(decode, self.layout.mesh))(self.variables))[:, :count]

  def write(self, folder, **options):
    folder.mkdir()
    _, values = describe_model(self.model, self.checkpoint.family.model_type)
    write_checkpoint(folder, values, self.variables, self.pieces, **options)
    return folder


def load(folder, mesh_shape=(1, 1, 1), block_bytes=1 << 20, new_tokens=5, expert_axis=None) -> OnMesh:
  """Reads a checkpoint onto a mesh of this shape."""
  checkpoint = open_checkpoint(folder)
  config = set_sharding(checkpoint.family.model(checkpoint.config), expert_axis=expert_axis).set(mesh_axis_names=AXES)
  if hasattr(config, 'decoder_tpl'):
    config.decoder_tpl.set(temperature=0.0, max_decode_steps=new_tokens)
  model = config.instantiate()
  weights = checkpoint.family.part_of(model.abstract_init())
  mesh = Mesh(np.array(jax.devices()[: np.prod(mesh_shape)]).reshape(mesh_shape), AXES)
  specs = placed_specs(place_variables(weights, mesh, rules=None, strategy=None))
  layout = layout_of(jax.tree.map(lambda w: w.as_struct(), weights), specs, mesh)
  pieces = checked_pieces(checkpoint, weights)
  return OnMesh(checkpoint, model, read_variables(checkpoint, pieces, layout, block_bytes), layout, pieces)
