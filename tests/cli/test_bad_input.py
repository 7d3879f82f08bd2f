"""What users mistype, and what else is wrong with what they give: one clear line, an exit code, and nothing written.

Most are run in this process, which has 8 devices; `test_commands_as_processes.py` has some of them as real ones.
"""

from __future__ import annotations

import os
import re
import shutil

import pytest

from praxis_lite.cli import sweep_runs
from praxis_lite.cli.main import COMMANDS, main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import UserError
from praxis_lite.training.task import SingleTask

TINY = '--exp=lm.SyntheticLmTiny'
STDLIB = '--exp=lm.StdlibLmTiny'
SOFTMAX = 'task.model.lm_tpl.softmax_tpl'
AXES = r"\('replica', 'data', 'mdl'\)"


def fails(capsys, *arguments):
  """Runs a command that has to fail, and returns its message."""
  caching = ['--nocompilation_cache'] if arguments[0] in ('train', 'eval', 'decode') else []
  code = main([*arguments[:1], *caching, *arguments[1:]])
  out, err = capsys.readouterr()
  lines = err.splitlines()
  assert code == 2, f'exit code {code}: {out}{err}'
  assert len(lines) == 1, err
  assert out == ''
  start = f'praxis-lite {arguments[0]}: error: '
  assert lines[0].startswith(start)
  return lines[0].removeprefix(start)


# ---------------------------------------------------------------- the command line

