"""Every command of README and guides runs, page by page, in this process, because starting one takes seconds.

Commands are the lines of blocks for a shell, marked so or not marked, that begin with the name of a program; and, in
sentences, code that does. Those of blocks marked `sh` run as they are. What would take minutes, or needs another
machine, is changed by the table `CHANGED`; what cannot run here is in `NOT_RUN`, with the reason.
"""

import ast
import contextlib
import os
import pathlib
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from warm_python import WarmPopen

from praxis_lite.cli.main import main

ROOT = pathlib.Path(__file__).parent.parent
GUIDES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
PAGES = [*GUIDES, *sorted((ROOT / 'docs' / 'reference').glob('*.md'))]  # These have no commands.
BLOCK = re.compile(r'^```(\w*)\n(.*?)^```', re.DOTALL | re.MULTILINE)
PROGRAMS = ('praxis-lite', 'python', 'make', 'pip', 'source', 'eval', 'tensorboard', 'printf')
IN_A_SENTENCE = re.compile(rf'(?<!`)`((?:{"|".join(PROGRAMS)})\s[^`]+)`')

NOT_RUN = {
  r'make (demo|test|test-slow|site)': 'installs from a package index; START has the commands of demo',
  r'pip install .*|python -m venv .*': 'installs from a package index',
  r'source \.venv/bin/activate': 'is for a shell, and the environment of make',
  r'tensorboard --logdir=runs': 'is a server, of another package',
  r'praxis-lite serve .*': 'is a server: runs/test_serving_http.py starts one',
  r'praxis-lite predict .*--input=.*': 'reads files of the user: cli/test_predict_many.py has some',
  r'eval "\$\(praxis-lite completion bash\)"': 'is for a shell: cli/test_completion.py runs it in bash',
  r'.*\.\.\..*|praxis-lite train --exp=lm\.X': 'is no command but the form of one',
  r'praxis-lite plan .*--(search|what_if|compare).*': 'makes many plans: plan/test_changes.py has these flags',
  r'praxis-lite plan .*--cheapest .*': 'plans for dozens of numbers of chips: plan/test_cheapest.py has its flags',
  r'praxis-lite plan --calibrate': 'multiplies what takes a CPU minutes: plan/test_calibration.py runs it in small',
  r'praxis-lite plan .*--measured': 'takes a run of many steps: plan/test_experience.py trains one',
  r'praxis-lite scaling .*': 'reads runs of many sizes: plan/test_scaling_command.py has some',
  r'praxis-lite sweep .*--search.*': 'trains for minutes: cli/test_sweep.py searches for less',
  r'praxis-lite launch .*': 'starts processes: runs/test_launch.py and test_cluster_recipes.py run such',
  r'praxis-lite agree .*': 'compiles a dozen programs: cli/test_agree.py runs it on a smaller model',
  r'praxis-lite replay .*': 'takes a step that was in trouble: runtime/test_trouble.py has one',
  r'praxis-lite predict .*lines\.txt': 'reads a file that the Python of this page writes: cli/test_predict.py has it',
  r'praxis-lite predict .*(gaps\.txt|new\.tsv)': 'reads a run of a page: cli/test_predict_files.py has such',
  r'praxis-lite .*runs/llama.*': 'hf/test_guide_commands.py runs those of this page on a checkpoint that it writes',
  r'praxis-lite .*runs/tuned.*': 'hf/test_guide_commands.py runs those of the guide to preferences',
  r'praxis-lite export-hf .*runs/lora.*': 'runs/test_adapters_of_runs.py trains and exports such a run',
  r'praxis-lite predict --job_log_dir=runs/(codes|digits) .*': 'reads a file that this guide does not write',
  r'praxis-lite .*runs/uncased.*': 'hf/test_bert.py imports, trains and exports a checkpoint that it writes',
  r'praxis-lite .*runs/whisper.*': 'hf/test_whisper.py imports, predicts, trains and exports one that it writes',
  r'praxis-lite predict .*\.wav': 'reads recordings: test_speech_experiments.py makes one',
  r'praxis-lite .*runs/vit.*': 'hf/test_vit.py imports, predicts, trains and exports a checkpoint that it writes',
  r'praxis-lite .*runs/clip.*': 'hf/test_clip.py imports, predicts, trains and exports one that it writes',
  r'praxis-lite import-hf .*runs/features': 'hf/test_bert.py imports one that it writes',
  r'praxis-lite predict .*new\.npz': 'reads arrays of the user: models/test_predict.py makes some',
  r'praxis-lite .*runs/flan.*': 'hf/test_t5.py imports, decodes, trains and exports a checkpoint that it writes',
}

