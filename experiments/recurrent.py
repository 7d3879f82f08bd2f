"""Language models without attention, or with little: tiny ones that learn in a minute, and published sizes.

praxis-lite train --exp=recurrent.Mamba2Tiny --job_log_dir=runs/mamba2
praxis-lite plan --exp=recurrent.Mamba2Of2B --topology=h100:1x8 --nocompile
"""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.experiments.lm import Counting
from praxis_lite.experiments.lm_sizes import PublishedSize
from praxis_lite.layers import DiagonalSsm, FeedForward, GatedDeltaNet, Recurrent
from praxis_lite.layers.rnn_cells import GruCell, LstmCellSimple
from praxis_lite.models import griffin_lm, mamba2_lm, recurrent_lm
from praxis_lite.training import registry


@registry.register
class Mamba2Tiny(Counting):
  """Two blocks of Mamba-2 on counting sequences, with sizes that most meshes have to pad."""

  def model(self) -> Config:
    return mamba2_lm(vocab_size=37, model_dims=18, num_layers=2, dims_per_head=6, state_dims=8, chunk_size=16)


@registry.register
class HybridTiny(Counting):
  """Mamba-2 with attention in every third block, on counting sequences."""

  def model(self) -> Config:
    model = mamba2_lm(
      vocab_size=37, model_dims=18, num_layers=4, dims_per_head=6, state_dims=8, chunk_size=16, attention_every=3
    )
    return model.set(num_heads=3)


@registry.register
class GruTiny(Counting):
  """Two blocks of a gated recurrent unit and a feed-forward layer, on counting sequences."""

  def model(self) -> Config:
    mixer = Config(Recurrent, cell_tpl=Config(GruCell))
    return recurrent_lm(mixer, vocab_size=37, model_dims=18, num_layers=2, hidden_dims=45)


@registry.register
class LstmTiny(Counting):
  """Two blocks of an LSTM, without feed-forward layers, on counting sequences."""

  def model(self) -> Config:
    return recurrent_lm(Config(Recurrent), vocab_size=37, model_dims=21, num_layers=2)


@registry.register
class DeltaTiny(Counting):
  """Two blocks of a gated delta rule and a feed-forward layer, on counting sequences."""

  def model(self) -> Config:
    mixer = Config(GatedDeltaNet, num_heads=3, dims_per_head=6, key_dims=5, chunk_size=16)
    return recurrent_lm(mixer, vocab_size=37, model_dims=18, num_layers=2, hidden_dims=45)


@registry.register
class SsmTiny(Counting):
  """Two blocks of a diagonal state space model (S4D) and a feed-forward layer, on counting sequences."""

  def model(self) -> Config:
    mixer = Config(DiagonalSsm, num_heads=18, state_dims=8)
    return recurrent_lm(mixer, vocab_size=37, model_dims=18, num_layers=2, hidden_dims=45)


@registry.register
class GriffinTiny(Counting):
  """Two blocks of a gated linear recurrence and one of local attention, on counting sequences."""

  def model(self) -> Config:
    return griffin_lm(vocab_size=37, model_dims=24, num_layers=3, num_heads=3, window=8, kernel_size=3)


@registry.register
class Mamba2Of1B(PublishedSize):
  """Mamba-2, 1.3B parameters (Dao and Gu, 2024), fully sharded over 8 devices."""

  ici_mesh_shape = (1, 8, 1)
  seq_len = 2048
  batch_size = 64
  learning_rate = 4e-4

  def model(self) -> Config:
    return mamba2_lm(vocab_size=50_288, model_dims=2048, num_layers=48, remat='full')


@registry.register
class Mamba2Of2B(Mamba2Of1B):
  """Mamba-2, 2.7B parameters, fully sharded over 8 devices."""

  learning_rate = 3e-4

  def model(self) -> Config:
    return mamba2_lm(vocab_size=50_288, model_dims=2560, num_layers=64, remat='full')


@registry.register
class RecurrentGemma2B(Mamba2Of1B):
  """RecurrentGemma, 2.7B parameters with the embedding table (De et al., 2024), fully sharded over 8 devices."""

  learning_rate = 3e-4

  def model(self) -> Config:
    return griffin_lm(vocab_size=256_000, model_dims=2560, num_layers=26, num_heads=10, remat='full')


@registry.register
class DeltaNetOf1B(Mamba2Of1B):
  """A gated DeltaNet of 1.3B parameters (Yang et al., 2024), fully sharded over 8 devices."""

  def model(self) -> Config:
    mixer = Config(GatedDeltaNet, num_heads=6, dims_per_head=512, key_dims=256, num_groups=6)
    return recurrent_lm(
      mixer, vocab_size=32_000, model_dims=2048, num_layers=21, hidden_dims=5632, epsilon=1e-6, remat='full'
    )


@registry.register
class S4dOf223M(Mamba2Of1B):
  """The 16 blocks of S4's language model (Gu et al., 2022), with S4D and GPT-2's vocabulary, over 8 devices."""

  learning_rate = 5e-4

  def model(self) -> Config:
    mixer = Config(DiagonalSsm, num_heads=1024, state_dims=32, form='convolution')
    model = recurrent_lm(mixer, vocab_size=50_257, model_dims=1024, num_layers=16, hidden_dims=4096, remat='full')
    model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl = Config(FeedForward, activation='gelu')
    return model


@registry.register
class LstmOf66M(PublishedSize):
  """An LSTM of two layers of 1,500 dims, 66M parameters, the large one of Zaremba et al. (2014), in residual blocks.

  As in the paper, gradients stop every 35 tokens.
  """

  batch_size = 20
  learning_rate = 1e-3

  def model(self) -> Config:
    mixer = Config(Recurrent, cell_tpl=Config(LstmCellSimple), chunk_size=35, truncate_gradients=True)
    return recurrent_lm(mixer, vocab_size=10_000, model_dims=1500, num_layers=2, tie_embeddings=False)
