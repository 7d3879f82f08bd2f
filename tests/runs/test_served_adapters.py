"""`praxis-lite serve --adapters`: adapters of runs and of peft on the weights of the served run, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables
from tiny_language_model import import_tiny_run

from praxis_lite.bridges.hf import write_adapter
from praxis_lite.checkpoints import Checkpointer, identity
from praxis_lite.checkpoints.identity import checkpoint_identity
from praxis_lite.cli.adapter_flags import identities_of_adapters, read_adapters
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import DataError
from praxis_lite.common.trees import leaves, map_with_path, merge, node_at, select
from praxis_lite.layers import Dora, Ia3, Lora, QuantizedWeights
from praxis_lite.models import add_adapters, quantize_weights
from praxis_lite.runs import open_run
from praxis_lite.runs.records.record import write_record
from praxis_lite.runs.serving import engine, server
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.state import TrainState

pytest.importorskip('starlette', reason="needs starlette: pip install 'praxis_lite[serve]'")
pytest.importorskip('uvicorn', reason="needs uvicorn: pip install 'praxis_lite[serve]'")

RULE = Config(Lora, layers=r'.*\.(query|value)', rank=2)
HIDDEN = ('lm', 'transformer', 'layers', 'ff', 'up', 'w')


@functools.cache
def variables_of(run):
  return run.load().variables


def write_run(folder, base, change=lambda path, x: x, ema=False, few_bits=False, rule=RULE, dtype='float32', step=5):
  """A run of adapters whose other variables are those of the run `base`, perhaps changed; returns its variables."""
  config = dataclasses.replace(base.config, task=base.config.task.clone())
  if rule is not None:
    add_adapters(config.task.model.set(dtype=dtype), rule)
  config.task.train.learner.ema_decay = 0.9 if ema else 0.0
  of_base = map_with_path(change, variables_of(base))
  if few_bits:
    quantize_weights(config.task.model, Config(QuantizedWeights, layers=r'.*\.ff\..*'))
    of_base = select(of_base, lambda path: 'ff' not in path)
  drawn = drawn_variables(config.task.model.instantiate().abstract_init())
  variables = jax.tree.map(np.asarray, merge(drawn, of_base))
  own = jax.tree.map(lambda x: x * (step / 5), select(variables, lambda path: 'lora' in path))
  variables = merge(variables, own)
  if dtype != 'float32':
    variables = merge(jax.tree.map(lambda x: x.astype(dtype), variables), own)
  averages = jax.tree.map(lambda x: x + 1, own) if ema else None
  state = TrainState(np.asarray(step, np.int32), variables, None, averages)
  with contextlib.closing(Checkpointer(folder)) as checkpointer:
    checkpointer.save(step, state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), None)
    checkpointer.wait()
  write_record(folder, config)
  return merge(variables, averages) if ema else variables


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return open_run(import_tiny_run(tmp_path_factory.mktemp('served')))


@pytest.fixture
def serve(base, monkeypatch, capsys):
  """Runs the command without a server; returns its exit code, what it wrote on stderr, and the model."""
  monkeypatch.setattr(engine.Engine, 'warm_up', lambda self: None)
  monkeypatch.setattr(server, 'serve', lambda *args, **options: None)
  batcher, made = TrainedModel.batcher, []
  monkeypatch.setattr(TrainedModel, 'batcher', lambda self, **options: made.append(self) or batcher(self, **options))

  def serve(*adapters, name='tiny'):
    made.clear()
    given = [f'--adapters={text}' for text in adapters]
    code = main(['serve', f'--job_log_dir={base.directory}', '--nocompilation_cache', f'--name={name}', *given])
    return code, capsys.readouterr().err, *made

  return serve


def test_adapters_of_runs_and_of_peft_are_served_together(base, serve, tmp_path):
  of_run = write_run(tmp_path / 'averaged', base, ema=True)
  of_half = write_run(tmp_path / 'half', base, dtype='bfloat16', rule=RULE.clone(rank=3))
  write_run(tmp_path / 'few', base, few_bits=True)
  write_adapter(tmp_path / 'peft', open_run(tmp_path / 'half').config.task.model.instantiate(), of_half)
  code, err, model = serve(*(f'{name}={tmp_path / name}' for name in ('averaged', 'half', 'peft', 'few')))
  assert code == 0 and model.layer.adapter_names == ('averaged', 'half', 'peft', 'few')
  assert 'note: 6 variables, such as lm.transformer.layers.ff.' in err and 'are not compared' in err
  served = leaves(model.variables)
  for path, a in leaves(select(of_run, lambda path: path[-2:] == ('lora', 'a'))).items():
    np.testing.assert_array_equal(served[path][:, 0, ..., :2], a)
    for i in (1, 2):
      np.testing.assert_array_equal(served[path][:, i, ..., :3], node_at(of_half, path))
  batch = {'ids': np.ones((2, 3), np.int32), 'prompt_lengths': np.full(2, 3, np.int32)}
  with pytest.raises(
    DataError, match=r"adapters: 4 is no adapter of the model; expected 0 for 'averaged', 1 for 'half'"
  ):
    model.decode({**batch, 'adapters': np.array([-1, 4])})
  with pytest.raises(DataError, match=r'adapters: expected integers, .* got float32'):
    model.decode({**batch, 'adapters': np.zeros(2, np.float32)})


def test_rows_of_a_bulk_prediction_name_their_adapters(base, tmp_path, capsys):
  write_run(tmp_path / 'one', base)
  write_run(tmp_path / 'other', base, rule=RULE.clone(rank=3))
  data, out = tmp_path / 'a.jsonl', tmp_path / 'out'
  rows = [{'context': [5], 'continuation': [3, 8, 1], 'adapter': name} for name in ('one', None)]
  data.write_text(''.join(f'{json.dumps(row)}\n' for row in [*rows, {'context': [5], 'continuation': [3, 8, 1]}]))
  flags = [f'--job_log_dir={base.directory}', f'--input={data}', f'--output={out}', '--what=score', '--keep=adapter']
  flags.append('--nocompilation_cache')
  assert main(['predict', *flags, f'--adapters=one={tmp_path / "one"}']) == 0
  found = [json.loads(line) for line in (out / 'part-00000.jsonl').read_text().splitlines()]
  wanted = [open_run(run).load().score([[5]], [[3, 8, 1]])[0].log_prob for run in (tmp_path / 'one', base.directory)]
  assert [row['log_prob'] for row in found] == pytest.approx([*wanted, wanted[1]], rel=1e-4) and len({*wanted}) == 2
  capsys.readouterr()
  for more, told in (
    ([], 'was begun with adapters.one = '),
    ([f'--adapters=one={tmp_path / "other"}'], 'was begun with adapters.one = '),
  ):
    assert main(['predict', *flags, *more]) == 2
    assert told in capsys.readouterr().err


def test_an_adapter_is_read_at_the_step_that_the_plan_names(base, tmp_path, monkeypatch):
  write_run(tmp_path / 'one', base)
  folders = {'one': str(tmp_path / 'one')}
  found = identities_of_adapters(folders)
  assert found['steps_of_adapters.one'] == 5 and found['adapters.one'].startswith('5:')
  write_run(tmp_path / 'one', base, step=10)
  model = base.load()
  (_, pinned), (_, newest) = (read_adapters(folders, model, [], given)['one'] for given in (found, None))
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(2 * x, y), pinned, newest)
  assert identities_of_adapters(folders)['steps_of_adapters.one'] == 10
  monkeypatch.setattr(identity, 'read_checkpoint_record', lambda *args: {})  # As of versions without a seal.
  write_run(tmp_path / 'other', base, step=10)
  one, same, other = (checkpoint_identity(tmp_path / name) for name in ('one', 'one', 'other'))
  assert one == same and one.step == other.step and len({one.seal, other.seal, None}) == 3


def test_names_that_no_request_could_tell_apart(serve):
  for given, message in (
    (['a=x', 'a=y'], '--adapters=a=y: there is an adapter a already'),
    (['tiny=x'], '--adapters=tiny=x: the served model is called tiny, too'),
    (['a'], '--adapters=a: expected a name and a folder'),
  ):
    code, err = serve(*given)
    assert code == 2 and message in err


def test_adapters_that_belong_to_other_weights_or_cannot_be_combined(base, serve, tmp_path):
  write_run(tmp_path / 'other', base, lambda path, x: x + 1e-6 * (path == HIDDEN))
  write_run(tmp_path / 'none', base, rule=None)
  for kind in (Dora, Ia3):
    config = add_adapters(base.config.task.model.clone(), Config(kind, layers=r'.*\.query'))
    model = config.instantiate()
    write_adapter(tmp_path / kind.__name__, model, drawn_variables(model.abstract_init()))
  for folder, message in (
    ('other', f'{".".join(HIDDEN)} differs from that of the model that is served'),
    ('none', 'has no adapters'),
    ('Dora', 'it is an adapter of Dora; DoRA and IA3 cannot be combined'),
    ('Ia3', 'it is an adapter of Ia3; DoRA and IA3 cannot be combined'),
  ):
    code, err = serve(f'x={tmp_path / folder}')
    assert code == 2 and message in err, err
