"""The Hugging Face side of `benchmark_decode.py`, which runs in a separate environment with torch and transformers.

It reads a checkpoint, prints a line of JSON about itself, and answers each line of JSON {prompts, tokens} with a line
{seconds, cpu, ids}. Continuations are greedy and have the requested length.

  python tools/decode_transformers.py FOLDER --device=cpu --dtype=float32 --cache=static --compile
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('folder')
  parser.add_argument('--device', default='cpu')
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--cache', default='static', choices=['static', 'dynamic'])
  parser.add_argument('--compile', action='store_true')
  parser.add_argument('--threads', type=int, help='of the processor, for each operation; by default all')
  args = parser.parse_args()
  answers, sys.stdout = sys.stdout, sys.stderr  # Keeps the output of libraries out of the answers.

  def answer(values: dict[str, Any]) -> None:
    print(json.dumps(values), file=answers, flush=True)

  try:
    import torch
    import transformers
  except ImportError as error:
    return answer({'absent': str(error)})
  if args.threads:
    torch.set_num_threads(args.threads)
  model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype))
  model = model.to(args.device).eval()
  if args.compile:
    model.forward = torch.compile(model.forward)
  threads = f', threads: {torch.get_num_threads()}' if args.device == 'cpu' else ''
  answer({'versions': f'torch {torch.__version__}, transformers {transformers.__version__}{threads}'})
  for line in sys.stdin:
    asked = json.loads(line)
    ids = torch.tensor(asked['prompts'], device=args.device)
    mask, tokens = torch.ones_like(ids), asked['tokens']
    length = {'max_new_tokens': tokens, 'min_new_tokens': tokens, 'pad_token_id': 0}
    cpu, start = time.process_time(), time.perf_counter()
    with torch.inference_mode():
      out = model.generate(ids, attention_mask=mask, do_sample=False, cache_implementation=args.cache, **length)
      rows = out[:, ids.shape[1] :].tolist()  # Waits for the device.
    seconds = time.perf_counter() - start
    answer({'seconds': seconds, 'cpu': time.process_time() - cpu, 'ids': rows})


if __name__ == '__main__':
  main()
