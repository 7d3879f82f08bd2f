"""The commands of docs/hugging-face.md run, in its order, on a small chat model."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import jax
import pytest

import praxis_lite
from praxis_lite.bridges.hf import export_run, import_run, write_model
from praxis_lite.bridges.hf.runs import _describe_chat_end
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.inputs import HfTokenizer, SyntheticLMInput, TextInput
from praxis_lite.models import transformer_lm
from praxis_lite.models.decoding import Sampler
from praxis_lite.runs.executor import run_train
from praxis_lite.runs.imported_files import tokenizer_in
from praxis_lite.runs.records.record import read_record

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
  lines = map(str.strip, GUIDE.read_text().splitlines())
  commands = [line for line in lines if line.startswith('praxis-lite ')]
  names = ['import-hf', 'decode', 'decode', 'train', 'export-hf', 'train', 'export-hf']
  assert [shlex.split(c)[1] for c in commands] == names
  for command in commands:
    _, name, *arguments = shlex.split(command)
    assert main([name, *arguments, *QUICKER.get(name, [])]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    if name == 'decode':
      assert out.startswith('Once upon a time') == ('--chat' not in arguments)
  assert main(['show', '--job_log_dir=runs/llama']) == 0  # It is named in a sentence.
  written = {path.name for path in (tmp_path / 'exported' / 'llama').iterdir()}
  configs = {'config.json', 'generation_config.json', 'tokenizer_config.json'}
  assert written == configs | {'model.safetensors', 'tokenizer.json'}


def chat(answer):
  return [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': answer}]


@pytest.mark.slow
def test_the_commands_of_the_guide_to_preferences(chat_model, tmp_path, monkeypatch, capsys):
  """From a checkpoint to a tuned and an aligned one, with the tokenizer and its template; the answers are learnt."""
  monkeypatch.chdir(tmp_path)
  Path('chats.jsonl').write_text(json.dumps({'messages': chat('Once')}) + '\n')
  Path('pairs.jsonl').write_text(json.dumps({'chosen': chat('Once'), 'rejected': chat('upon a')}) + '\n')
  guide = (GUIDE.parent / 'preferences.md').read_text().replace('\\\n', ' ')
  others = 'runs/sorted', 'policies.', '--what=teach'  # What makes none of these runs.
  lines = [line for line in guide.splitlines() if line.startswith('praxis-lite ')]
  commands = [line for line in lines if not any(other in line for other in others)]
  assert [shlex.split(c)[1] for c in commands] == ['import-hf', 'train', 'decode', 'export-hf', 'train']
  fields = {'num_train_steps': 80, 'learner.learning_rate': 1e-2, 'learner.schedule.warmup_steps': 2}
  train = [*(f'--set=task.train.{name}={value}' for name, value in fields.items()), '--set=datasets[*].seq_len=64']
  quicker = {'train': [*train, '--set=datasets[*].batch_size=2'], 'decode': ['--max_tokens=4']}
  for command in commands:
    _, name, *arguments = shlex.split(command)
    assert main([name, *arguments, *quicker.get(name, [])]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    if name == 'decode':
      assert out.strip().startswith('Once')
  assert 'accuracy 1.000' in out and 'reference.embedding.w <- lm.embedding.w' in out
  assert main(['export-hf', '--job_log_dir=runs/preferred', '--out=exported/preferred']) == 0
  tuned, preferred = ({path.name for path in Path('exported', name).iterdir()} for name in ('tuned', 'preferred'))
  assert tuned == preferred >= {'model.safetensors', 'tokenizer.json', 'tokenizer_config.json', 'config.json'}
  assert 'chat_template' in json.loads(Path('exported/preferred/tokenizer_config.json').read_text())


def test_a_chat_template_whose_end_does_not_stop_decoding_is_told(chat_model):
  file = chat_model / 'tokenizer_config.json'
  settings = json.loads(file.read_text())
  tokenizer = tokenizer_in(chat_model)
  for end, stop_ids, told in (
    ('{{ eos_token }}', (), 'stop_ids=(1,)'),
    ('{{ eos_token }}', (0,), 'stop_ids=(0, 1)'),
    ('{{ eos_token }}', (1,), ''),
    ('', (), ''),
  ):
    template = '{% for m in messages %}{{ m.role }}: {{ m.content }}' + end + '\n{% endfor %}'
    prompt = '{% if add_generation_prompt %}assistant: {% endif %}'
    file.write_text(json.dumps(settings | {'chat_template': template + prompt}))
    lines = list(_describe_chat_end(Config(Sampler, stop_ids=stop_ids), tokenizer))
    assert len(lines) == bool(told) and all(told in line and 'end with token 1,' in line for line in lines)
  del settings['chat_template']
  file.write_text(json.dumps(settings))
  assert not list(_describe_chat_end(Config(Sampler), tokenizer)) and not list(
    _describe_chat_end(Config(Sampler), None)
  )


@pytest.mark.slow
def test_an_import_is_trained_in_another_directory_and_in_place_after_it_was_moved(
  chat_model, tmp_path, monkeypatch, capsys
):
  (tmp_path / 'text.txt').write_text('Once upon a time there was a mat. ' * 50)
  monkeypatch.chdir(tmp_path)
  import_run(chat_model, 'imported')
  record = Path('imported/run.json').read_text()
  shutil.move('imported', 'moved')  # Its config names the tokenizer in `imported`.
  data = ['--set=datasets[*].path=text.txt', '--set=task.evaluate.max_batches=1', *QUICKER['train']]
  new = ['--exp=moved', '--job_log_dir=new', '--set=task.train.init_from.path=moved']
  assert main(['train', *new, *data]) == 0, capsys.readouterr().err
  assert 'with the same name and shape' in capsys.readouterr().out  # The variables of the import.
  assert Path('moved/run.json').read_text() == record
  assert main(['train', '--job_log_dir=moved', *data]) == 0, capsys.readouterr().err
  shutil.move('new', 'newer')
  shutil.rmtree('moved')
  assert main(['eval', '--job_log_dir=newer']) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_a_run_keeps_the_tokenizer_of_its_import(chat_model, tmp_path, monkeypatch, capsys):
  """Also if it is trained on other inputs, in another directory, or is a copy."""
  monkeypatch.chdir(tmp_path)
  import_run(chat_model, 'imported')
  config = read_record('imported').config
  size = config.task.model.vocab_size
  data = Config(SyntheticLMInput, name='train', is_training=True, seq_len=8, vocab_size=size, batch_size=2)
  config = config._replace(datasets=[data])
  config.task.train.set(num_train_steps=1, save_interval_steps=1, eval_interval_steps=None)
  config.task.train.init_from.path = 'imported'
  run_train(config, 'tuned')
  shutil.move('imported', 'elsewhere')
  assert main(['checkpoints', 'copy', 'tuned', 'copied', '--nooptimizer']) == 0
  capsys.readouterr()
  for directory in ('copied', 'elsewhere'):  # The datasets of the second name a tokenizer where it was imported.
    assert main(['decode', f'--job_log_dir={directory}', '--chat', '--prompt=Once', '--max_tokens=4']) == 0
    assert capsys.readouterr().err == ''
  assert isinstance(praxis_lite.open_run('tuned').load().tokenizer, HfTokenizer)
  assert 'tokenizer.json' in export_run(config, 'copied', 'exported')
  # A run that was not imported has the tokenizer of its dataset.
  shutil.rmtree('copied/hugging_face')
  tokenizer = Config(HfTokenizer, path=str(chat_model))
  config = config._replace(
    datasets=[data, Config(TextInput, path='x', seq_len=8, batch_size=2, tokenizer_tpl=tokenizer)]
  )
  assert 'tokenizer.json' in export_run(config, 'copied', 'exported with that of the data')
