"""A small language model whose compiled step is read, and what it costs, counted by hand."""

import jax.numpy as jnp

from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

LAYERS, D, HEADS, DIMS, HIDDEN, VOCAB, LENGTH, ROWS = 2, 64, 8, 8, 128, 128, 32, 16
TOKENS = ROWS * LENGTH
MATRICES = 4 * D * HEADS * DIMS + 3 * D * HIDDEN  # Of a layer.
MULTIPLIED = LAYERS * MATRICES + VOCAB * D  # The table of the embedding is looked up.
ALL = MULTIPLIED + VOCAB * D + (2 * LAYERS + 1) * D
ATTENTION_FLOPS = 12 * LAYERS * HEADS * DIMS * LENGTH  # For a token.


def small_lm(mesh=(2, 2, 2), dtype=jnp.float32, **model):
  """The config of an experiment on a mesh (replica, data, mdl)."""
  config = configure(registry.get('lm.SyntheticLmTiny'))
  config.task.ici_mesh_shape = mesh
  sizes = {'num_layers': LAYERS, 'num_heads': HEADS, 'dims_per_head': DIMS, 'hidden_dims': HIDDEN, **model}
  lm = transformer_lm(vocab_size=VOCAB, model_dims=D, fprop_dtype=dtype, **sizes)
  config.task.model = set_sharding(lm.set(packed=False))
  config.datasets[0].set(seq_len=LENGTH, batch_size=ROWS, vocab_size=VOCAB)
  return config
