"""PyTorch's step in the GPU benchmark: `torch.compile`, fused attention through SDPA, fused AdamW, fused projections.

It needs PyTorch and NumPy, not this package. B batch, T length, D model dims, N heads, H dims per head, F hidden dims.
"""

from __future__ import annotations

import gc
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tools.gpu import case as shared
from tools.gpu.case import ModelCase
from tools.gpu.turn import Options, main

_BACKENDS = {
  'cudnn': SDPBackend.CUDNN_ATTENTION,
  'flash': SDPBackend.FLASH_ATTENTION,
  'math': SDPBackend.MATH,
}


class TorchNorm(nn.Module):
  """RMSNorm, in float32."""

  def __init__(self, dims: int):
    super().__init__()
    self.scale = nn.Parameter(torch.ones(dims))

  def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
    y_BTD = x_BTD.float()
    y_BTD = y_BTD * torch.rsqrt(y_BTD.square().mean(-1, keepdim=True) + shared.NORM_EPSILON)
    return (y_BTD * self.scale).to(x_BTD.dtype)


def rotate_heads(x_BNTH: torch.Tensor, sin_Th: torch.Tensor, cos_Th: torch.Tensor) -> torch.Tensor:
  first, second = x_BNTH.chunk(2, dim=-1)
  return torch.cat([first * cos_Th - second * sin_Th, second * cos_Th + first * sin_Th], dim=-1).to(x_BNTH.dtype)


class Block(nn.Module):
  """A pre-norm block. One product computes queries, keys and values; another one computes gate and up."""

  def __init__(self, case: ModelCase):
    super().__init__()
    D, self.num_heads = case.model_dims, case.num_heads
    self.norm1, self.norm2 = TorchNorm(D), TorchNorm(D)
    self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
    self.gate_up = nn.Linear(D, 2 * case.hidden_dims, bias=False)
    self.down = nn.Linear(case.hidden_dims, D, bias=False)

  def forward(self, x_BTD: torch.Tensor, sin_Th: torch.Tensor, cos_Th: torch.Tensor) -> torch.Tensor:
    B, T, D = x_BTD.shape
    heads = self.qkv(self.norm1(x_BTD)).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    q_BNTH, k_BNTH, v_BNTH = heads.unbind(0)
    q_BNTH, k_BNTH = rotate_heads(q_BNTH, sin_Th, cos_Th), rotate_heads(k_BNTH, sin_Th, cos_Th)
    mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
    x_BTD = x_BTD + self.out(mixed_BNTH.transpose(1, 2).reshape(B, T, D))
    gate_BTF, up_BTF = self.gate_up(self.norm2(x_BTD)).chunk(2, dim=-1)
    return x_BTD + self.down(F.silu(gate_BTF) * up_BTF)


class TorchDecoder(nn.Module):
  """Tokens [B, T + 1] -> mean cross entropy."""

  def __init__(self, case: ModelCase, remat: bool):
    super().__init__()
    self.embedding = nn.Embedding(case.vocab, case.model_dims)
    self.blocks = nn.ModuleList(Block(case) for _ in range(case.num_layers))
    self.final_norm, self.remat = TorchNorm(case.model_dims), remat
    half = case.model_dims // case.num_heads // 2
    angle_Th = torch.arange(case.length).float()[:, None] / shared.ROTARY_BASE ** (torch.arange(half).float() / half)
    self.register_buffer('sin_Th', angle_Th.sin(), persistent=False)
    self.register_buffer('cos_Th', angle_Th.cos(), persistent=False)

  def forward(self, ids: torch.Tensor) -> torch.Tensor:
    x_BTD = self.embedding(ids[:, :-1])
    if torch.is_autocast_enabled(x_BTD.device.type):
      x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
    for block in self.blocks:
      arguments = (x_BTD, self.sin_Th, self.cos_Th)
      x_BTD = checkpoint(block, *arguments, use_reentrant=False) if self.remat else block(*arguments)
    logits_BTV = F.linear(self.final_norm(x_BTD), self.embedding.weight)
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), ids[:, 1:].flatten().long())


