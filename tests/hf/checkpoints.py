"""Small checkpoints of every family: configs as in config.json, and weights from the names of the tensors."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.bridges.hf.files import Declared, read_folder, write_folder

GOLDEN = Path(__file__).parent / 'golden'
V, D, F = 37, 18, 20

_YARN = {
  'rope_type': 'yarn',
  'rope_theta': 30.0,
  'factor': 4.0,
  'beta_fast': 1.5,
  'beta_slow': 0.4,
  'original_max_position_embeddings': 16,
}
_LLAMA = {
  'vocab_size': V,
  'hidden_size': D,
  'intermediate_size': F,
  'num_hidden_layers': 2,
  'num_attention_heads': 3,
  'num_key_value_heads': 1,
  'head_dim': 6,
  'max_position_embeddings': 64,
  'bos_token_id': 1,
  'eos_token_id': 2,
}

# What of config.json is not a default, in the words of transformers 5. No dimension is even on 8 or 3 devices.
CASES: dict[str, dict[str, Any]] = {
  'llama': {
    'model_type': 'llama',
    **_LLAMA,
    'rms_norm_eps': 1e-5,
    'rope_parameters': {
      'rope_type': 'llama3',
      'rope_theta': 50.0,
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 16,
    },
  },
  'llama_with_biases': {
    'model_type': 'llama',
    **_LLAMA,
    'attention_bias': True,
    'mlp_bias': True,
    'tie_word_embeddings': True,
    'rope_parameters': {'rope_type': 'linear', 'rope_theta': 100.0, 'factor': 2.0},
  },
  'mistral': {
    'model_type': 'mistral',
    **_LLAMA,
    'num_key_value_heads': 3,
    'sliding_window': 4,
    'rope_parameters': {**_YARN},
  },
  'qwen2': {
    'model_type': 'qwen2',
    **{name: value for name, value in _LLAMA.items() if name != 'head_dim'},
    'num_hidden_layers': 3,
    'use_sliding_window': True,
    'sliding_window': 3,
    'max_window_layers': 1,
  },
  'qwen3': {'model_type': 'qwen3', **_LLAMA, 'head_dim': 10, 'tie_word_embeddings': True},
  'gemma': {'model_type': 'gemma', **_LLAMA, 'head_dim': 8},
  'gemma2': {
    'model_type': 'gemma2',
    **_LLAMA,
    'num_hidden_layers': 3,
    'sliding_window': 4,
    'query_pre_attn_scalar': 5,
    'attn_logit_softcapping': 0.5,
    'final_logit_softcapping': 1.5,
  },
  'gemma3': {
    'model_type': 'gemma3_text',
    **_LLAMA,
    'num_hidden_layers': 4,
    'layer_types': ['sliding_attention', 'sliding_attention', 'full_attention', 'sliding_attention'],
    'sliding_window': 4,
    'query_pre_attn_scalar': 5,
    'rope_parameters': {
      'full_attention': {'rope_type': 'linear', 'rope_theta': 300.0, 'factor': 2.0},
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 20.0},
    },
  },
  'olmo2': {
    'model_type': 'olmo2',
    **{name: value for name, value in _LLAMA.items() if name != 'head_dim'},
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 40.0},
  },
  'smollm3': {
    'model_type': 'smollm3',
    **{name: value for name, value in _LLAMA.items() if name != 'head_dim'},
    'num_hidden_layers': 3,
    'no_rope_layer_interval': 2,
    'tie_word_embeddings': False,
    'pad_token_id': None,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 60.0},
  },
  'phi3': {
    'model_type': 'phi3',
    **{name: value for name, value in _LLAMA.items() if name != 'head_dim'},
    'sliding_window': 4,
    'pad_token_id': None,
  },
  'phi4_mini': {
    'model_type': 'phi3',
    **{name: value for name, value in _LLAMA.items() if name not in ('head_dim', 'max_position_embeddings')},
    'tie_word_embeddings': True,
    'pad_token_id': None,
    'max_position_embeddings': 96,
    'original_max_position_embeddings': 24,
    'rope_parameters': {
      'rope_type': 'longrope',
      'rope_theta': 50.0,
      'partial_rotary_factor': 0.75,
      'short_factor': [1.0, 1.3],
      'long_factor': [2.0, 7.0],
    },
  },
  'mixtral': {'model_type': 'mixtral', **_LLAMA, 'num_local_experts': 3, 'sliding_window': 4},
  'qwen3_moe': {
    'model_type': 'qwen3_moe',
    **_LLAMA,
    'moe_intermediate_size': 14,
    'num_experts': 5,
    'num_experts_per_tok': 2,
    'tie_word_embeddings': True,
  },
  'qwen3_next': {
    'model_type': 'qwen3_next',
    **{name: value for name, value in _LLAMA.items() if name != 'intermediate_size'},
    'num_hidden_layers': 4,
    'head_dim': 8,
    'attention_bias': True,
    'layer_types': ['linear_attention', 'full_attention', 'linear_attention', 'full_attention'],
    'linear_num_key_heads': 3,
    'linear_num_value_heads': 6,
    'linear_key_head_dim': 6,
    'linear_value_head_dim': 4,
    'linear_conv_kernel_dim': 3,
    'rms_norm_eps': 1e-2,
    'moe_intermediate_size': 14,
    'shared_expert_intermediate_size': 28,
    'num_experts': 5,
    'num_experts_per_tok': 2,
  },
  'deepseek_v3': {
    'model_type': 'deepseek_v3',
    **{name: value for name, value in _LLAMA.items() if name not in ('head_dim', 'num_key_value_heads')},
    'num_hidden_layers': 3,
    'num_key_value_heads': 3,
    'first_k_dense_replace': 1,
    'kv_lora_rank': 7,
    'q_lora_rank': 9,
    'qk_nope_head_dim': 5,
    'qk_rope_head_dim': 6,
    'v_head_dim': 4,
    'moe_intermediate_size': 14,
    'n_routed_experts': 6,
    'num_experts_per_tok': 3,
    'n_group': 3,
    'topk_group': 2,
    'rope_parameters': {
      **_YARN,
      'mscale': 1.0,
      'mscale_all_dim': 0.7,
    },
  },
  'gpt_oss': {
    'model_type': 'gpt_oss',
    **_LLAMA,
    'num_hidden_layers': 3,
    'num_local_experts': 5,
    'num_experts_per_tok': 2,
    'sliding_window': 4,
    'swiglu_limit': 0.3,
    'rope_parameters': {
      **_YARN,
      'truncate': False,
    },
  },
  'mamba2': {
    'model_type': 'mamba2',
    'vocab_size': V,
    'hidden_size': D,
    'num_hidden_layers': 2,
    'num_heads': 6,
    'head_dim': 6,
    'state_size': 5,
    'n_groups': 3,
    'conv_kernel': 3,
    'chunk_size': 4,
    'use_bias': True,
    'bos_token_id': 1,
    'eos_token_id': 2,
    'pad_token_id': 0,
  },
  'mamba2_tied': {
    'model_type': 'mamba2',
    'vocab_size': V,
    'hidden_size': D,
    'num_hidden_layers': 2,
    'num_heads': 4,
    'head_dim': 9,
    'state_size': 7,
    'n_groups': 1,
    'use_conv_bias': False,
    'tie_word_embeddings': True,
    'bos_token_id': 1,
    'eos_token_id': 2,
    'pad_token_id': 0,
  },
  'recurrent_gemma': {
    'model_type': 'recurrent_gemma',
    'vocab_size': V,
    'hidden_size': 24,
    'intermediate_size': 40,
    'num_hidden_layers': 4,
    'num_attention_heads': 3,
    'num_key_value_heads': 1,
    'attention_window_size': 4,
    'conv1d_width': 3,
    'logits_soft_cap': 1.5,
    'bos_token_id': 1,
    'eos_token_id': 2,
    'pad_token_id': 0,
  },
  'gpt2': {
    'model_type': 'gpt2',
    'vocab_size': V,
    'n_embd': D,
    'n_layer': 2,
    'n_head': 3,
    'n_positions': 32,
    'bos_token_id': 1,
    'eos_token_id': 2,
  },
}
IDS = np.random.default_rng(0).integers(3, V, (2, 11)).astype(np.int32)
_ZERO_CENTERED = 'gemma', 'qwen3_next'  # Norms multiply by 1 + w.


def weight(name: str, shape: tuple[int, ...], model_type: str) -> np.ndarray:
  """A tensor, a function of its name."""
  values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
  is_scale = name.endswith('weight') and len(shape) == 1
  return np.float32(0.3) * values + np.float32(is_scale and not model_type.startswith(_ZERO_CENTERED))


def golden(case: str) -> dict[str, Any]:
  """What transformers computed: `config`, `tensors` (shapes by name), `logits` of IDS, `greedy` after them."""
  return json.loads((GOLDEN / f'{case}.json').read_text())


def make(folder: Path, case: str, **changes: Any) -> Path:
  """Writes the checkpoint whose outputs are recorded; `changes` are of its config.json."""
  recorded = golden(case)
  write(folder, recorded['config'] | changes, {name: tuple(shape) for name, shape in recorded['tensors'].items()})
  return folder


def write(
  folder: Path,
  config: dict[str, Any],
  shapes: dict[str, tuple[int, ...]],
  max_file_bytes: int = 8000,
  **values: np.ndarray,
) -> Path:
  """Writes config.json and tensors by the names given, by default in several files; `values` are other tensors."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  declared = {name: Declared(np.dtype(np.float32), shape) for name, shape in shapes.items()}
  declared |= {name: Declared(value.dtype, value.shape) for name, value in values.items()}

  def tensor(name: str) -> np.ndarray:
    return values[name] if name in values else weight(name, shapes[name], config['model_type'])

  write_folder(folder, declared, tensor, max_file_bytes)
  return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
  """The tensors of a checkpoint, by name."""
  return {name: t.read(tuple(slice(0, n) for n in t.shape)) for name, t in read_folder(folder).items()}


def assert_same_tensors(folder: Path, expected: dict[str, np.ndarray]) -> None:
  """A checkpoint has these tensors and no others, equal in every bit."""
  written = tensors_of(folder)
  assert written.keys() == expected.keys()
  for name, tensor in expected.items():
    np.testing.assert_array_equal(written[name], tensor, err_msg=name)
