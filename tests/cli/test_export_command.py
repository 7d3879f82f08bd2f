"""`praxis-lite export`: what it writes, and what it says of a mistake before anything is restored."""

import re

import jax
import pytest

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.cli.main import main
from praxis_lite.experiments.lm import SyntheticLmTiny
from praxis_lite.training import PartitionedTask
from praxis_lite.training.experiment import configure

LM = '--exp=lm.SyntheticLmTiny'
POSITIONS = (
  '--set=task.model.lm_tpl.position_tpl=praxis_lite.layers.LearnedPositions',
  '--set=task.model.lm_tpl.position_tpl.max_len=12',
  '--set=task.model.decoder_tpl.max_decode_steps=9',
)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A directory with a checkpoint of first values."""
  directory = tmp_path_factory.mktemp('run')
  config = configure(SyntheticLmTiny)
  task = PartitionedTask(config.task.instantiate(), config.datasets[0].instantiate().batch_struct())
  checkpointer = Checkpointer(directory)
  checkpointer.save(3, task.init_state(jax.random.key(0)), task.unpadded_state_shapes, None)
  checkpointer.close()
  return directory


def test_export_writes_the_model_of_a_checkpoint(saved, tmp_path, capsys):
  out = tmp_path / 'out'
  flags = ['--inputs=ids', '--format=stablehlo', '--nocompilation_cache', '--step=3']
  assert main(['export', LM, f'--job_log_dir={saved}', f'--out={out}', *flags]) == 0
  assert capsys.readouterr().out == f'wrote {out}\n'
  program = jax.export.deserialize((out / 'forward.stablehlo').read_bytes())
  assert [str(x.shape[0]) for x in program.out_avals] == ['batch']
  assert '| `ids` | batch x ' in (out / 'README.md').read_text()


@pytest.mark.parametrize(
  ('arguments', 'message'),
  {
    'out': ([], r'--out is missing: name a directory for the files, as in --out=exported'),
    'full': (['--out={run}'], r'out: .* exists and is not an empty directory; name another one, or remove it'),
    'what': (['--out={new}', '--what=all'], r'flag --what=all: value should be one of <forward\|decode>'),
    'format': (['--out={new}', '--format=onnx'], r'flag --format=.*onnx.*: value should be one of <stablehlo\|saved_m'),
    'platform': (['--out={new}', '--platforms=xpu'], r"platforms: expected 'cpu', 'cuda', 'rocm' or 'tpu', got 'xpu'"),
    'inputs': (['--out={new}', '--inputs=idz'], r"--inputs=idz: not in a batch\. Did you mean 'ids'\? There are: ids"),
    'positions': (
      ['--out={new}', '--what=decode', *POSITIONS, '--prompt_length=8'],
      r'max_tokens: prompts of 8 tokens .* and 9 tokens after them .*, which is task\.model\.decoder_tpl\.max_decode_st'
      r'eps\) need 16 positions, and the model has 12; pass max_tokens \(--max_tokens\) of at most 5, or a smaller',
    ),
    'decode only': (
      ['--out={new}', '--prompt_length=8'],
      r'--prompt_length is for --what=decode; leave it out, or add ',
    ),
    'forward only': (['--out={new}', '--what=decode', '--inputs=ids'], r'--inputs is for --what=forward; leave it out'),
    'step': (['--out={new}', '--step=7'], r'there is no checkpoint of step 7 in .*; there are \[3\]'),
    'model': (
      ['--out={new}', '--exp=digits.DigitsMlp', '--what=decode'],
      r"task\.model: ClassificationModel has no prefill and extend_step, so it cannot be exported as 'decode'; 'forwar",
    ),
  }.values(),
)
def test_a_mistake_is_one_line_and_writes_nothing(saved, tmp_path, capsys, arguments, message):
  given = [text.format(run=saved, new=tmp_path / 'new') for text in arguments]
  assert main(['export', LM, f'--job_log_dir={saved}', '--nocompilation_cache', *given]) == 2
  out, err = capsys.readouterr()
  assert re.fullmatch(f'praxis-lite export: error: {message}.*\n', err) and out == ''
  assert not (tmp_path / 'new').exists()