MESH, WT = '--exp=lm.SyntheticLmTiny', 'task.model.lm.softmax.weight_split_dims_mapping.wt'
COMMAND_LINES = {
  'unknown command': (['trian', TINY], r"no command 'trian'\. Did you mean 'train'\?"),
  'an optimizer without its arguments': (
    ['train', TINY, '--job_log_dir=x', '--set=task.train.learner.optimizer=optax.chain'],
    r'learner\.optimizer: chain cannot be made: not enough values',
  ),
  'misspelled version': (['--versio'], r"no command '--versio'\. Did you mean '--version'\?"),
  'no run for --exp': (
    ['show', '--exp=runs/none'],
    r"^--exp: there is no experiment 'runs/none', and no run; there is no",
  ),
  'no optax transformation': (
    ['train', TINY, '--job_log_dir=x', '--set=task.train.learner.optimizer=os.system'],
    r'learner\.optimizer\.command: a value is required but not set \(a field of system\)$',
  ),
  'explain': (['explain', TINY], r"no command 'explain'; `praxis-lite show --sharding` does this"),
  'chat': (['chat', '--job_log_dir=x'], r"no command 'chat'; `praxis-lite decode --chat` does this"),
  'unknown flag': (['train', TINY, '--job_logdir=x'], r"'job_logdir'\. Did you mean --job_log_dir\?; .*--help` lists"),
  'field of PyTorch as flag': (
    ['train', TINY, '--lr=1'],
    r"'lr'\. Did you mean --set 'task\.train\.learner\.learning_rate=",
  ),
  'flag of Lightning': (['train', TINY, '--output_dir=x'], r"'output_dir'\. Did you mean --job_log_dir\?; "),
  'two spellings of a flag': (
    ['show', TINY, '--job_log_dir=a', '--job-log-dir=b'],
    r'^--job_log_dir and --job-log-dir are the same flag; give it once$',
  ),
  'empty trust': (
    ['show', TINY, '--trust='],
    r'^--trust is empty: name a module or file, as in --trust=my_layers\.py$',
  ),
  'two loggers in one flag': (
    ['train', TINY, '--job_log_dir=x', '--track', 'wandb,mlflow'],
    r'^--track=wandb,mlflow: repeat the flag for each logger: --track=wandb --track=mlflow$',
  ),
  'no directory of checkpoints': (['checkpoints', 'show', 'nodir'], r'^there is no directory nodir$'),
  'directory as flag': (
    ['checkpoints', 'list', '--job_log_dir=x'],
    r'name directories without a flag, as in praxis-lite checkpoints list runs/1; `praxis-lite checkpoints --help`',
  ),
  'newest step': (['eval', TINY, '--step=last'], r'a step such as 500, or best; without --step, the newest is used$'),
  'number for a config': (
    ['show', TINY, '--set', 'task.model.lm.transformer.layers.ff.dropout=0.1'],
    r'ff_tpl\.dropout_tpl: expected .* got 0\.1 \(float\); this is a config: set its fields, such as rate',
  ),
  'schedule in lower case': (
    ['show', TINY, '--set', 'task.train.learner.schedule=cosine'],
    r"got 'cosine' \(str\)\. Did you mean praxis_lite\.training\.learning\.Cosine\?$",
  ),
  'misspelled optimizer': (
    ['show', TINY, '--set', 'task.train.learner.optimizer=adamx'],
    r"got 'adamx' \(str\)\. Did you mean optax\.adam",
  ),
  'misspelled tokenizer': (
    ['show', '--exp=lm.StdlibLmTiny', '--set', 'datasets[*].tokenizer_tpl=ByteTokeniser'],
    r"got 'ByteTokeniser' \(str\)\. Did you mean praxis_lite\.inputs\.ByteTokenizer\?$",
  ),
  'page below a file': (
    ['show', TINY, f'--html={__file__}/a/x.html'],
    rf'cannot write the page .*: {__file__} is a file$',
  ),
  'no checkpoints': (['checkpoints', 'show', '.'], r'^there is no checkpoint in checkpoints$'),
  'devices of check': (
    ['check', MESH, '--devices=4', '--set=task.ici_mesh_shape=(2,2,2)'],
    r'--devices=4: task\.ici_mesh_shape = \(2, 2, 2\) needs 8 devices',
  ),
  'devices and chips': (['show', TINY, '--devices=8', '--compiled=cpu:8'], r'--devices: --compiled names the chips'),
  'devices of show': (
    ['show', MESH, '--devices=7', '--set=task.ici_mesh_shape=(2,2,2)'],
    r'--devices=7: task\.ici_mesh_shape = \(2, 2, 2\) needs 8 devices',
  ),
  'devices of plan': (['plan', TINY, '--devices=8'], r'--devices: plan uses no devices .*; --topology names the chips'),
  'field as flag': (
    ['train', TINY, '--batch_size=3'],
    r"'batch_size'\. Did you mean --set 'datasets\[\*\]\.batch_size=.*and --set path=value sets a field",
  ),
  'field of Pax': (['show', TINY, '--set', 'task.ICI_MESH_SHAPE=8'], r"Did you mean 'ici_mesh_shape'\?"),
  'field of the Trainer': (['show', TINY, '--set', 'task.train.max_steps=3'], r"Did you mean 'num_train_steps'\?"),
  'axis of T5X': (['show', MESH, '--set', f"{WT}=('model',None)"], r"'model' is not .*Did you mean 'mdl'\?"),
  'no such flag at all': (['train', TINY, '--qqq=1'], r"Unknown command line flag 'qqq'; `praxis-lite train --help`"),
  'no experiment': (['train', '--job_log_dir=x'], r'--exp is missing: .*--exp=lm\.StdlibLm; `praxis-lite list`'),
  'no directory': (['train', TINY], r'--job_log_dir is missing: .*--job_log_dir=runs/1'),
  'no name': (['train', '--job_log_dir=x', 'lm.StdlibLm'], r"unexpected argument 'lm.StdlibLm'; .* --name=value"),
  'no exp': (['train', '--job_log_dir=x', 'my.py:Mine'], r'--name=value, as in --exp=my.py:Mine$'),
  'no set': (['train', TINY, 'task.name=a'], r'--name=value, as in --set=task.name=a$'),
  'no job_log_dir': (['eval', '.'], r'--name=value, as in --job_log_dir=\.$'),
  'prompt without a flag': (
    ['decode', '.', 'def main(): "x"'],
    r"""argument '\.'; flags are written --name=value, as in --job_log_dir=\. --prompt='def main\(\): "x"'$""",
  ),
  'prompt without a flag, after the run': (
    ['decode', '--job_log_dir=x', 'once'],
    r"unexpected argument 'once'; flags are written --name=value, as in --prompt=once$",
  ),
  'step without a flag': (['eval', 'runs/none', '500'], r'--name=value, as in --job_log_dir=runs/none --step=500$'),
  'folders without flags': (['export', 'runs/none', 'out'], r', as in --job_log_dir=runs/none --out=out$'),
  'folders of an export-hf': (['export-hf', 'runs/none', 'hf/out'], r', as in --job_log_dir=runs/none --out=hf/out$'),
  'folders of an import-hf': (['import-hf', 'hf/llama', 'llama'], r"'llama'; flags .*, as in --job_log_dir=llama$"),
  'run without a flag': (
    ['train', 'lm.StdlibLm', 'tiny', 'task.name=a'],
    r'=lm\.StdlibLm --job_log_dir=tiny --set=task',
  ),
  'run among the files': (
    ['predict', '.', 'new.jsonl'],
    r'^\. is a directory; name a run by its flag, as in --job_log_',
  ),
  'no devices': (['train', TINY, '--job_log_dir=x', '--devices=0'], r'--devices=0: 0 is not a positive integer'),
  'some devices': (['train', TINY, '--job_log_dir=x', '--devices=some'], r'--devices=some: expected an integer'),
  'spaces around =': (
    ['show', TINY, '--set', 'task.train.num_train_steps', '=', '5'],
    r"argument '='; an override is one word, as in --set=task\.train\.num_train_steps=5, or in quotes: "
    r'--set "task\.train\.num_train_steps = 5"$',
  ),
  'a space after =': (['eval', TINY, '--set', 'task.name=', 'a'], r'one word, as in --set=task\.name=a, or in quotes'),
  'a space before =': (['eval', TINY, '--set', 'task.name', '=a'], r'one word, as in --set=task\.name=a, or in quotes'),
  'spaces around = after an experiment': (
    ['train', 'lm.StdlibLm', '--job_log_dir=x', '--set', 'task.name', '=', 'a'],
    r"argument 'lm\.StdlibLm'; flags are written --name=value, as in --exp=lm\.StdlibLm; an override is one "
    r'word, as in --set=task\.name=a, or in quotes: --set "task\.name = a"$',
  ),
  'flag of train for launch': (
    ['launch', '--processes=2', '--job-log-dir=runs/1'],
    r'^--job_log_dir is a flag of train; flags of train go after --, as in praxis-lite launch --processes=2 -- train ',
  ),
  'override for launch': (['launch', '--set', 'task.name=a'], r'^--set is a flag of train; flags of train go after --'),
  'number of processes': (['launch', '--num_processes=2'], r'no flag --num_processes, .*; --processes=2 says how many'),
  'flag of transformers': (['decode', '--num_beams=2'], r"'num_beams'\. Did you mean --beam_size\?; "),
  'no flag of launch': (['launch', '--proceses=2'], r"flag 'proceses'\. Did you mean --processes"),
  'half a bracket': (
    ['sweep', TINY, '--job_log_dir=x', '--set', 'task.ici_mesh_shape=(1,1,1),(1,2,1'],
    r"'task\.ici_mesh_shape=\(1,1,1\),\(1,2,1': \( is not closed$",
  ),
  'temperature': (['decode', TINY, '--job_log_dir=x', '--temperature=hot'], r'--temperature=hot: expected a number'),
  'not a finite number': (['check', TINY, '--replicated_mib=nan'], r'--replicated_mib=nan: expected a finite number'),
  'an infinite width': (['coordinate-check', TINY, '--widths=inf,2'], r"--widths: 'inf' is not a number"),
  'infinite': (['export-hf', '--out=x', '--max_file_gb=inf'], r'--max_file_gb=inf: expected a finite number'),
  'seed': (['train', TINY, '--job_log_dir=x', '--seed=-1'], r'--seed=-1: .*in the range \[0, 4294967295\]'),
  'set what': (['show', TINY, '--set'], r'Missing value for flag --set'),
  'unknown experiment': (['show', '--exp=lm.StdlibLmTyni'], r"no experiment 'lm\.StdlibLmTyni'\. Did you mean lm\."),
  'unknown module': (['show', '--exp=no_such.module.X'], r"no experiment 'no_such\.module\.X'"),
  'not even a file': (['show', '--exp=:'], r"':' names no Python file; write path/to/file\.py:MyExperiment"),
  'no Python file': (['show', '--exp=texts/a.txt:X'], r"'texts/a\.txt:X' names no Python file; write path/to/file\.py"),
  'part of a name': (['show', '--exp=lm'], r"^there is no experiment 'lm'\. `praxis-lite list lm` prints them all\.$"),
  'runs by a flag': (
    ['runs', '--job_log_dir=x'],
    r"'job_log_dir'; name the directory without a flag, as in praxis-lit",
  ),
  'runs of a file': (['runs', __file__], r'\.py is a file; name a directory$'),
  'text for fields': (
    ['show', TINY, '--set=task.train.init_from=runs/1'],
    r"init_from: expected the config of an InitFromParams, got 'runs/1' \(str\); set its fields, such as path, step, ",
  ),
  'no path of a tokenizer': (
    ['train', STDLIB, '--job_log_dir=x', '--set=datasets[1].tokenizer_tpl=praxis_lite.inputs.HfTokenizer'],
    r'^datasets\[1\]\.tokenizer_tpl\.path: a value is required but not set \(a field of HfTokenizer\); name '
    r'the folder of a tokenizer, or take bytes as tokens: tokenizer_tpl=praxis_lite\.inputs\.ByteTokenizer$',
  ),
  'no page': (['show', TINY, '--html='], r'--html is empty: name a file'),
  'page in a directory': (['show', TINY, '--html=/'], r'cannot write the page /: Is a directory'),
  'boolean': (['show', TINY, '--json=maybe'], r'--json=maybe: expected true or false$'),
  'unknown file': (['show', '--exp=no/such/file.py:X'], r"there is no file 'no/such/file\.py'"),
}


