"""Computes log-probabilities of known texts with transformers, in a process without praxis_lite.

python transformers_process.py REQUEST.json ANSWER.npz
"""

from __future__ import annotations

import json
import re
import sys


def missing_package(line: str) -> str:
  """Returns the missing package, 'torch' or 'transformers', that the last line of an error names; '' if neither."""
  found = re.match(r"ModuleNotFoundError: No module named '(torch|transformers)", line)
  return found[1] if found else ''


def answer_request(question: str, answer: str) -> None:
  """Reads a request, which `run_transformers` in `agreement.py` has written, and writes its answer."""
  import numpy as np
  import torch
  import transformers

  with open(question, encoding='utf-8') as file:
    request = json.load(file)
  start = request['start_id']
  kind = transformers.AutoModelForCausalLM if start is None else transformers.AutoModelForSeq2SeqLM
  # Eager attention, because kernels that sum in another order would only add noise.
  model = kind.from_pretrained(request['folder'], dtype=torch.float32, attn_implementation='eager').eval()
  arrays = {}
  for i, (context, continuation) in enumerate(zip(request['contexts'], request['continuations'])):
    read = [start, *continuation[:-1]] if start is not None else [*context, *continuation[:-1]]
    ids = torch.tensor([read])
    given = {'input_ids': ids} if start is None else {'input_ids': torch.tensor([context]), 'decoder_input_ids': ids}
    with torch.no_grad():
      out = model(**given, output_hidden_states=True, use_cache=False)
    known = torch.tensor(continuation)[:, None]
    log_probs = torch.log_softmax(out.logits[0].float(), dim=-1)[-len(continuation) :]
    states = out.hidden_states if start is None else out.decoder_hidden_states
    arrays[f'log_probs_{i}'] = log_probs.gather(1, known)[:, 0].numpy()
    arrays[f'hidden_{i}'] = torch.stack([state[0].float() for state in states]).numpy()
  np.savez(answer, **arrays)


if __name__ == '__main__':
  answer_request(*sys.argv[1:])