# The sizes and steps of lm.StdlibLmTiny, whose programs other commands here have compiled.
TINY = (
  ' --set task.model.model_dims=16 --set task.model.num_layers=2 --set task.model.num_heads=2'
  ' --set task.model.hidden_dims=32 --set task.model.lm_tpl.transformer_tpl.unroll=1'
  ' --set task.model.decoder_tpl.max_decode_steps=16 --set datasets[*].seq_len=32 --set datasets[*].batch_size=4'
  ' --set task.model.decoder_tpl.max_context=32 --set task.train.learner.schedule.warmup_steps=5'
  ' --set task.train.learner.learning_rate=3e-3 --set task.train.num_train_steps=20'
  ' --set task.train.log_interval_steps=5 --set task.train.eval_interval_steps=None'
  ' --set task.evaluate.max_batches=1'
)
# What is found in a command, and what is put in its place, in this order.
CHANGED = {
  r'--exp=(lm\.StdlibLm|lm\.TextLm|my_experiments\.py:MyText)(?= ).*': r'\g<0>' + TINY,
  r'--exp=char_lm\.py:CharLm .*': r'\g<0> --set task.model.num_layers=1 --set task.train.num_train_steps=2',
  r'--exp=char_lm\.py:CharLm .*runs/(wide|biases).*': r'\g<0> --set datasets[1]=None',  # That of runs/char evaluates.
  r'--exp=my_experiments\.py:(Waves|MyExperiment) .*': r'\g<0> --set task.train.num_train_steps=10',
  r'--job_log_dir=runs/pipelined .*': r'\g<0> --set task.train.num_train_steps=2',
  r'train --exp=generative\.Digits(VqVae|Diffusion|Gan) .*': r'\g<0> --set task.train.num_train_steps=2',
  r'train --exp=encoders\.StdlibBert .*': r'\g<0> --set task.train.num_train_steps=2'
  ' --set datasets[*].path.max_bytes=99999 --set task.evaluate.max_batches=1',
  r'train --exp=recurrent\.\w+Tiny .*': r'\g<0> --set task.train.num_train_steps=2 --set task.evaluate.max_batches=1',
  r'train --exp=speech\.SpelledDigits .*': r'\g<0> --set task.train.num_train_steps=2 --set datasets[0].path.count=32',
  r'train --exp=encoders\.SameDate .*': r'\g<0> --set task.train.num_train_steps=2 --set datasets[*].examples.count=64',
  r'train --exp=vision\.Digits\w+ .*': r'\g<0> --set task.train.num_train_steps=2',
  r'train --exp=preferences\.SortedTiny .*': r'\g<0> --set task.train.num_train_steps=2',
  r'train --exp=policies\.Digits.*': r'\g<0> --set task.train.num_train_steps=2',
  r'train --exp=seq2seq\.Dates .*': r'\g<0> --set task.train.num_train_steps=2 --set datasets[*].pairs.count=64'
  ' --set decode_datasets[*].pairs.count=64',
  r'--max_tokens=200|--prompt=ROMEO:': r'\g<0> --max_tokens=4',
  r'--devices=\d': '--devices=8',  # This process has eight, of which a mesh takes the first.
  # Compilers for accelerators are large packages.
  r'praxis-lite plan (?!.*--nocompile).*--topology=(?!cpu).*': r'\g<0> --nocompile',
  r'praxis-lite verify .*': r'\g<0> --quick --set task.ici_mesh_shape=(1,2,1)',
  r's3://bucket': 'memory://bucket',  # A store in this process.
  r'praxis-lite export .*': r'\g<0> --format=stablehlo',  # TensorFlow takes seconds to import.
  r'python tools/.*': r'\g<0> --help',  # They measure for minutes.
}

# Commands that a page takes for granted: those of another page, those of its Python, or those before a placeholder.
START = {
  'README': ['praxis-lite train --exp=lm.StdlibLm --job_log_dir=runs/demo --set datasets[*].path.max_bytes=200000'],
  'decoding': ['praxis-lite train --exp=lm.StdlibLmTiny --job_log_dir=runs/lines'],
  'pipelines': [
    'praxis-lite train --exp=pipelines.SyntheticLmPipelined --job_log_dir=runs/pipelined'
    ' --set task.model.num_layers=4 --set datasets[1]=None --set task.train.num_train_steps=1'
  ],
  'python': ['praxis-lite train --exp=lm.StdlibLmTiny --job_log_dir=runs/lines'],
  'runs': ['praxis-lite train --exp=my_experiments.py:MyExperiment --job_log_dir=runs/own'],
}
# Guides that are read one after the other, in one directory.
WALKS = [['README', 'tutorial'], *([p.stem] for p in GUIDES if p.stem not in ('README', 'tutorial'))]

