# ruff: noqa: E402
"""Records results of transformers for small checkpoints, for the tests in tests/hf, which run without transformers.

  pip install praxis_lite[hf-oracle]
  python tools/record_hf_logits.py              all cases, or the named ones, which may be bert, bart and t5 too

Weights are not recorded: the tests derive them from the names of the tensors, or draw them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / 'tests' / 'hf')]

import numpy as np
import test_by_hand_against_transformers as by_hand

try:
  import transformers
except ImportError:
  sys.exit('record_hf_logits: error: transformers is not installed; pip install praxis_lite[hf-oracle]')
from checkpoints import CASES, GOLDEN, write
from theirs import greedy_of, loaded, logits_of

from praxis_lite.bridges.hf.files import read_folder

NEW_TOKENS = 5


def record(case: str) -> None:
  """Writes the results of one case to its file."""
  config = transformers.AutoConfig.for_model(**CASES[case])
  model = transformers.AutoModelForCausalLM.from_config(config)
  with tempfile.TemporaryDirectory() as folder:
    random, ours = Path(folder, 'random'), Path(folder, 'ours')
    model.save_pretrained(random)
    shapes = {name: tensor.shape for name, tensor in read_folder(random).items()}
    saved = json.loads((random / 'config.json').read_text())
    saved |= {'architectures': [type(model).__name__]}
    write(ours, saved, shapes)
    model = loaded(ours)
  logits, greedy = logits_of(model), greedy_of(model, NEW_TOKENS)
  content = {
    'config': saved,
    'tensors': {name: list(shape) for name, shape in shapes.items()},
    'logits': np.round(logits.astype(np.float64), 6).tolist(),
    'greedy': greedy.tolist(),
  }
  GOLDEN.mkdir(exist_ok=True)
  lines = [f'{json.dumps(name)}: {json.dumps(value)}' for name, value in content.items()]
  (GOLDEN / f'{case}.json').write_text('{' + ',\n'.join(lines) + '}\n')


def record_family(name: str) -> None:
  """Writes the results of all cases of a family whose forward pass the tests have in NumPy."""
  cases, outputs = BY_HAND[name]
  found = {}
  for case in cases:
    with tempfile.TemporaryDirectory() as folder:
      found[case] = np.round(outputs(case, Path(folder))[0], 6).tolist()
  lines = [f'{json.dumps(case)}: {json.dumps(logits)}' for case, logits in found.items()]
  (GOLDEN / f'{name}.json').write_text('{' + ',\n'.join(lines) + '}\n')


BY_HAND = {
  'bert': (by_hand.bert.CASES, by_hand.bert_outputs),
  'bart': (by_hand.bart.CASES, by_hand.bart_logits),
  't5': (by_hand.t5.CASES, by_hand.t5_logits),
}

if __name__ == '__main__':
  for name in sys.argv[1:] or (*CASES, *BY_HAND):
    record_family(name) if name in BY_HAND else record(name)
    print(name)