@pytest.mark.slow_cases
def test_flags_of_a_format_need_one(capsys, tmp_path):
  flags = ('--group_size=64', '--nosymmetric', '--layers=a', '--percentile=99', '--scale_dtype=float16')
  told = fails(capsys, 'quantize', TINY, f'--job_log_dir={tmp_path}', f'--out={tmp_path / "out"}', *flags)
  assert '--group_size, --layers, --symmetric, --percentile, --scale_dtype: without --format' in told


@pytest.mark.parametrize(('arguments', 'message'), COMMAND_LINES.values(), ids=COMMAND_LINES)
def test_a_mistyped_command_line_is_told(capsys, arguments, message):
  assert re.search(message, fails(capsys, *arguments))


ACCEPTED = {
  'spaces in quotes': (['--set', 'task.train.num_train_steps = 5'], 'task.train.num_train_steps = 5\n'),
  'null is None': (['--set=task.train.eval_interval_steps=null'], 'task.train.eval_interval_steps = None\n'),
  'text null': (['--set', "task.name='null'"], "task.name = 'null'\n"),
  'an apostrophe': (['--set', "task.name=don't"], 'task.name = "don\'t"\n'),
  'quotes': (['--set', 'task.name="a"'], "task.name = 'a'\n"),
}


@pytest.mark.parametrize(('arguments', 'line'), ACCEPTED.values(), ids=ACCEPTED)
def test_other_spellings_of_an_override(capsys, arguments, line):
  assert main(['show', TINY, '--nosummary', '--noparameters', '--all', *arguments]) == 0
  assert line in capsys.readouterr().out


