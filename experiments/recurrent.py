"""Language models without attention, or with little: tiny ones that learn in a minute, and published sizes.

praxis-lite train --exp=recurrent.Mamba2Tiny --job_log_dir=runs/mamba2
praxis-lite plan --exp=recurrent.Mamba2Of2B --topology=h100:1x8 --nocompile
"""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.experiments.lm import counting_data
from praxis_lite.experiments.lm_sizes import PublishedSize
from praxis_lite.layers import Recurrent
from praxis_lite.layers.rnn_cells import GruCell
from praxis_lite.models import griffin_lm, mamba2_lm, recurrent_lm, set_sharding
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment

_ROWS = ('replica', 'data')


class _Counting(BaseExperiment):
  """A small model of counting sequences, which are learned if their loss goes from 3.6 nats to less than 0.1."""

  mesh_axis_names: tuple[str, ...] = ('replica', 'data', 'mdl')

  def datasets(self) -> list[Config]:
    return counting_data(seq_len=32, batch_size=6)

  def model(self) -> Config:
    raise NotImplementedError

  def task(self) -> Config:
    model = set_sharding(self.model())
    model.decoder_tpl.set(max_decode_steps=16, temperature=0.0)
    task = Config(LanguageModelTask, model=model)
    task.train.learner = adamw_learner(learning_rate=1e-2, warmup_steps=10)
    task.train.set(num_train_steps=200, log_interval_steps=50, eval_interval_steps=100, save_interval_steps=100)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_2d': (_ROWS, None)}
    task.evaluate.max_batches = 4
    return task


@registry.register
class Mamba2Tiny(_Counting):
  """Two blocks of Mamba-2 on counting sequences, with sizes that most meshes have to pad."""

  def model(self) -> Config:
    return mamba2_lm(vocab_size=37, model_dims=18, num_layers=2, dims_per_head=6, state_dims=8, chunk_size=16)


@registry.register
class HybridTiny(_Counting):
  """Mamba-2 with attention in every third block, on counting sequences."""

  def model(self) -> Config:
    model = mamba2_lm(
      vocab_size=37, model_dims=18, num_layers=4, dims_per_head=6, state_dims=8, chunk_size=16, attention_every=3
    )
    return model.set(num_heads=3)


@registry.register
class GruTiny(_Counting):
  """Two blocks of a gated recurrent unit and a feed-forward layer, on counting sequences."""

  def model(self) -> Config:
    mixer = Config(Recurrent, cell_tpl=Config(GruCell))
    return recurrent_lm(mixer, vocab_size=37, model_dims=18, num_layers=2, hidden_dims=45)


@registry.register
class GriffinTiny(_Counting):
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
  """RecurrentGemma, 2.7B parameters with its table (De et al., 2024), fully sharded over 8 devices."""

  learning_rate = 3e-4

  def model(self) -> Config:
    return griffin_lm(vocab_size=256_000, model_dims=2560, num_layers=26, num_heads=10, remat='full')