PLACEHOLDER = """
from praxis_lite.experiments.lm import SyntheticLmTiny


class MyExperiment(SyntheticLmTiny):
  pass
"""
VERSE = 'ROMEO:\nBut soft, what light through yonder window breaks?\n'


def commands(page):
  """The commands of a page, each on one line, in order."""
  text = page.read_text()
  found = {}
  for match in BLOCK.finditer(text):
    for line in match[2].replace('\\\n', ' ').splitlines() if match[1] in ('', 'sh') else ():
      line = line.removeprefix('$ ').partition('  # ')[0].strip()
      # `praxis-lite train: error: ...` is output.
      if line.partition(' ')[0] in PROGRAMS and not line.split()[1].endswith(':'):
        found[match.start(), line] = line
  outside = BLOCK.sub(lambda match: ' ' * len(match[0]), text)
  for match in IN_A_SENTENCE.finditer(outside):
    line = ' '.join(match[1].split())
    if not re.fullmatch(r'praxis-lite \S+', line):  # The name of a command, not one.
      found[match.start(), line] = line
  return [found[key] for key in sorted(found, key=lambda key: key[0])]


def definitions(page):
  """What the Python blocks of a page import and define, without what they compute."""
  code = '\n'.join(block for language, block in BLOCK.findall(page.read_text()) if language == 'python')
  kept = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
  return '\n\n'.join(ast.unparse(node) for node in ast.parse(code).body if isinstance(node, kept))


def changed(command):
  for pattern, instead in CHANGED.items():
    command = re.sub(pattern, instead, command)
  return command


def run(command):
  """Runs a command here; returns its exit code."""
  program, *arguments = shlex.split(command)
  if program == 'praxis-lite':
    return main(arguments)
  if program == 'printf':  # Into a file.
    return os.system(command)
  assert program == 'python', f'add {command!r} to NOT_RUN, or run it'
  with contextlib.ExitStack() as restored:
    argv, sys.argv = sys.argv, arguments
    restored.callback(setattr, sys, 'argv', argv)
    try:
      script = arguments[0] if os.path.exists(arguments[0]) else str(ROOT / arguments[0])  # One that a command wrote.
      runpy.run_path(script, run_name='__main__')
    except SystemExit as end:
      return end.code
  return 0


@pytest.fixture(scope='module')
def printed():
  """The commands that have run and left nothing behind: they would print the same again."""
  return set()


def to_run(guides):
  """The commands of guides as they are run, each once."""
  found = [c for guide in guides for c in (*START.get(guide.stem, []), *commands(guide))]
  return [changed(c) for c in dict.fromkeys(found) if not any(re.fullmatch(p, c) for p in NOT_RUN)]


@pytest.mark.slow
@pytest.mark.parametrize('walk', [w for w in WALKS if to_run(p for p in GUIDES if p.stem in w)], ids='-'.join)
def test_commands_run(walk, printed, shared_programs, tmp_path, monkeypatch):
  import jax

  guides = [guide for guide in GUIDES if guide.stem in walk]
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', jax.config.jax_compilation_cache_dir)  # For those that it starts.
  monkeypatch.setattr(subprocess, 'Popen', WarmPopen)
  own = '\n\n'.join(map(definitions, guides))
  for name in ('my_experiments', 'char_lm'):
    monkeypatch.delitem(sys.modules, name, raising=False)
    pathlib.Path(f'{name}.py').write_text(own + PLACEHOLDER)
  pathlib.Path('my_texts').mkdir()
  for name in ('my_texts/one.txt', 'shakespeare.txt'):
    pathlib.Path(name).write_text(VERSE * 100)
  pathlib.Path('prompts.jsonl').write_text('{"id": 1, "prompt": "to be"}\n')
  for command in to_run(guides):
    if command not in printed:
      assert run(command) == 0, command
    if 'runs' not in command:
      printed.add(command)


def test_the_tables_are_about_commands_of_guides():
  every = [c for guide in GUIDES for c in (*START.get(guide.stem, []), *commands(guide))]
  for pattern in NOT_RUN:
    assert any(re.fullmatch(pattern, c) for c in every), pattern
  for pattern in CHANGED:
    assert any(re.search(pattern, c) for c in every), pattern
  assert START.keys() <= {guide.stem for guide in GUIDES}
  assert not any(commands(page) for page in PAGES if page not in GUIDES)


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_names_of_the_package_exist(page):
  for name in re.findall(r'(?:`|^::: )(praxis_lite(?:\.\w+)+)\b', page.read_text(), re.MULTILINE):
    pkgutil.resolve_name(name)  # Raises if there is none.