@pytest.mark.parametrize('command', [c for c in COMMANDS if c != 'completion'])
def test_dashes_in_the_name_of_a_flag_are_underscores(command):
  values = COMMANDS[command].flags
  for flag in values.list_flags():
    dashes = flag.name.replace('_', '-')
    spellings = {f'--{dashes}=a-b': f'--{flag.name}=a-b', f'--{dashes}': f'--{flag.name}'}
    if flag.boolean:
      spellings |= dict.fromkeys((f'--no{dashes}', f'--no-{dashes}'), f'--no{flag.name}')
    for given, wanted in spellings.items():
      assert list(values._replace_dashes([given])) == [wanted]
  unchanged = ['a-b', '--no-such-flag', '--', '--job-log-dir']
  assert list(values._replace_dashes(unchanged)) == unchanged


@pytest.mark.parametrize('command', [c for c in COMMANDS if c != 'list'])
def test_every_command_shows_where_a_mistake_was_found_if_asked(command, capsys):
  assert main([command, '/no/such/place', '--traceback', '--no_such_flag']) == 2
  err = capsys.readouterr().err
  assert 'Traceback' in err and "Unknown command line flag 'no_such_flag'" in err.splitlines()[-1]


def test_a_sweep_whose_count_of_devices_fails_says_how(monkeypatch):
  monkeypatch.setattr(sweep_runs.sys, 'executable', '/bin/false')
  with pytest.raises(UserError, match='the process that counts the devices ended with exit code 1'):
    sweep_runs.count_devices([Config(SingleTask, ici_mesh_shape=(2,), mesh_axis_names=('data',))])


# ---------------------------------------------------------------- the config

