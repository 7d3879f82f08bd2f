"""What `transformers` computes for the ids of the tests; needs PyTorch."""

from __future__ import annotations

import torch
import transformers
from checkpoints import IDS


def loaded(folder):
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, attn_implementation='eager', experts_implementation='eager', dtype=torch.float32
  )


def logits_of(model):
  with torch.no_grad():
    return model(torch.tensor(IDS, dtype=torch.long)).logits.numpy()


def greedy_of(model, count):
  ids = torch.tensor(IDS, dtype=torch.long)
  tokens = model.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    do_sample=False,
    min_new_tokens=count,
    max_new_tokens=count,
    eos_token_id=None,
    pad_token_id=0,
  )
  return tokens[:, IDS.shape[1] :].numpy()