def first_params(case: ModelCase, device: str) -> dict[str, torch.Tensor]:
  """Returns the first weights on a device, in float32."""
  found = {}
  for name, shape, values in shared.first_weights(case):
    few, size = torch.from_numpy(np.ascontiguousarray(values)).to(device), math.prod(shape)
    found[name] = few.repeat(-(-size // len(few)))[:size].view(shape)
  return found


def fill(model: TorchDecoder, case: ModelCase, device: str) -> None:
  """Copies the first weights of the case into a model."""
  w = first_params(case, device)
  D = case.model_dims
  with torch.no_grad():
    model.embedding.weight.copy_(w['embedding'])
    model.final_norm.scale.copy_(w['final_norm'])
    for i, block in enumerate(model.blocks):
      block.norm1.scale.copy_(w['norm1'][i])
      block.norm2.scale.copy_(w['norm2'][i])
      block.qkv.weight.copy_(torch.cat([w[name][i].reshape(D, D).T for name in 'qkv']))
      block.out.weight.copy_(w['o'][i].reshape(D, D).T)
      block.gate_up.weight.copy_(torch.cat([w['gate'][i].T, w['up'][i].T]))
      block.down.weight.copy_(w['down'][i].T)


class TorchSide:
  """Its options: attention ('cudnn', 'flash' or 'math'), remat (of whole blocks), compile (a mode, or 'aot_eager')."""

  def __init__(self) -> None:
    self._gpu = torch.cuda.is_available()
    self._device = 'cuda' if self._gpu else 'cpu'
    torch.set_float32_matmul_precision('high' if self._gpu else 'highest')

  def prepare(self, case: ModelCase, batch: int, options: Options) -> None:
    torch._dynamo.reset()
    self._case, self._batch, self._options = case, batch, options
    with torch.device(self._device):
      model = TorchDecoder(case, bool(options.get('remat')))
    sin_Th, cos_Th = model.sin_Th, model.cos_Th
    model = model.to(dtype=getattr(torch, case.state))
    model.sin_Th, model.cos_Th = sin_Th, cos_Th  # In float32, whatever the state is.
    fill(model, case, self._device)
    decayed = [p for name, p in model.named_parameters() if 'norm' not in name]
    rest = [p for name, p in model.named_parameters() if 'norm' in name]
    groups = [{'params': decayed, 'weight_decay': shared.WEIGHT_DECAY}, {'params': rest, 'weight_decay': 0.0}]
    self._optimizer = torch.optim.AdamW(
      groups, lr=shared.LEARNING_RATE, betas=shared.BETAS, eps=shared.EPSILON, fused=True
    )
    self._parameters = [*decayed, *rest]
    mode = options.get('compile', 'default')
    self._loss = torch.compile(model, backend=mode) if mode == 'aot_eager' else torch.compile(model, mode=mode)

  def step(self, number: int) -> torch.Tensor:
    ids = torch.from_numpy(shared.tokens(self._case, self._batch, number))
    if self._gpu:
      ids = ids.pin_memory().to(self._device, non_blocking=True)
    dtype = getattr(torch, self._case.compute)
    mixed = self._case.compute != self._case.state
    attention = sdpa_kernel(_BACKENDS[self._options.get('attention', 'flash' if self._gpu else 'math')])
    with attention, torch.autocast(self._device, dtype=dtype if mixed else torch.bfloat16, enabled=mixed):
      loss = self._loss(ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self._parameters, shared.CLIP_NORM, foreach=True)
    self._optimizer.step()
    self._optimizer.zero_grad(set_to_none=True)
    return loss.detach()

  def value(self, loss: Any) -> float:
    found = float(loss)
    if self._gpu:
      torch.cuda.synchronize()
    return found

  def release(self) -> None:
    self._loss = self._optimizer = self._parameters = None  # type: ignore[assignment]
    gc.collect()
    if self._gpu:
      torch.cuda.empty_cache()

  def peak_bytes(self) -> int:
    return int(torch.cuda.max_memory_allocated()) if self._gpu else 0

  def versions(self) -> dict[str, str]:
    found = {'torch': torch.__version__}
    if self._gpu:
      found |= {'cuda': str(torch.version.cuda), 'cudnn': str(torch.backends.cudnn.version())}
    return found


if __name__ == '__main__':
  main(TorchSide())