OVERRIDES = {
  'path': (
    'task.train.num_train_step=5',
    r"task\.train \(.*\) has no field 'num_train_step'\. Did you mean 'num_train_s",
  ),
  'name alone': (
    'learning_rate=1e-3',
    r"has no entry 'learning_rate'.* Did you mean task\.train\.learner\.learning_rate\?$",
  ),
  'part of a path': (
    'task.train.learning_rate=1e-3',
    r"no field 'learning_rate'.* Did you mean task\.train\.learner\.learning_rate\?$",
  ),
  'name alone, mistyped': (
    'lerning_rate=1e-3',
    r"has no entry 'lerning_rate'.* Did you mean task\.train\.learner\.learning_rate\?$",
  ),
  'name of a parent, near another': (
    'task.train.learner.optimizer.ema_decay=0.9',
    r"no field 'ema_decay'.* Did you mean task\.train\.learner\.ema_decay\?$",
  ),
  'logger': ('task.train.loggers=(my_log.Csv,)', r'\(str\); configs of classes of your own are set in Python$'),
  'name of many': ('fprop_dtype=float32', r'Did you mean task\.\S+, task\.\S+, task\.\S+ and \d+ more\?$'),
  'root': ('tsk.train.num_train_steps=5', r"no entry 'tsk'\. Its .* Did you mean task\.train\.num_train_steps\?$"),
  'quote': ('task.name="abc', r'^task\.name: a quote is not closed: "abc; write "text", or text without quotes$'),
  'quote at the end': ("task.name=abc'", r"^task\.name: a quote is not closed: abc'; write 'text', or text"),
  'bracket': (
    'task.ici_mesh_shape=(1,2,1',
    r"^task\.ici_mesh_shape: .*, got '\(1,2,1' \(str\); \( is not closed$",
  ),
  'quote in brackets': ("task.mesh_axis_names=('a, b)", r"^task\.mesh_axis_names: expected .*; ' is not closed$"),
  'null': ('task.name=null', r"^task\.name: expected str, got null; as text, it is written \"'null'\"$"),
  'None': ('task.name=None', r"^task\.name: expected str, got None; as text, it is written \"'None'\"$"),
  'null of a number': ('task.train.num_train_steps=null', r'^task\.train\.num_train_steps: expected int, got None$'),
  'index': ('datasets[5].batch_size=4', r'datasets has no entry \[5\]; its entries are \[0\] to \[1\]'),
  'no =': ('task.train.num_train_steps', r"'task\.train\.num_train_steps' is not an override; write path=value"),
  'name for an index': (
    'datasets[validation].batch_size=4',
    r"'datasets\[validation\]\.batch_size=4' is not an override; \[validation\] is no index; write datasets\[1\] for "
    r'this one, or \[\*\] for all entries',
  ),
  'unknown name for an index': (
    'datasets[test].batch_size=4',
    r'\[test\] is no index; write a number, or \[\*\] for all',
  ),
  'key without quotes': ('task.train.inputs_split_mapping[map_2d]=None', r'or a key of a dict in quotes$'),
  'regular expression': (
    'task.train.learner.bprop_variable_exclusion=lm[',
    r"^task\.train\.learner\.bprop_variable_exclusion: 'lm\[' is not a regular expression",
  ),
  'pattern of no variable': (
    'task.train.learner.bprop_variable_inclusion=embeding',
    r"^task\.train\.learner\.bprop_variable_inclusion: 'embeding' matches no variable\. Did you mean",
  ),
  'type': ('task.train.num_train_steps=abc', r"task\.train\.num_train_steps: expected int, got 'abc'"),
  'float': ('task.train.num_train_steps=1.5', r'task\.train\.num_train_steps: expected int, got 1\.5'),
  'rate': ("task.train.learner.learning_rate='abc'", r"task\.train\.learner\.learning_rate: expected float, got 'abc'"),
  'dtype': ('task.model.fprop_dtype=float33', r'task\.model\.fprop_dtype: expected the name of a dtype'),
  'optimizer': ('task.train.learner.optimizer=optax.adamm', r"optimizer: optax has no 'adamm'\. Did you mean 'adam'"),
  'name of an optimizer': ('task.train.learner.optimizer=adam', r"got 'adam' \(str\)\. Did you mean optax\.adam\?$"),
  'steps': ('task.train.num_train_steps=-1', r'task\.train\.num_train_steps = -1: expected an integer of at least 1'),
  'warm-up': ('task.train.learner.schedule.warmup_steps=-3', r'task\.train: .*\.warmup_steps: expected at least 0'),
  'accumulation': (
    'task.train.learner.num_microbatches=0',
    r'task\.train\.learner\.num_microbatches: expected at least',
  ),
  'model': ('task.model=None', r'task\.model: expected the config of a BaseModel, got None'),
  'no settings': ('task.train=None', r'^task\.train: expected the config of a TrainParams, got None'),
  'no model': ('task.model=optax.adamw', r'^task\.model: expected the config of a BaseModel, got .*adamw'),
  'no batches': ('task.evaluate.max_batches=0', r'^task\.evaluate\.max_batches = 0: expected at least 1, or None'),
  'dtype of weights': ('task.model.dtype=int32', r'^task\.model\.dtype: expected a floating dtype, .*got int32'),
  'dtype of a pass': ('task.model.fprop_dtype=int8', r'\.fprop_dtype: expected a floating dtype, .*got int8'),
  'no heads': ('task.model.num_heads=0', r'^task\.model\.num_heads: expected at least 1, got 0$'),
  'kv heads': ('task.model.num_kv_heads=2', r'attention\.num_kv_heads: 2 does not divide num_heads, 3'),
  'no layers': ('task.model.num_layers=0', r'^task\.model\.num_layers: expected at least 1, got 0$'),
  'no dims': (
    'task.model.model_dims=0',
    r'^task\.model\.model_dims: expected at least 1, got 0; it makes lm\.embedding\.w of shape \(37, 0\)$',
  ),
  'two sizes': (
    'task.model.lm_tpl.model_dims=32',
    r'model_dims is 18, but .*lm_tpl\.model_dims is 32; set one of them',
  ),
  'small vocabulary': (
    'task.model.vocab_size=20',
    r'datasets\[0\]: train: its ids go up to 36, but task\.model\.vocab_size is 20; it must be at least 37',
  ),
  'no training data': ('datasets[0].is_training=False', r'exactly one input must have is_training=True, and 0 of 2'),
  'batch': ('datasets[1].batch_size=0', r'datasets\[1\]\.batch_size: expected an integer of at least 1'),
  # Shardings.
  'unknown axis': (
    f'{SOFTMAX}.weight_split_dims_mapping.wt=(model, data)',
    r"^task\.model\.lm\.softmax\.weight_split_dims_mapping\.wt: axis 'model' is not a mesh axis; "
    rf"mesh_axis_names = {AXES}\. Did you mean 'mdl'\?$",
  ),
  'unknown axis of an activation': (
    f'{SOFTMAX}.activation_split_dims_mapping.out=(replica, None, model)',
    r"^task\.model\.lm\.softmax\.activation_split_dims_mapping\.out: axis 'model' is not a mesh axis",
  ),
  'axis twice': (
    f'{SOFTMAX}.weight_split_dims_mapping.wt=(mdl, mdl)',
    r"^task\.model\.lm\.softmax\.weight_split_dims_mapping\.wt: mesh axis 'mdl' occurs twice in \('mdl', 'mdl'\)",
  ),
  'wrong rank': (
    f'{SOFTMAX}.weight_split_dims_mapping.wt=(mdl, data, None)',
    r"^lm\.softmax\.w: mapping \('mdl', 'data', None\) has 3 entries, but the tensor has 2 dimensions; give one entry",
  ),
  'missing map': (
    "task.train.inputs_split_mapping={'map_1d': None}",
    r"^task\.train: inputs_split_mapping has no 'map_2d', and an input of shape \(6, 32\) needs it",
  ),
  'name of a map': (
    'task.train.inputs_split_mapping.map_x=(data, None)',
    r'^task\.train: inputs_split_mapping\.map_x: its keys are map_1d, map_2d, \.\.\.',
  ),
  'axis of a map': (
    'task.train.inputs_split_mapping.map_2d=(dta, None)',
    r"^task\.train: inputs_split_mapping\.map_2d: axis 'dta' is not a mesh axis.*Did you mean 'data'\?$",
  ),
  'rank of a map': (
    'task.train.inputs_split_mapping.map_2d=(data, None, None)',
    r'^task\.train: inputs_split_mapping\.map_2d: mapping .* has 3 entries, but the tensor has 2 dimensions',
  ),
  'large mesh': (
    'task.ici_mesh_shape=(3, 3, 1)',
    r"^task: ici_mesh_shape: .* needs 9 devices, and there are 8; make it smaller, as in --set 'task\.ici_mesh_shape="
    r"\(8,1,1\)', or simulate them on the CPU: pass --devices=9, or in Python call simulate_cpu_devices\(9\) first$",
  ),
  'rank of the mesh': (
    'task.ici_mesh_shape=(1, 2)',
    r'^task: ici_mesh_shape = \(1, 2\) has 2 sizes, but mesh_axis_names',
  ),
  'empty mesh': ('task.ici_mesh_shape=(1, 0, 1)', r"^task: ici_mesh_shape = .*: the size of 'data' must be a positive"),
  'rule of a strategy': (
    """task.strategy=[('.*', 'fsdq(axis="data")')]""",
    r"^task\.strategy: .*no sharding op 'fsdq' is registered.*Did you mean 'fsdp'\?$",
  ),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize(('override', 'message'), OVERRIDES.values(), ids=OVERRIDES)
def test_a_config_that_cannot_be_is_told_and_nothing_is_written(capsys, tmp_path, override, message):
  told = fails(capsys, 'train', TINY, f'--job_log_dir={tmp_path / "runs" / "1"}', '--set', override)
  assert re.search(message, told), told
  assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_smaller_than_that_of_the_tokenizer_is_told(capsys, tmp_path):
  told = fails(capsys, 'train', STDLIB, f'--job_log_dir={tmp_path}', '--set', 'task.model.vocab_size=200')
  assert 'its ids go up to 255, but task.model.vocab_size is 200; it must be at least 256' in told


# ---------------------------------------------------------------- data


def train_text(capsys, directory, *overrides):
  sets = [word for override in overrides for word in ('--set', override)]
  return fails(capsys, 'train', '--exp=lm.TextLm', f'--job_log_dir={directory}', *sets)


def test_a_required_field_that_is_not_set_is_told(capsys, tmp_path):
  run = tmp_path / 'run'
  told = 'datasets[{}].path: a value is required but not set (a field of TextInput), as in --set '
  assert train_text(capsys, run) == told.format(0) + "'datasets[*].path=...'"
  assert train_text(capsys, run, 'datasets[0].path=x') == told.format(1) + "'datasets[1].path=...'"
  assert train_text(capsys, run, 'path=x').endswith('. Did you mean datasets[*].path, task.train.init_from.path?')
  for path in ('dataset[*].path', 'dataset.path'):
    entries = "no entry 'dataset'. Its entries: task, datasets, decode_datasets. Did you mean datasets[*].path?"
    assert train_text(capsys, run, f'{path}=x').endswith(entries)
  told = "datasets is a list, so it has no 'path'; write datasets[0] or datasets[*]. Did you mean datasets[*].path?"
  assert train_text(capsys, run, 'datasets.path=x') == told
  assert not run.exists()


def test_data_that_cannot_be_read_is_told_before_anything_is_written(capsys, tmp_path):
  run = tmp_path / 'run'
  (tmp_path / 'folder').mkdir()
  (tmp_path / 'empty.txt').write_text('')
  (tmp_path / 'text.txt').write_text('some text, and some more of it. ' * 1000)
  cases = {
    'nothing/*.txt': r'no file matches .*nothing/\*\.txt',
    'nothing.txt': r'there is no .*nothing\.txt|no file .*nothing\.txt',
    'empty.txt': r'empty\.txt is empty',
    'folder': r'there are no files in the directory .*folder',
  }
  for name, message in cases.items():
    told = train_text(capsys, run, f'datasets[*].path={tmp_path / name}')
    assert re.match(rf'datasets\[0\]\.path: .*(?:{message})', told), told
  # The data to evaluate on, too: better now than after a day of training.
  told = train_text(
    capsys, run, f'datasets[0].path={tmp_path / "text.txt"}', f'datasets[1].path={tmp_path / "empty.txt"}'
  )
  assert told.startswith('datasets[1].path: ') and told.endswith('empty.txt is empty')
  for path, message in (('3', 'there is no file or directory 3'), ('[3]', 'no file matches [3]')):
    assert train_text(capsys, run, f'datasets[*].path={path}') == f'datasets[0].path: {message}'
  assert train_text(capsys, run, 'datasets[*].path=').endswith("datasets[0].path: there is no file or directory ''")
  assert not run.exists()


@pytest.mark.skipif(not os.path.exists('/proc/self/mem'), reason='needs a file that even root cannot read')
def test_data_that_the_system_refuses_is_told(capsys, tmp_path):
  told = train_text(capsys, tmp_path / 'run', 'datasets[*].path=/proc/self/mem')
  assert told.startswith('datasets[0].path: cannot read /proc/self/mem: ')


# ---------------------------------------------------------------- the directory of the run


def test_a_directory_that_cannot_be_written_is_told(capsys, tmp_path):
  file = tmp_path / 'file'
  file.write_text('kept')
  for directory in (file, file / 'run'):
    told = fails(capsys, 'train', TINY, f'--job_log_dir={directory}')
    assert told == f'job_log_dir {directory} is not writable: {file} is a file'
  if os.path.isdir('/proc/self'):
    assert 'job_log_dir /proc/run is not writable: ' in fails(capsys, 'train', TINY, '--job_log_dir=/proc/run')
  assert file.read_text() == 'kept'


@pytest.mark.parametrize('command', [('eval',), ('decode', '--prompt=def ')], ids=['eval', 'decode'])
def test_without_a_checkpoint_there_is_nothing_to_evaluate_or_to_prompt(capsys, tmp_path, command):
  run = tmp_path / 'run'
  told = fails(capsys, command[0], STDLIB, f'--job_log_dir={run}', *command[1:])
  assert told == f'there is no checkpoint in {run}/checkpoints; train first, with the same --job_log_dir'
  assert not run.exists()


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """The directory of a short run of `lm.StdlibLmTiny`."""
  directory = tmp_path_factory.mktemp('trained')
  sets = ['--set', 'task.train.num_train_steps=2', '--set', 'task.evaluate.max_batches=1']
  assert main(['train', STDLIB, '--nocompilation_cache', f'--job_log_dir={directory}', *sets]) == 0
  return directory


OTHER_MODELS = {
  'train': ['train', TINY],
  'wider': ['train', STDLIB, '--set', 'task.model.model_dims=32'],
  'eval': ['eval', TINY],
  'decode': ['decode', '--exp=lm.StdlibLm', '--prompt=a'],
}


@pytest.mark.slow
@pytest.mark.parametrize('arguments', OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused_and_left_alone(capsys, trained, arguments):
  before = sorted(trained.rglob('*'))
  told = fails(capsys, *arguments, f'--job_log_dir={trained}')
  difference = r'mdl_vars\.lm\.\S+ is float32\[.*\] in the checkpoint'
  assert re.search(rf'checkpoints/2 is a checkpoint of another model: {difference}', told)
  assert 'What differs from the recorded config: task.model.' in told
  assert 'Start a new run in another --job_log_dir; or, to go on with this run, leave out --exp' in told
  assert sorted(trained.rglob('*')) == before


PROMPTS = {
  'step': (['--prompt=a', '--step=7'], r'there is no checkpoint of step 7 in .*; there are \[2\]'),
  'stop': (['--prompt=a', '--stop='], r"--stop='': expected a text of at least one character"),
  'min_p': (['--prompt=a', '--min_p=2'], r'min_p: expected at least 0 and at most 1, or None, got 2\.0'),
  'penalty': (['--prompt=a', '--repetition_penalty=0'], r'repetition_penalty: expected a finite number above 0, got 0'),
  'repeats': (['--prompt=a', '--no_repeat_ngram_size=-1'], r'no_repeat_ngram_size: expected at least 1, or 0 or None'),
  'stream': (
    ['--prompt=a', '--num_samples=2', '--stream'],
    r'--stream prints one sample as it grows, but there are 2;',
  ),
  'beams': (['--prompt=a', '--num_best=2'], r'num_best = 2: this is a setting of beam search; give beam_size too'),
  'samples': (['--prompt=a', '--beam_size=2', '--num_samples=2'], r'--num_samples: a beam search draws no samples'),
  'prompts': (['--prompts=nowhere.txt'], r'--prompts=nowhere\.txt cannot be read: No such file or directory$'),
  'top_p': (['--prompt=a', '--top_p=3'], r'top_p: expected more than 0 and at most 1, or None, got 3\.0'),
  'top_k': (['--prompt=a', '--top_k=-1'], r'top_k: expected at least 1, or 0 or None for all tokens, got -1'),
  'temperature': (['--prompt=a', '--temperature=-1'], r'temperature: expected at least 0, got -1\.0'),
  'empty': (['--prompt='], r'a prompt is empty; it needs at least one token'),
  'ids': (['--prompt_ids=1,x'], r'--prompt_ids=1,x: expected token ids, such as 1,2,3$'),
  'no ids': (['--prompt_ids='], r'a prompt is empty; it needs at least one token'),
  'no token': (['--prompt_ids=1,99999999999'], r'a prompt is \[1, 99999999999\]; expected a list of tokens, which are'),
  'not in the vocabulary': (['--prompt_ids=1,999'], r'ids: 999, at position 1 of row 0, is not in the vocabulary of'),
  'texts and ids': (['--prompt=a', '--prompt_ids=1'], r'--prompt and --prompt_ids cannot be combined'),
  'chat of ids': (['--chat', '--prompt_ids=1'], r'--chat puts texts into a template; use it with --prompt'),
  'system without chat': (['--prompt=a', '--system=b'], r'--system is the system message of a chat; add --chat'),
  'none': ([], r'decode_datasets\(\): there is no input to decode; to decode from a text, pass --prompt'),
}


@pytest.mark.parametrize(('arguments', 'message'), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_that_cannot_be_continued_is_told(capsys, trained, arguments, message):
  assert re.search(message, fails(capsys, 'decode', STDLIB, f'--job_log_dir={trained}', *arguments))


def test_decoding_nothing_of_a_model_that_continues_no_texts_proposes_no_prompt(capsys, tmp_path):
  told = fails(capsys, 'decode', '--exp=vision.DigitsVit', f'--job_log_dir={tmp_path}')
  assert told == 'decode_datasets(): there is no input to decode; add one, or use `predict`'


@pytest.mark.parametrize(('experiment', 'model'), [('DigitsGan', 'AdversarialModel'), ('DigitsVqVae', 'VqVae')])
def test_a_model_that_does_not_decode_says_so_with_and_without_a_prompt(capsys, tmp_path, experiment, model):
  arguments = ['decode', f'--exp=generative.{experiment}', f'--job_log_dir={tmp_path}']
  assert f'task.model: {model} has no method decode(batch), so it cannot decode' in fails(capsys, *arguments)
  told = fails(capsys, *arguments, '--prompt_ids=1,2')
  assert told.startswith(f'a prompt needs a language model; the model of this experiment is of class {model}, whose')


def test_a_prompt_needs_a_tokenizer(capsys, trained, tmp_path):
  told = fails(capsys, 'decode', TINY, f'--job_log_dir={trained}', '--prompt=a')
  assert told == (
    '--prompt needs an experiment whose dataset has a tokenizer, and none of its datasets has one; if they have a '
    "field for it, set it, as in --set 'datasets[*].tokenizer_tpl=praxis_lite.inputs.ByteTokenizer', or pass ids, as "
    'in --prompt_ids=1,2,3'
  )


@pytest.mark.parametrize(
  ('experiment', 'printed'), [(TINY, ['97,98,104,105', '99,104,105']), (STDLIB, ['abhi', 'chi'])]
)
def test_ids_are_printed_as_ids_where_nothing_makes_text_of_them(capsys, monkeypatch, tmp_path, experiment, printed):
  given = []

  def continued(config, job_log_dir, prompts, **_):
    given.extend(prompts)
    return [list(b'hi')] * len(prompts)

  monkeypatch.setattr('praxis_lite.runs.inference.decode_prompts', continued)
  arguments = [
    experiment,
    f'--job_log_dir={tmp_path}',
    '--nocompilation_cache',
    '--prompt_ids=97,98',
    '--prompt_ids=99',
  ]
  assert main(['decode', *arguments]) == 0
  assert given == [[97, 98], [99]]
  lines = capsys.readouterr().out.splitlines()
  assert lines == ['----- sample 1 of 2', printed[0], '----- sample 2 of 2', printed[1]]
  # A tokenizer that was not found, as beside an imported model, is needed for texts alone.
  arguments += ['--set=datasets[*].tokenizer_tpl=praxis_lite.inputs.HfTokenizer'] * (experiment == STDLIB)
  assert main(['decode', *arguments]) == 0
  out, err = capsys.readouterr()
  assert '97,98,104,105' in out
  note = 'note: printing ids instead of text: datasets[0].tokenizer_tpl.path: the run has no tokenizer'
  assert (note in err) == (experiment == STDLIB)


def test_a_checkpoint_whose_files_are_gone_is_told(capsys, trained, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(trained, copy)
  shutil.rmtree(copy / 'checkpoints' / '2' / 'state')
  assert 'checkpoints/2' in fails(capsys, 'eval', STDLIB, f'--job_log_dir={copy}')


# ---------------------------------------------------------------- the user's own file

BASE = 'from praxis_lite.training.experiment import BaseExperiment\n'
STDLIB_TINY = 'from praxis_lite.experiments.lm import StdlibLmTiny as Tiny\n'
OWN_FILES = {
  'syntax': ('class A(\n', 'A', r"SyntaxError: '\(' was never closed: `class A\(` \(.*experiment\.py:1\)"),
  'bytes': ('\0', 'A', r'cannot import experiment\S*: SyntaxError: source code string cannot contain null bytes$'),
  'memory': (
    f'{STDLIB_TINY}import jax.numpy as jnp\nclass A(Tiny):\n  def task(self): return jnp.zeros((1 << 24, 1 << 24))\n',
    'A',
    r'^Out of memory allocating \d+ bytes; it may fit with a smaller batch or model',
  ),
  'import': ('import numpyy\n', 'A', r"ModuleNotFoundError: No module named 'numpyy' \(.*experiment\.py:1\)"),
  'name': (f'{BASE}class Mine(BaseExperiment): pass\n', 'Mien', r"no experiment 'Mien'\. Did you mean 'Mine'\?"),
  'task': (
    f'{BASE}class A(BaseExperiment): pass\n',
    'A',
    r'A has no method task\(\), which returns the Config of a task',
  ),
  'no config': (
    f'{STDLIB_TINY}class A(Tiny):\n  def task(self): return 3\n',
    'A',
    r'A\.task\(\) returned int; it must',
  ),
  'no list': (
    f'{STDLIB_TINY}class A(Tiny):\n  def datasets(self): return None\n',
    'A',
    r'A\.datasets\(\) returned None',
  ),
  'field': (
    f'{STDLIB_TINY}class A(Tiny):\n  def task(self): return super().task().set(modle=3)\n',
    'A',
    r"has no field 'modle'\. Did you mean 'model'\?",
  ),
}


@pytest.mark.parametrize(('code', 'name', 'message'), OWN_FILES.values(), ids=OWN_FILES)
def test_mistakes_in_the_users_own_file_are_told(capsys, tmp_path, monkeypatch, code, name, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'experiment.py').write_text(code)
  told = fails(capsys, 'show', f'--exp=experiment.py:{name}')
  assert re.search(message, told), told


def test_a_bug_in_the_users_own_code_is_told_with_its_line_and_keeps_its_traceback(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = f'{STDLIB_TINY}class A(Tiny):\n  def task(self): return self.nothing\n'
  (tmp_path / 'buggy.py').write_text(text)
  told = "AttributeError: 'A' object has no attribute 'nothing' "
  line = text.count('\n')
  assert fails(capsys, 'show', '--exp=buggy.py:A') == f'{told}(buggy.py:{line}); --traceback shows how it got there'
  assert main(['show', '--exp=buggy.py:A', '--traceback']) == 2
  printed = capsys.readouterr().err.splitlines()
  assert printed[0].startswith('Traceback') and any(f'buggy.py", line {line}, in task' in row for row in printed)
  assert printed[-1] == f'praxis-lite show: error: {told}(buggy.py:{line})'
