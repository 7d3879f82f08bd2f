"""Language models of published families and sizes, from the values of their config.json, to train from scratch.

  praxis-lite plan --exp=families.Olmo2Of7B --topology=h100:1x8 --nocompile
  praxis-lite train --exp=families.Olmo2Of7B --job_log_dir=runs/olmo --set 'datasets[*].path=my_texts/*.txt' \\
    --set 'datasets[*].tokenizer_tpl.model_path=my_tokenizer.model'
"""

from __future__ import annotations

from typing import Any

from praxis_lite.bridges.hf.families import family_of
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.common.config import Config
from praxis_lite.experiments.lm_sizes import PublishedSize
from praxis_lite.experiments.moe import ExpertParallel
from praxis_lite.layers.repeat import kinds_of_stack
from praxis_lite.training import registry


class _OfFamily(PublishedSize):
  """Trains the model of a config.json, with all weights split over all devices, and a row for each device.

  Attributes:
    sizes: the content of config.json, except for values that transformers assumes anyway.
  """

  seq_len = 8192
  learning_rate = 3e-4
  sizes: dict[str, Any]

  def model(self) -> Config:
    hf = HfConfig(self.sizes)
    model = family_of(hf).model(hf)
    model.lm_tpl.transformer_tpl.remat = 'full'
    return model


class _OnEight(_OfFamily):
  ici_mesh_shape = (1, 8, 1)
  batch_size = 8


class _OnSixteen(_OfFamily):
  ici_mesh_shape = (1, 16, 1)
  batch_size = 16


@registry.register
class SmolLm3Of3B(_OnEight):
  """SmolLM 3, 3.1B parameters (Hugging Face, 2025), on 8 devices: every fourth layer has no positions."""

  sizes = {
    'model_type': 'smollm3',
    'vocab_size': 128_256,
    'hidden_size': 2048,
    'intermediate_size': 11_008,
    'num_hidden_layers': 36,
    'num_attention_heads': 16,
    'rope_theta': 5e6,
  }


@registry.register
class Olmo2Of7B(_OnEight):
  """OLMo 2, 7.3B parameters (OLMo Team, 2024), on 8 devices: sublayers are normalized at their outputs."""

  seq_len = 4096
  sizes = {
    'model_type': 'olmo2',
    'vocab_size': 100_352,
    'hidden_size': 4096,
    'intermediate_size': 11_008,
    'num_hidden_layers': 32,
    'num_attention_heads': 32,
    'rms_norm_eps': 1e-6,
    'rope_theta': 5e5,
  }


@registry.register
class MistralOf7B(_OnEight):
  """Mistral 7B, 7.2B parameters (Jiang et al., 2023), on 8 devices: a window of 4,096 tokens."""

  sizes = {
    'model_type': 'mistral',
    'vocab_size': 32_000,
    'hidden_size': 4096,
    'intermediate_size': 14_336,
    'num_hidden_layers': 32,
    'num_attention_heads': 32,
    'rms_norm_eps': 1e-5,
  }


@registry.register
class Qwen3Of8B(_OnEight):
  """Qwen 3, 8.2B parameters (Qwen Team, 2025), on 8 devices: norms of queries and keys."""

  sizes = {
    'model_type': 'qwen3',
    'vocab_size': 151_936,
    'hidden_size': 4096,
    'intermediate_size': 12_288,
    'num_hidden_layers': 36,
    'num_attention_heads': 32,
    'num_key_value_heads': 8,
    'rope_theta': 1e6,
  }


@registry.register
class Gemma3Of12B(_OnSixteen):
  """The text model of Gemma 3, 11.8B parameters (Gemma Team, 2025), on 16 devices: windows in five of six layers."""

  sizes = {
    'model_type': 'gemma3_text',
    'hidden_size': 3840,
    'intermediate_size': 15_360,
    'num_hidden_layers': 48,
    'num_attention_heads': 16,
    'num_key_value_heads': 8,
    'sliding_window': 1024,
    'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
  }


@registry.register
class Phi4Of14B(_OnSixteen):
  """Phi 4, 14.7B parameters (Abdin et al., 2024), on 16 devices."""

  sizes = {
    'model_type': 'phi3',
    'vocab_size': 100_352,
    'hidden_size': 5120,
    'intermediate_size': 17_920,
    'num_hidden_layers': 40,
    'num_attention_heads': 40,
    'num_key_value_heads': 10,
    'rope_theta': 250_000.0,
  }


class _OnSixtyFour(_OfFamily):
  """Adds an auxiliary loss to routers, so that experts are equally loaded."""

  ici_mesh_shape = (1, 64, 1)
  batch_size = 64

  def model(self) -> Config:
    model = super().model()
    for block in kinds_of_stack(model.lm_tpl.transformer_tpl):
      block.ff_tpl.router_tpl.load_balance_loss_weight = 0.001
    return model


@registry.register
class GptOssOf20B(_OnSixtyFour):
  """GPT-OSS, 20.9B parameters (OpenAI, 2025), on 64 devices: sinks, and windows in every other layer."""

  sizes = {'model_type': 'gpt_oss', 'num_hidden_layers': 24, 'num_local_experts': 32}


@registry.register
class Qwen3MoeOf30B(_OnSixtyFour):
  """Qwen 3 with experts, 30.5B parameters, 3.3B of them active for each token, on 64 devices."""

  sizes = {
    'model_type': 'qwen3_moe',
    'vocab_size': 151_936,
    'hidden_size': 2048,
    'num_hidden_layers': 48,
    'num_attention_heads': 32,
    'head_dim': 128,
    'norm_topk_prob': True,
    'rope_theta': 1e6,
  }


@registry.register
class Qwen3NextOf80B(_OnSixtyFour):
  """Qwen3-Next with attention in every fourth layer, 79.7B parameters, 3.9B active for each token, on 64 devices."""

  sizes = {
    'model_type': 'qwen3_next',
    'vocab_size': 151_936,
    'hidden_size': 2048,
    'num_hidden_layers': 48,
    'num_attention_heads': 16,
    'rope_theta': 1e7,
  }


@registry.register
class DeepSeekV3(ExpertParallel, _OfFamily):
  """DeepSeek-V3, 671B parameters and a module for a further token, on 1,024 devices; groups of 8 exchange tokens."""

  ici_mesh_shape = (128, 8, 1)
  batch_size = 1024
  seq_len = 8192
  learning_rate = 2.2e-4
  sizes = {
    'model_type': 'deepseek_v3',
    'vocab_size': 129_280,
    'hidden_size': 7168,
    'num_hidden_layers': 61,
    'num_attention_heads': 128,
    'num_nextn_predict_layers': 1,
    'rope_scaling': {'type': 'yarn', 'factor': 40.0, 'original_max_position_embeddings': 4096}
    | {'mscale': 1.0, 'mscale_all_dim': 1.0},
  }

  def model(self) -> Config:
    model = super().model()
    model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl.exchange_factor = 2.0
    return model
