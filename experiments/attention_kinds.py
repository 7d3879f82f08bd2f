"""Tiny language models with further kinds of attention, which learn a task that needs attention in a minute.

praxis-lite train --exp=attention_kinds.DifferentialTiny --job_log_dir=runs/differential
"""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.experiments.lm import Counting
from praxis_lite.layers import (
  AlibiBias,
  DifferentialAttention,
  PerDimScale,
  RelativeAttention,
  RotaryPositions,
  ValueResidual,
)
from praxis_lite.models import transformer_lm
from praxis_lite.sharding.weights import WeightInit
from praxis_lite.training import registry


class _Adding(Counting):
  """Learns that each token is the sum of the two before it, modulo 10; without attention, the loss stays at 2.3 nats.

  Sizes do not divide most meshes.
  """

  num_heads = 3

  def datasets(self) -> list[Config]:
    return [d.set(pattern='sum', vocab_size=11, num_synthetic_examples=600) for d in super().datasets()]

  def model(self) -> Config:
    model = transformer_lm(
      vocab_size=11, model_dims=18, num_layers=3, num_heads=self.num_heads, dims_per_head=6, hidden_dims=45
    )
    model.lm_tpl.params_init = WeightInit.Gaussian(0.2)
    self.change(model.lm_tpl.transformer_tpl, model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl)
    return model

  def change(self, stack: Config, attention: Config) -> None:
    """Changes the attention of the blocks of a stack."""
    raise NotImplementedError


@registry.register
class SinksTiny(_Adding):
  """Attention sinks, and windows in every other layer, as in GPT-OSS."""

  def change(self, stack: Config, attention: Config) -> None:
    attention.use_sinks = True
    stack.sliding_windows = (5, None)


@registry.register
class ChunksTiny(_Adding):
  """Chunks of 7 tokens in two of three layers, and no positions in the third, much as in Llama 4."""

  def change(self, stack: Config, attention: Config) -> None:
    chunks, everything = stack.layers_tpl, stack.layers_tpl.clone()
    chunks.attention_tpl.local_chunk = 7
    everything.attention_tpl.rotary_tpl = None
    stack.layers_tpl = (chunks, chunks.clone(), everything)


@registry.register
class AlibiTiny(_Adding):
  """Biases that grow with the distance, instead of positions (ALiBi)."""

  def change(self, stack: Config, attention: Config) -> None:
    attention.set(rotary_tpl=None, relative_bias_tpl=Config(AlibiBias))


@registry.register
class MultiQueryTiny(_Adding):
  """One head of keys and values for all queries, and a learned scale for each dim of queries, as in Praxis."""

  def change(self, stack: Config, attention: Config) -> None:
    attention.set(num_kv_heads=1, per_dim_scale_tpl=Config(PerDimScale))


@registry.register
class ValueResidualTiny(_Adding):
  """Values that are mixed with those of the first layer (ResFormer), with learned factors."""

  def change(self, stack: Config, attention: Config) -> None:
    attention.value_residual_tpl = Config(ValueResidual, is_learned=True)


@registry.register
class MemoryTiny(_Adding):
  """Transformer-XL: relative positions, and a memory of 7 tokens before each chunk of 7."""

  def change(self, stack: Config, attention: Config) -> None:
    stack.layers_tpl.attention_tpl = Config(RelativeAttention, chunk_length=7, out_tpl=attention.out_tpl)


@registry.register
class DifferentialTiny(_Adding):
  """Differences of two softmaxes (Differential Transformer)."""

  num_heads = 6

  def change(self, stack: Config, attention: Config) -> None:
    rotary = Config(RotaryPositions)
    stack.layers_tpl.attention_tpl = Config(DifferentialAttention, rotary_tpl=rotary, out_tpl=attention.out_tpl)
