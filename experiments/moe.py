"""Language models with mixtures of experts: two tiny ones, and two of published sizes with their shardings.

praxis-lite train --exp=moe.MoeTiny --job_log_dir=runs/moe
praxis-lite show --exp=moe.Mixtral8x7B
"""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.experiments.lm import counting_data
from praxis_lite.experiments.lm_sizes import PublishedSize
from praxis_lite.layers import LatentAttention, MoeFeedForward, MultiTokenPrediction, RotaryPositions, Router
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment


@registry.register
class MoeTiny(BaseExperiment):
  """For tests: 5 experts, 2 for each token, and a shared one, on counting sequences; reads no files.

  Most meshes have to pad its sizes. On a mesh, devices exchange tokens over 'data'.
  """

  mesh_axis_names = ('replica', 'data', 'mdl')

  def datasets(self) -> list[Config]:
    return counting_data(seq_len=32, batch_size=6)

  def model(self) -> Config:
    router = Config(Router, load_balance_loss_weight=0.01, z_loss_weight=0.001)
    experts = Config(MoeFeedForward, num_experts=5, num_shared_experts=1, router_tpl=router)
    return transformer_lm(vocab_size=37, model_dims=18, num_layers=2, num_heads=3, hidden_dims=15, experts=experts)

  def task(self) -> Config:
    model = self.model()
    model.decoder_tpl.set(max_decode_steps=16, max_context=32)
    task = Config(LanguageModelTask, model=set_sharding(model.set(packed=False), expert_axis='data'))
    task.train.learner = adamw_learner(learning_rate=3e-3, warmup_steps=5)
    task.train.set(num_train_steps=20, log_interval_steps=5, save_interval_steps=10)
    task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
    return task


@registry.register
class LatentTiny(MoeTiny):
  """DeepSeek-V3 in small: latent attention, experts after a dense layer, and a module that predicts a further token."""

  def model(self) -> Config:
    router = Config(Router, score='sigmoid', bias_update_rate=0.001)
    experts = Config(MoeFeedForward, num_experts=6, num_experts_per_token=2, num_shared_experts=1, router_tpl=router)
    model = transformer_lm(
      vocab_size=37,
      model_dims=18,
      num_layers=3,
      num_heads=3,
      hidden_dims=15,
      first_hidden_dims=(45,),
      experts=experts,
    )
    for block in (*model.lm_tpl.transformer_tpl.first_tpl, model.lm_tpl.transformer_tpl.layers_tpl):
      out = block.attention_tpl.out_tpl
      block.attention_tpl = Config(LatentAttention, latent_dims=7, query_latent_dims=9, rotary_dims=4, out_tpl=out)
      block.attention_tpl.rotary_tpl = Config(RotaryPositions)
    model.lm_tpl.mtp_tpl = Config(MultiTokenPrediction, num_modules=1, loss_weight=0.3)
    return model

  def task(self) -> Config:
    task = super().task()
    task.train.learner = adamw_learner(learning_rate=1e-2, warmup_steps=10)
    task.train.set(num_train_steps=200, log_interval_steps=50, eval_interval_steps=100, save_interval_steps=100)
    task.evaluate.max_batches = 4
    return task


class ExpertParallel(PublishedSize):
  """Splits the batch over 'data' and 'expert', experts over 'expert', and all weights over 'data' and 'expert'."""

  mesh_axis_names = ('data', 'expert', 'mdl')
  batch_axes = ('data', 'expert')
  batch_size = 256
  seq_len = 4096
  learning_rate = 3e-4

  def split(self, model: Config) -> Config:
    return set_sharding(model, batch_axes=self.batch_axes, data_axis=self.batch_axes, expert_axis='expert')


@registry.register
class Mixtral8x7B(ExpertParallel):
  """8 experts, 2 for each token: 46.7B parameters with the sizes of Mixtral 8x7B, on 8 x 8 devices."""

  ici_mesh_shape = (8, 8, 1)

  def model(self) -> Config:
    router = Config(Router, load_balance_loss_weight=0.02)
    experts = Config(MoeFeedForward, num_experts=8, num_experts_per_token=2, exchange_factor=2.0, router_tpl=router)
    return transformer_lm(
      vocab_size=32000,
      model_dims=4096,
      num_layers=32,
      num_heads=32,
      num_kv_heads=8,
      hidden_dims=14336,
      rotary_base=1e6,
      remat='full',
      experts=experts,
    )


@registry.register
class FineGrained16B(ExpertParallel):
  """64 small experts, 6 for each token, and 2 shared ones: 16.4B parameters with the sizes of DeepSeekMoE 16B.

  The first layer is dense. Biases keep the load of experts equal, without an auxiliary loss. The mesh has 8 x 8
  devices, with 8 experts on each, so that tokens reach experts over the fast links of a host of 8 GPUs. On 64 H100s,
  its plan predicts 61 % of the step time that a mesh of 4 x 16 devices would have.
  """

  ici_mesh_shape = (8, 8, 1)

  def model(self) -> Config:
    router = Config(Router, renormalize=False, bias_update_rate=0.001)
    experts = Config(MoeFeedForward, num_experts=64, num_experts_per_token=6, num_shared_experts=2, router_tpl=router)
    return transformer_lm(
      vocab_size=102_400,
      model_dims=2048,
      num_layers=28,
      num_heads=16,
      hidden_dims=1408,
      first_hidden_dims=(10_944,),
      remat='full',
      experts=experts.set(dispatch='capacity', capacity_factor=1.25),
    )
