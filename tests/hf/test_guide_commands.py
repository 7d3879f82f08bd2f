"""The commands of docs/hugging-face.md run, in its order, on a small chat model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jax
import pytest

from praxis_lite.bridges.hf import write_model
from praxis_lite.cli.main import main
from praxis_lite.models import transformer_lm

GUIDE = Path(__file__).parents[2] / 'docs' / 'hugging-face.md'
# What makes them quick; the guide's own are for models of real size.
QUICKER = {
  'train': [
    '--set',
    'task.train.num_train_steps=2',
    '--set',
    'datasets[*].seq_len=16',
    '--set',
    'datasets[*].split=None',
  ],
  'decode': ['--max_tokens=4'],
}


@pytest.fixture
def chat_model(tmp_path):
  library = pytest.importorskip('tokenizers', reason='needs the package tokenizers: pip install praxis_lite[hf]')
  from tokenizers import decoders, models, pre_tokenizers, processors, trainers

  tokenizer = library.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    special_tokens=['<s>', '</s>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  tokenizer.train_from_iterator(['Once upon a time'], trainer)
  tokenizer.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 0)])
  sizes = {'vocab_size': tokenizer.get_vocab_size(), 'model_dims': 16, 'num_layers': 2, 'num_heads': 2}
  model = transformer_lm(**sizes, hidden_dims=24).instantiate()
  folder = tmp_path / 'llama'
  write_model(folder, model, model.init(jax.random.key(0)))
  tokenizer.save(str(folder / 'tokenizer.json'))
  template = '{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:'
  settings = {'bos_token': '<s>', 'eos_token': '</s>', 'chat_template': template}
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  return folder


@pytest.mark.slow
def test_the_commands_of_the_guide(chat_model, tmp_path, monkeypatch, capsys):
  (tmp_path / 'my_texts').mkdir()
  (tmp_path / 'my_texts' / 'one.txt').write_text('Once upon a time there was a mat. ' * 50)
  monkeypatch.chdir(tmp_path)
  commands = [line for line in GUIDE.read_text().splitlines() if line.startswith('praxis-lite ')]
  assert [shlex.split(c)[1] for c in commands] == ['import-hf', 'decode', 'decode', 'train', 'export-hf']
  for command in commands:
    _, name, *arguments = shlex.split(command)
    assert main([name, *arguments, *QUICKER.get(name, [])]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    if name == 'decode':
      assert out.startswith('Once upon a time') == ('--chat' not in arguments)
  assert main(['show', '--job_log_dir=runs/llama']) == 0  # It is named in a sentence.
  written = {path.name for path in (tmp_path / 'exported' / 'llama').iterdir()}
  assert written == {'config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'}
