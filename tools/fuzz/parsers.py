"""The parsers of external data, each as a pair: a function that draws bad input, and the parser.

A parser may return anything, or raise a UserError. Everything else is a fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from praxis_lite.bridges.hf.families import family_of
from praxis_lite.bridges.hf.files import read_folder, read_header
from praxis_lite.bridges.hf.hf_config import read_config
from praxis_lite.checkpoints.best import BestRecord
from praxis_lite.checkpoints.contents import add_checksum, check_same_model, read_checkpoint_record
from praxis_lite.checkpoints.stored import best_step
from praxis_lite.common.config import Config
from praxis_lite.common.config.json import encode_readable, from_json, to_json
from praxis_lite.common.config.overrides import alternatives, apply_overrides, get_by_path
from praxis_lite.common.config.text import changed_fields, to_text
from praxis_lite.common.errors import UserError
from praxis_lite.inputs import ArrayInput, ByteTokenizer, CharTokenizer, TextInput
from praxis_lite.inputs.tf_example import features_of_example, serialized_example
from praxis_lite.instruments.plan import snapshot
from praxis_lite.instruments.plan.calibration import apply_calibration
from praxis_lite.instruments.plan.targets import find_target
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.runs.cluster.emergency import EmergencyCopies
from praxis_lite.runs.cluster.object_store import ObjectStore
from praxis_lite.runs.cluster.remote import RemoteRun
from praxis_lite.runs.observer import StateToCopy
from praxis_lite.runs.records import record, runs
from praxis_lite.runs.records.heartbeat import Heartbeat, read_heartbeats
from praxis_lite.runs.records.metrics import SummaryWriter, read_results
from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
from praxis_lite.runs.records.status import status_of
from praxis_lite.runs.trouble import Trouble, batches_to_skip, go_back, read_troubles
from praxis_lite.sharding.strategies import infer_sharding
from praxis_lite.training import registry
from praxis_lite.training.experiment import ExperimentConfig, configure
from praxis_lite.training.state import TrainState
from tools.fuzz.mutations import mutated_bytes, mutated_json, mutated_json_text, mutated_text

DrawValue = Callable[[np.random.Generator], Any]


class Parser(NamedTuple):
  """A function that draws bad input, and the parser. Each input gets a separate folder, where the parser may write."""

  draw: DrawValue
  read: Callable[[Any, Path], object]
  weight: int = 1


@functools.cache
def _config() -> ExperimentConfig:
  return configure(registry.get('lm.SyntheticLmTiny'))


@functools.cache
def _config_text() -> str:
  return to_json(_config().roots())


_OVERRIDES = (
  *('task.model.lm.num_layers=6', 'task.train.num_train_steps=100', 'datasets[*].batch_size=8', 'datasets[1]=None'),
  *('task.ici_mesh_shape=(2,2,1)', 'task.train.learner.optimizer=optax.sgd', 'task.model.params_init.scale=0.01'),
  *('task.train.best_metric=eval/valid/loss', 'task.model.lm.softmax=@praxis_lite.layers.SharedEmbeddingSoftmax'),
  *('task.mesh_axis_names=("a", "b")', 'task.train.learner.learning_rate=1e-3', 'task.train.init_from.path=~/x'),
)


def _change_examples(
  examples: tuple[str, ...], change: Callable[[str, np.random.Generator], str] = mutated_text
) -> DrawValue:
  return lambda rng: change(examples[int(rng.integers(len(examples)))], rng)


def _override(text: str, folder: Path) -> None:
  roots = {name: [c.clone() for c in r] if isinstance(r, list) else r.clone() for name, r in _config().roots().items()}
  with contextlib.suppress(UserError):
    alternatives(text)
  with contextlib.suppress(UserError):
    get_by_path(roots, text.partition('=')[0])
  apply_overrides(roots, [text])
  to_text(roots)


_STRATEGIES = (
  *('fsdp(axis="data")', 'replicate()', 'shard_dim("model", 0) | fsdp(axis="data")'),
  *('logical_partitioning()', 'shard_dim(("data", "model"), -1, True, allow_padding=False)'),
)
_PATTERNS = ('.*', '.*/w', 'lm.(a|b).*', 'lm/[a-z]+/w', '(?i)LM.*')


def _strategy(case: tuple[str, str], folder: Path) -> object:
  tree = {'lm': {'a': {'w': jax.ShapeDtypeStruct((64, 48), np.float32)}, 'b': jax.ShapeDtypeStruct((5,), np.float32)}}
  return infer_sharding(tree, [case, ('.*', 'replicate()')], _mesh())


@functools.cache
def _mesh() -> jax.sharding.AbstractMesh:
  return jax.sharding.AbstractMesh((2, 4), ('data', 'model'))


def _json_config(data: bytes, folder: Path) -> object:
  config = from_json(data.decode(errors='replace'))
  return to_text(config)


_ABOUT: dict[str, Any] = {
  'variables': {'step': {'shape': [], 'dtype': 'int32'}, 'mdl_vars.lm.w': {'shape': [10, 7], 'dtype': 'float32'}},
  'mesh': {'data': 2},
  'versions': {'jax': '0.10'},
  'saved_at': 1e9,
}


def _about(data: bytes, folder: Path) -> None:
  (folder / 'about').mkdir(exist_ok=True)
  (folder / 'about' / 'metadata').write_bytes(data)
  found = read_checkpoint_record(folder, 'about')
  check_same_model(found['variables'], _ABOUT['variables'], 'here')


_COMPLETE = {'step': 9, 'rollbacks': 0, 'files': {'about/metadata': {'size': 3, 'sha256': 'ab' * 32}}}


def _draw_complete(rng: np.random.Generator) -> bytes:
  if rng.random() < 0.3:
    return mutated_json_text(add_checksum(_COMPLETE), rng)
  changed = mutated_json(_COMPLETE, rng)
  return json.dumps(add_checksum(changed) if isinstance(changed, dict) else changed).encode()


def _complete(data: bytes, folder: Path) -> None:
  (folder / 'checkpoints').mkdir(exist_ok=True)
  (folder / 'checkpoints' / '9.complete').write_bytes(data)
  for checkpoint in RemoteRun(ObjectStore(f'file://{folder}')).checkpoints():
    assert checkpoint.num_bytes is not None
    assert all((folder / name).resolve().is_relative_to(folder.resolve()) for name in checkpoint.files)


def _draw_about(rng: np.random.Generator) -> bytes:
  if rng.random() < 0.5:
    return mutated_json_text(add_checksum(_ABOUT), rng)
  changed = mutated_json(_ABOUT, rng)  # With a correct checksum.
  return json.dumps(add_checksum(changed) if isinstance(changed, dict) else changed).encode()


@functools.cache
def _input() -> ArrayInput:
  return ArrayInput(name='a', batch_size=2, arrays={'x': np.zeros((5, 3), np.float32)}, is_training=True)


def _input_state(state: Any, folder: Path) -> object:
  data = _input()
  data.set_state(state)
  out = data.get_next()
  data.reset()
  return out


def _run_record(data: bytes, folder: Path) -> None:
  (folder / 'run.json').write_bytes(data)
  found = record.read_record(folder)
  _ = found.seed, found.commands
  to_text(found.config.roots())
  found.other_defaults.describe(found.config.roots())


@functools.cache
def _record() -> Any:
  launch = {
    'started': 1.0,
    'command': 'praxis-lite train',
    'seed': 1,
    'step': 0,
    'mesh': {'data': 2},
    'devices': '2 cpu',
  }
  more = {'versions': {'jax': '1'}, 'sources': [{'path': '/x', 'commit': 'abc', 'clean': True}], 'changes': ['a -> b']}
  config, edited = encode_readable(_config().roots(), {}), sorted(changed_fields(_config().roots()))
  return {'format': 1, 'launches': [launch | more], 'lost': {'task.x': 'why'}, 'config': config, 'edited': edited}


_METRICS = [
  {'step': 1, 'split': 'train', 'time': 1.0, 'metrics': {'loss': 2.0, 'skipped': None}},
  {'step': 2, 'split': 'eval/valid', 'time': 2.0, 'metrics': {'loss': 1.5}},
]


def _draw_metrics(rng: np.random.Generator) -> bytes:
  lines = [json.dumps(line).encode() for line in _METRICS]
  lines[int(rng.integers(2))] = mutated_json_text(_METRICS[int(rng.integers(2))], rng)
  return b'\n'.join(lines) if rng.random() < 0.8 else mutated_bytes(b'\n'.join(lines), rng)


def _metrics(data: bytes, folder: Path) -> None:
  (folder / 'run.json').unlink(missing_ok=True)
  (folder / 'metrics.jsonl').write_bytes(data)
  state = runs.read_run(folder)
  _ = state.last_loss, state.best('eval/valid/loss', 'min'), repr(state.metrics), state.metrics.last()
  for result in read_results(folder, 10):
    _ = [float(value) for value in result.metrics.values()]
  SummaryWriter(folder, resumed_step=1).close()
  if len((folder / 'metrics.jsonl').read_bytes()) > len(data) + 100:
    raise AssertionError('truncating made it longer')


def _best(data: bytes, folder: Path) -> None:
  (folder / 'checkpoints' / '2').mkdir(parents=True, exist_ok=True)
  (folder / 'best.json').write_bytes(data)
  step = best_step(folder)
  if step is not None and not isinstance(step, int):
    raise AssertionError(f'the best step is {step!r}')
  best = BestRecord(folder / 'best.json', [2]).value
  if best is not None and (best.step != 2 or type(best.value) not in (int, float)):
    raise AssertionError(f'the best is {best}')


def _vocabulary(data: bytes, folder: Path) -> object:
  (folder / 'checkpoints' / '2').mkdir(parents=True, exist_ok=True)
  (folder / 'vocabulary.json').write_bytes(data)
  text = Config(TextInput, path='x', tokenizer_tpl=Config(CharTokenizer, path='x'))
  config = use_kept_vocabulary(type(_config())(_config().task, [text], []), folder)
  return config.datasets[0].tokenizer.instantiate().characters


def _text(data: bytes, folder: Path) -> None:
  for tokenizer in (Config(ByteTokenizer), Config(CharTokenizer, path=str(folder / 'data.txt'))):
    (folder / 'data.txt').write_bytes(data)
    found = TextInput(path=str(folder / 'data.txt'), tokenizer_tpl=tokenizer, batch_size=2, seq_len=4)
    for _ in range(3):
      if next(found, None) is None:
        break


def _arrays(entry: Any, folder: Path) -> None:
  data = ArrayInput(name='a', batch_size=2, arrays=entry)
  next(data, None)


def _draw_arrays(rng: np.random.Generator) -> Any:
  return mutated_json({'x': [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], 'y': {'z': [1, 2, 3]}}, rng)


@functools.cache
def _example() -> bytes:
  return serialized_example({'x': np.arange(3.0, dtype=np.float32), 'ids': np.arange(4)})


def _read_example(data: bytes, folder: Path) -> object:
  return features_of_example(data, 'x')


_LLAMA = {
  **{'model_type': 'llama', 'hidden_size': 8, 'intermediate_size': 16, 'num_attention_heads': 2, 'vocab_size': 32},
  **{'num_hidden_layers': 2, 'num_key_value_heads': 1, 'hidden_act': 'silu', 'rms_norm_eps': 1e-5, 'head_dim': 4},
  **{'max_position_embeddings': 64, 'tie_word_embeddings': False, 'rope_theta': 1e4, 'attention_bias': False},
  'rope_scaling': {
    **{'rope_type': 'llama3', 'factor': 8.0, 'original_max_position_embeddings': 8},
    **{'low_freq_factor': 1.0, 'high_freq_factor': 4.0},
  },
}
_GPT2 = {
  **{
    'model_type': 'gpt2',
    'n_embd': 8,
    'n_head': 2,
    'n_layer': 2,
    'n_positions': 16,
    'vocab_size': 32,
    'n_inner': None,
  },
  **{'activation_function': 'gelu_new', 'layer_norm_epsilon': 1e-5},
}
_HF = (
  *(_LLAMA, _GPT2, _LLAMA | {'model_type': 'qwen3'}, _LLAMA | {'model_type': 'gemma2', 'sliding_window': 4}),
  _LLAMA | {'model_type': 'mixtral', 'num_local_experts': 4, 'num_experts_per_tok': 2, 'rope_scaling': None},
  _LLAMA | {'model_type': 'mistral', 'rope_scaling': {'type': 'yarn', 'factor': 4.0, 'mscale': 1, 'mscale_all_dim': 1}},
)


def _hf_config(data: bytes, folder: Path) -> object:
  (folder / 'config.json').write_bytes(data)
  hf = read_config(folder)
  return to_text(family_of(hf).model(hf))


_HEADER = {
  '__metadata__': {'format': 'pt'},
  'a.weight': {'dtype': 'F32', 'shape': [2, 3], 'data_offsets': [0, 24]},
  'b': {'dtype': 'BF16', 'shape': [4], 'data_offsets': [24, 32]},
}


def _draw_safetensors(rng: np.random.Generator) -> bytes:
  header = mutated_json_text(_HEADER, rng)
  data = len(header).to_bytes(8, 'little') + header + bytes(32)
  return data if rng.random() < 0.7 else mutated_bytes(data, rng)


def _safetensors(data: bytes, folder: Path) -> None:
  file = folder / 'model.safetensors'
  file.write_bytes(data)
  for tensor in read_header(str(file)).values():
    with contextlib.suppress(UserError):  # With an unknown dtype.
      tensor.read(tuple(slice(0, 1) for _ in tensor.shape))


def _index(data: bytes, folder: Path) -> None:
  (folder / 'i').mkdir(exist_ok=True)
  header = json.dumps(_HEADER).encode()
  (folder / 'i' / 'a.safetensors').write_bytes(len(header).to_bytes(8, 'little') + header + bytes(32))
  (folder / 'i' / 'model.safetensors.index.json').write_bytes(data)
  for tensor in read_folder(folder / 'i').values():
    if Path(tensor.file).parent != folder / 'i':
      raise AssertionError(f'{tensor.file} is outside of its folder')


_TOPOLOGIES = ('v5p:8x16x16', 'v5e:16x16:2', 'h100:512x8', 'a100:8', 'cpu:64', 'TPU v5p:2x2x1', 'gb200:2x72')


def _topology(text: str, folder: Path) -> object:
  with contextlib.suppress(UserError):
    find_target(text)
  found = parse_topology(text)
  return found.name, found.num_devices


_EFFICIENCY = {'cpu': {'compute': 0.5, 'attention': 0.5, 'memory': 0.5, 'links': 0.5, 'network': 0.5}}


def _calibration(data: bytes, folder: Path) -> object:
  (folder / 'calibration.json').write_bytes(data)
  return apply_calibration(parse_topology('cpu:8'), folder / 'calibration.json')


@functools.cache
def _snapshot_text() -> str:
  weights = {'lm.w': snapshot.Weight('data, -', '64 x 7', 'lm.weight_split_dims_mapping.wt')}
  groups = {('all-gather', 'data', 'lm', 'forward'): snapshot.Group(3, 4096, 'fully sharded', 'lm.w')}
  heads = ('lm.X', ('task.train.num_train_steps=5',), 'h100:1x8', 'data 8', 'compiled', snapshot.GrowthLimits())
  return str(snapshot.Snapshot(*heads, {'peak': 1_234, 'parameters': 567}, weights, groups))


def _snapshot(data: str, folder: Path) -> None:
  (folder / 'plan.txt').write_text(data, encoding='utf-8', errors='surrogatepass')
  kept = snapshot.read(folder / 'plan.txt')
  if snapshot.regressions(kept, kept):
    raise AssertionError('a snapshot differs from itself')


def _heartbeat(data: bytes, folder: Path) -> None:
  (folder / 'heartbeats').mkdir(exist_ok=True)
  (folder / 'heartbeats' / '0.json').write_bytes(data)
  if beats := read_heartbeats(folder):
    _ = str(status_of(beats, is_held=False))


_TROUBLE = {'first': 5, 'last': 6, 'what': 'the loss is nan', 'action': 'rollback', 'batches': [{'epoch': 0, 'at': 8}]}
_TROUBLE |= {'back_to': 4, 'examples': ['record 7 of a']}


def _troubles(data: bytes, folder: Path) -> None:
  (folder / 'trouble.jsonl').write_bytes(data)
  found = read_troubles(folder)
  if not all(isinstance(state, dict) for state in batches_to_skip(found)):
    raise AssertionError('the state of an input is not a dict')
  go_back(folder, Trouble(7, 7, 'what', 'rollback'), max_rollbacks=9)
  if not [t for t in read_troubles(folder) if t.first == 7]:
    raise AssertionError('what happened last is not on record')


@functools.cache
def _state() -> TrainState:
  return TrainState(jax.numpy.int32(3), {'w': jax.numpy.ones((2, 3))}, {'m': jax.numpy.zeros(3)})


def _copies(folder: Path) -> tuple[EmergencyCopies, TrainState]:
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_one_device_sharding()), _state())
  (folder / 'emergency_copies.json').write_text('{"lineage": 1}')
  return EmergencyCopies(folder, [str(folder)], shapes, shapes), shapes


@functools.cache
def _one_device_sharding() -> jax.sharding.NamedSharding:
  return jax.sharding.NamedSharding(jax.make_mesh((1,), ('data',)), jax.sharding.PartitionSpec())


def _file_of_copy(folder: Path) -> Path:
  (home,) = (file for file in folder.glob('praxis_lite-*/*/1') if file.is_dir())
  return home / '3.0'


@functools.cache
def _copy() -> tuple[dict[str, Any], bytes]:
  """Returns the header of an emergency copy, without its checksum, and the bytes after it."""
  with tempfile.TemporaryDirectory() as name:
    copies, _ = _copies(Path(name))
    copies.write(StateToCopy(3, jax.device_put(_state(), _one_device_sharding()), _input().get_state(), 0))
    copies.close()
    header, _, data = _file_of_copy(Path(name)).read_bytes().partition(b'\n')
  return {key: value for key, value in json.loads(header).items() if key != 'checksum'}, data


def _draw_copy(rng: np.random.Generator) -> bytes:
  header, data = _copy()
  if rng.random() < 0.2:
    return mutated_bytes(json.dumps(add_checksum(header)).encode() + b'\n' + data, rng)
  changed = mutated_json(header, rng)  # With a correct checksum.
  return json.dumps(add_checksum(changed) if isinstance(changed, dict) else changed).encode() + b'\n' + data


def _emergency_copy(data: bytes, folder: Path) -> None:
  copies, shapes = _copies(folder)
  _file_of_copy(folder).write_bytes(data)
  copy, _ = copies.newest(0)
  if copy is not None:
    _input_state(copy.input_state, folder)
    jax.block_until_ready(copy.restore(shapes))


def _json_of(value: Callable[[], Any] | Any) -> DrawValue:
  return lambda rng: mutated_json_text(value() if callable(value) else value, rng)


PARSERS: dict[str, Parser] = {
  'overrides': Parser(_change_examples(_OVERRIDES), _override, 2),
  'strategies': Parser(
    lambda rng: (
      str(rng.choice(_PATTERNS)) if rng.random() < 0.7 else mutated_text(str(rng.choice(_PATTERNS)), rng),
      _change_examples(_STRATEGIES)(rng),
    ),
    _strategy,
    4,
  ),
  'config JSON': Parser(_json_of(lambda: json.loads(_config_text())), _json_config, 2),
  'run.json': Parser(_json_of(_record), _run_record, 2),
  'metrics.jsonl': Parser(_draw_metrics, _metrics, 2),
  'best.json': Parser(_json_of({'step': 2, 'metric': 'eval/valid/loss', 'mode': 'min', 'value': 0.5}), _best, 4),
  'vocabulary.json': Parser(_json_of({'vocabulary': 'abc'}), _vocabulary, 2),
  'checkpoint metadata': Parser(_draw_about, _about, 4),
  'list of files in a store': Parser(_draw_complete, _complete, 2),
  'input state': Parser(
    lambda rng: json.loads(json.dumps(mutated_json(_input().get_state(), rng), allow_nan=True)), _input_state, 4
  ),
  'text': Parser(lambda rng: mutated_bytes(b'to be or not to be\n\nthat is\xc3\xa9 all' * 2, rng), _text, 1),
  'arrays': Parser(_draw_arrays, _arrays, 4),
  'records': Parser(lambda rng: mutated_bytes(_example(), rng), _read_example, 6),
  'HF config.json': Parser(lambda rng: _json_of(_HF[int(rng.integers(len(_HF)))])(rng), _hf_config, 3),
  'safetensors': Parser(_draw_safetensors, _safetensors, 4),
  'safetensors index': Parser(
    _json_of({'metadata': {}, 'weight_map': {'a.weight': 'a.safetensors', 'b': 'a.safetensors'}}), _index, 4
  ),
  'topologies and targets': Parser(_change_examples(_TOPOLOGIES), _topology, 6),
  'calibration': Parser(_json_of(_EFFICIENCY), _calibration, 4),
  'snapshot of a plan': Parser(lambda rng: mutated_text(_snapshot_text(), rng), _snapshot, 4),
  'heartbeat': Parser(_json_of(dataclasses.asdict(Heartbeat(host='a', step=3, total_steps=9))), _heartbeat, 4),
  'trouble.jsonl': Parser(_json_of(_TROUBLE), _troubles, 4),
  'emergency copy': Parser(_draw_copy, _emergency_copy, 2),
}
