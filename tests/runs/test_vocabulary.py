"""A run keeps its vocabulary: its ids are the same when the text has changed, and when it is gone."""

import json

import pytest

from praxis_lite.cli import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, DataError
from praxis_lite.inputs import CharTokenizer, TextInput
from praxis_lite.models import transformer_lm
from praxis_lite.runs import run_eval, run_train
from praxis_lite.runs.records.record import read_record
from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.training.experiment import BaseExperiment, configure

pytestmark = pytest.mark.usefixtures('shared_programs')


class CharLm(BaseExperiment):
  """A tiny model of the characters of text.txt."""

  def datasets(self):
    tokenizer = Config(CharTokenizer, path='text.txt')
    text = Config(TextInput, path='text.txt', tokenizer_tpl=tokenizer, seq_len=8, batch_size=2)
    train = text.clone(name='train', split='train', packing='windows', is_training=True)
    return [train, text.clone(name='validation', split='validation')]

  def task(self):
    model = transformer_lm(
      style='gpt2', vocab_size=12, model_dims=8, num_layers=1, num_heads=1, max_len=8, use_bias=False
    )
    task = Config(LanguageModelTask, model=model)
    task.train.set(num_train_steps=2, log_interval_steps=1)
    return task


CONFIG = configure(CharLm)
TEXT = 'a line of b\n' * 40


@pytest.fixture
def run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'text.txt').write_text(TEXT)
  (tmp_path / 'experiment.py').write_text(
    'from praxis_lite.training.registry import register\nfrom test_vocabulary import CharLm\nregister(CharLm)\n'
  )
  run_train(CONFIG, 'run')
  return tmp_path


def _decode(*flags):
  return main.main(['decode', '--exp=experiment.py:CharLm', '--job_log_dir=run', '--max_tokens=20', *flags])


@pytest.mark.slow
def test_a_run_keeps_its_vocabulary(run, capfd):
  assert json.loads((run / 'run' / 'vocabulary.json').read_text()) == {'vocabulary': '\n abefilno'}
  longer = CONFIG._replace(task=CONFIG.task.clone())
  longer.task.train.num_train_steps = 3
  capfd.readouterr()
  run_train(longer, 'run')
  (change,) = read_record('run').launches[-1].changes
  assert change == 'task.train.num_train_steps: 2 -> 3' and 'vocabulary' not in capfd.readouterr().out
  run_train(longer, 'run')
  assert 'differs' not in capfd.readouterr().out
  (before,) = run_eval(CONFIG, 'run').values()
  capfd.readouterr()
  assert _decode('--prompt=a li', '--seed=3') == 0
  captured = capfd.readouterr()
  assert 'note: the model sees only the last 8 of up to 23 tokens' in captured.err

  (run / 'text.txt').write_text('!' + TEXT)  # '!' would be among the first ids, and shift all others.
  with pytest.raises(DataError, match=r"datasets\[0\]\.path: '!' \(U\+0021\) is not among the 10 characters"):
    run_train(CONFIG, 'run')
  (run / 'text.txt').write_text(TEXT.replace('e', 'o'))  # Without 'e' all ids after it would be smaller.
  assert use_kept_vocabulary(CONFIG, 'run').datasets[0].tokenizer_tpl.vocabulary == '\n abefilno'
  assert CONFIG.datasets[0].tokenizer_tpl.vocabulary is None
  (after,) = run_eval(CONFIG, 'run').values()
  assert after['loss'] != before['loss']

  (run / 'text.txt').unlink()
  capfd.readouterr()
  assert _decode('--prompt=a li', '--seed=3') == 0
  assert capfd.readouterr().out == captured.out
  assert _decode('--prompt=é') == 2
  assert "--prompt='é': 'é' (U+00E9) is not among the 10 characters of the vocabulary" in capfd.readouterr().err

  kept = [data.clone() for data in CONFIG.datasets]
  kept[1].tokenizer_tpl.vocabulary = '\n abefilno'
  assert (
    use_kept_vocabulary(CONFIG._replace(datasets=kept), 'run').datasets[0].tokenizer_tpl.vocabulary == '\n abefilno'
  )
  kept[1].tokenizer_tpl.vocabulary = '\n abefilnoz'
  with pytest.raises(CheckpointError, match=r'datasets\[1\]: the vocabulary of its CharTokenizer is not the one that'):
    run_eval(CONFIG._replace(datasets=kept), 'run')

  (run / 'run' / 'vocabulary.json').write_text('{')
  with pytest.raises(CheckpointError, match=r'vocabulary\.json cannot be read'):
    run_eval(CONFIG, 'run')


def test_a_directory_without_a_checkpoint_has_no_vocabulary(tmp_path):
  (tmp_path / 'vocabulary.json').write_text(json.dumps({'vocabulary': 'xyz'}))
  (tmp_path / 'checkpoints' / '5.orbax-checkpoint-tmp').mkdir(parents=True)  # Of a run that was killed.
  assert use_kept_vocabulary(CONFIG, tmp_path) is CONFIG
