"""The steps whose plans are compared with measurements: training of dense models and experts, and decoding."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from praxis_lite.common.config import Config
from praxis_lite.instruments.plan.inference import Requests
from praxis_lite.layers.chunked_loss import usual_chunk_size
from praxis_lite.layers.lora import Lora
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.models import transformer_lm
from praxis_lite.training.adapters import train_adapters
from praxis_lite.training.task import SingleTask
from tools.benchmark_decode import SIZES as DECODERS
from tools.gpu.case import ModelCase, case_of
from tools.gpu.ours import our_task

_STACK = 'model.lm_tpl.transformer_tpl'
_CHUNK_SIZE = 'model.lm_tpl.softmax_tpl.chunk_size'
_REMAT = f'{_STACK}.remat'
_FF = f'{_STACK}.layers_tpl.ff_tpl'


class TrainCase(NamedTuple):
  """A train step: a model, its rows, fields of the task that differ from the defaults, and the rank of adapters.

  With a rank, only adapters of that rank are trained; with 0, the model has none.
  """

  model: ModelCase
  rows: int
  options: Mapping[str, Any] = {}
  rank: int = 0

  def task(self) -> Config[SingleTask]:
    task = our_task(self.model, dict(self.options))
    return train_adapters(task, Config(Lora, rank=self.rank)) if self.rank else task

  def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
    shape = self.rows, self.model.length
    dtypes = {'ids': jnp.int32, 'labels': jnp.int32, 'weights': jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


class DecodeCase(NamedTuple):
  """Greedy decoding of a model of `benchmark_decode.py` in bfloat16; `unroll` is a field of its stack of layers."""

  size: str
  requests: Requests
  unroll: int

  def task(self) -> Config[SingleTask]:
    model = transformer_lm(**DECODERS[self.size], fprop_dtype='bfloat16').set(dtype='bfloat16', packed=False)
    model.decoder_tpl.set(temperature=0.0, stop_ids=(), max_decode_steps=self.requests.max_tokens)
    model.lm_tpl.transformer_tpl.unroll = self.unroll
    return Config(SingleTask, model=model)

  def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
    rows, length, _ = self.requests
    return {
      'ids': jax.ShapeDtypeStruct((rows, length), jnp.int32),
      'prompt_lengths': jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def _experts(count: int, each: int, hidden_dims: int, **fields: Any) -> dict[str, Any]:
  layer = Config(MoeFeedForward, num_experts=count, num_experts_per_token=each, **fields)
  return {_FF: layer, 'model.hidden_dims': hidden_dims}


# 8 layers of the 1.3B model. With experts, a token uses as many weights as in the dense model: 2 x 2,752 = 5,504 and
# 8 x 688 = 5,504 hidden dims.
_DENSE = ModelCase('8 layers of 1.3B', 2048, 2048, 8, 16, 5504)
_OF_8, _OF_64 = (8, 2, 2752), (64, 8, 688)

TRAINING: dict[str, TrainCase] = {
  '124M, T = 1,024': TrainCase(case_of('124M', 1024), 32),
  '124M, T = 1,024, no remat': TrainCase(case_of('124M', 1024), 32, {_REMAT: 'none'}),
  '124M, T = 8,192': TrainCase(case_of('124M', 8192), 4),
  '350M, T = 2,048': TrainCase(case_of('350M', 2048), 16),
  '1.3B, T = 2,048': TrainCase(case_of('1.3B', 2048), 8),
  '1.3B, T = 2,048, 16 rows': TrainCase(case_of('1.3B', 2048), 16),
  '1.3B, T = 2,048, logits in chunks': TrainCase(case_of('1.3B', 2048), 8, {_CHUNK_SIZE: usual_chunk_size(50304)}),
  '1.3B, T = 2,048, full remat, loop': TrainCase(case_of('1.3B', 2048), 16, {_REMAT: 'full', f'{_STACK}.unroll': 1}),
  '1.3B, T = 4,096': TrainCase(case_of('1.3B', 4096), 4),
  '1.3B, T = 16,384': TrainCase(case_of('1.3B', 16384), 1),
  '7B, T = 2,048, full remat': TrainCase(case_of('7B', 2048), 4, {_REMAT: 'full'}),
  '7B, T = 2,048, adapters of rank 16': TrainCase(case_of('7B', 2048), 4, rank=16),
  '8 layers': TrainCase(_DENSE, 8),
  '8 layers, 8 experts': TrainCase(_DENSE, 8, _experts(*_OF_8)),
  '8 layers, 8 experts, capacity 1.25': TrainCase(
    _DENSE, 8, _experts(*_OF_8, dispatch='capacity', capacity_factor=1.25)
  ),
  '8 layers, 8 experts, blocks': TrainCase(_DENSE, 8, _experts(*_OF_8, grouped_matmul='blocks')),
  '8 layers, 64 experts': TrainCase(_DENSE, 8, _experts(*_OF_64)),
}
DECODING: dict[str, DecodeCase] = {
  f'decoding 1B, {rows} rows{how}': DecodeCase('1b', Requests(rows, 1024, 128), unroll)
  for rows in (1, 8, 64)
  for how, unroll in (('', 1), (', written out', 20))
}
