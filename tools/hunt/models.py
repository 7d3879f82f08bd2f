"""Random tasks of the framework on random meshes with random mappings, compared with one device.

A case is the text of a program, and this text is run, so a printed script is the same program. The optimizer keeps its
gradients in its state, so one compiled step gives the loss, every gradient, and the variables after a step of the real
optimizer. Differences in float32 count only if they also occur in float64.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from praxis_lite.common.errors import UserError
from tools.hunt.cases import (
  Entries,
  MeshSizes,
  Outcome,
  random_entries,
  random_mesh,
  remove_axis,
  smaller_entries,
  smaller_meshes,
  smaller_numbers,
)

FieldValue = int | float | str | bool | None | tuple[int, ...]

_HEADER = """\
import os
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
"""
_BODY = """\
import jax, jax.numpy as jnp, numpy as np, optax
from praxis_lite.common.config import Config
from praxis_lite.layers import ConvNet, Dropout, GroupNorm, Pooling, RelativeBias, RMSNorm
from praxis_lite.models import ClassificationModel, transformer_lm
from praxis_lite.training.task import SingleTask
from praxis_lite.training.partitioned_task import PartitionedTask

def recorded(optimizer):
  keep = optax.GradientTransformation(lambda v: {{'gradients': v}}, lambda g, _, v=None: (g, {{'gradients': g}}))
  return optax.chain(keep, optimizer)

{model}

def task(mesh_shape, dtype='float32'):
  t = Config(SingleTask, model=model(), mesh_axis_names={axes}, ici_mesh_shape=mesh_shape)
  t.model.dtype = dtype
  t.train.learner.set(optimizer=Config(recorded, {optimizer}), learning_rate={rate}, {learner})
{settings}
  return t.instantiate()

def named(tree):
  return [(jax.tree_util.keystr(path, simple=True, separator='/'), x) for path, x in jax.tree.leaves_with_path(tree)]

def results(task):
  \"\"\"What a step computes, by name: arrays in their true shapes.\"\"\"
  on_mesh = PartitionedTask(task, batch)
  state = on_mesh.init_state(jax.random.key(0))
  shapes = {{name: x.shape for name, x in named(on_mesh.unpadded_state_shapes.mdl_vars)}}
{step}
"""
_TRAIN = """\
  out = on_mesh.train_step(state, jax.random.key(1), batch)
  found = {'loss': out.weighted_loss, **{f'metric {k}': v for k, v in out.mean_metrics.items()}}
  for kind, tree in (('variable ', out.state.mdl_vars), ('gradient ', out.state.opt_states)):
    for name, x in named(tree):
      of_variable = name if kind == 'variable ' else name.rpartition('gradients/')[2] * ('gradients/' in name)
      if of_variable:
        found[kind + of_variable] = np.asarray(x)[tuple(map(slice, shapes[of_variable]))]
  return on_mesh.train_step.guarded, found
"""
_EVAL = """\
  out = on_mesh.eval_step(state.mdl_vars, jax.random.key(1), state.step, batch)
  found = {'loss': out.weighted_loss, **out.mean_metrics, **out.per_example_out}
  found.pop('accuracy', None)  # Which of equals is the greatest is not determined.
  found.pop('prediction', None)
  return on_mesh.eval_step.guarded, found
"""
_DECODE = """\
  out = on_mesh.decode_step(state.mdl_vars, jax.random.key(1), state.step, batch)
  return on_mesh.decode_step.guarded, {**out.metrics, **{k: v for k, v in out.decoded.items() if k != 'prediction'}}
"""
_STEPS = {'train': _TRAIN, 'eval': _EVAL, 'decode': _DECODE}
_FOOTER = """
_, right = results(task(None))
guarded, found = results(task({shape}))
print(len(guarded), 'operations are guarded')
for name in right:
  for one, other in zip(jax.tree.leaves(right[name]), jax.tree.leaves(found[name])):
    one, other = np.asarray(one), np.asarray(other)
    if not np.allclose(one, other, rtol=1e-3, atol=1e-3 * abs(one).max()):
      print('WRONG', name, one.shape, abs(one - other).max(), 'of', abs(one).max())
"""

_OPTIMIZERS = {
  'sgd': ('optimizer=Config(optax.sgd)', 1.0),
  'momentum': ('optimizer=Config(optax.sgd, momentum=0.9, nesterov=True)', 0.1),
  'adam': ('optimizer=Config(optax.adam, eps=1e-4)', 1e-2),
  'adafactor': ('optimizer=Config(optax.adafactor, min_dim_size_to_factor=2)', 1e-2),
  'lion': ('optimizer=Config(optax.lion)', 1e-2),
}

# The mapping fields of each model, and the ranks of the arrays they split.
_LM, _BLOCK = 'model.lm_tpl', 'model.lm_tpl.transformer_tpl.layers_tpl'
_WEIGHT, _ACTIVATION = 'weight_split_dims_mapping', 'activation_split_dims_mapping'
_LM_FIELDS = {
  f'{_LM}.{_ACTIVATION}.out': 3,
  f'{_BLOCK}.{_ACTIVATION}.out': 3,
  f'{_BLOCK}.attention_tpl.{_WEIGHT}.wt': 3,
  f'{_BLOCK}.attention_tpl.{_ACTIVATION}.blnh': 4,
  f'{_BLOCK}.attention_tpl.{_ACTIVATION}.blkh': 4,
  f'{_BLOCK}.attention_tpl.{_ACTIVATION}.out': 3,
  f'{_BLOCK}.ff_tpl.{_WEIGHT}.wt': 2,
  f'{_BLOCK}.ff_tpl.{_WEIGHT}.down': 2,
  f'{_BLOCK}.ff_tpl.{_ACTIVATION}.hidden': 3,
  f'{_BLOCK}.ff_tpl.{_ACTIVATION}.out': 3,
  f'{_BLOCK}.norm_tpl.{_WEIGHT}.wt': 1,
  f'{_LM}.final_norm_tpl.{_WEIGHT}.wt': 1,
  f'{_LM}.softmax_tpl.{_WEIGHT}.wt': 2,
  f'{_LM}.softmax_tpl.{_ACTIVATION}.out': 3,
  'inputs 2': 2,
}
_TIED_FIELDS = {f'{_LM}.softmax_tpl.{_ACTIVATION}.emb': 3}
_UNTIED_FIELDS = {f'{_LM}.embedding_tpl.{_WEIGHT}.wt': 2, f'{_LM}.embedding_tpl.{_ACTIVATION}.out': 3}
_STACK_FIELD = f'{_LM}.transformer_tpl.{_WEIGHT}.stack'
_BLOCK_INPUTS = f'{_BLOCK}.inputs_split_mapping'
_NET = 'model.network_tpl'
_NET_FIELDS = {
  f'{_NET}.conv_tpl.{_WEIGHT}.wt': 4,
  f'{_NET}.conv_tpl.{_ACTIVATION}.out': 4,
  f'{_NET}.norm_tpl.{_WEIGHT}.wt': 1,
  f'{_NET}.norm_tpl.{_ACTIVATION}.out': 4,
  f'{_NET}.global_pooling_tpl.{_ACTIVATION}.out': 2,
  f'{_NET}.{_ACTIVATION}.out': 2,
  f'model.softmax_tpl.{_WEIGHT}.wt': 2,
  f'model.softmax_tpl.{_ACTIVATION}.out': 2,
  'inputs 1': 1,
  'inputs 4': 4,
}
_POOL_FIELDS = {f'{_NET}.pooling_tpl.{_ACTIVATION}.out': 4}


@dataclasses.dataclass(frozen=True)
class Model:
  """A task.

  Attributes:
    family: 'lm' or 'classifier'.
    fields: values of fields of the model, its batch and its learner, by name.
    mesh: names and sizes of the axes.
    mappings: how weights and activations are split, by the path of the config's field.
    step: 'train', 'eval' or 'decode'.
    optimizer: a name of `_OPTIMIZERS`.
    partitioning: 'auto' or 'shard_map'.
  """

  family: str
  fields: tuple[tuple[str, FieldValue], ...]
  mesh: MeshSizes
  mappings: tuple[tuple[str, Entries], ...]
  step: str
  optimizer: str = 'sgd'
  partitioning: str = 'auto'

  def body(self) -> str:
    """Returns the source of the task, its batch, and the results that are compared."""
    fields = dict(self.fields)
    optimizer, rate = _OPTIMIZERS[self.optimizer]
    learner = [f'{name}={fields[name]}' for name in _LEARNER if fields[name]]
    text = _lm_text(fields, self.step) if self.family == 'lm' else _classifier_text(fields)
    return _BODY.format(
      model=text,
      axes=tuple(name for name, _ in self.mesh),
      optimizer=optimizer,
      rate=rate,
      learner=', '.join(learner),
      settings='\n'.join(f'  {line}' for line in self._settings()),
      step=_STEPS[self.step],
    )

  def script(self) -> str:
    shape = tuple(size for _, size in self.mesh)
    return f'# {self}\n{_HEADER}{self.body()}{_FOOTER.format(shape=shape)}'

  def _settings(self) -> Iterator[str]:
    inputs = {path: _mapping(entries) for path, entries in self.mappings if path.startswith('inputs')}
    for path, entries in self.mappings:
      if path == _BLOCK_INPUTS:
        yield f't.{path} = {{"map_3d": {_mapping(entries)}}}'
      elif path not in inputs:
        yield f't.{path} = {_mapping(entries)}'
    if inputs:
      known: dict[str, object] = {f'map_{path[-1]}d': mapping for path, mapping in inputs.items()}
      for rank in (1, 2) if self.family == 'lm' else (1, 4):
        known.setdefault(f'map_{rank}d', None)
      yield f't.train.inputs_split_mapping = {known}'
    if dict(self.fields).get('strategy'):
      axes = tuple(name for name, _ in self.mesh)
      yield f"t.strategy = [(\".*\", '''fsdp(axis={axes}, min_size_to_shard_mb=0, allow_padding=True)''')]"
    if self.partitioning != 'auto':
      yield f't.partitioning = {self.partitioning!r} if mesh_shape else "auto"'

  def run(self) -> Outcome:
    """Compares the step on the mesh with one device, in float32. If they differ, again in float64."""
    outcome = self._compare('float32', 3e-4, 1e-6)
    if outcome.kind == 'wrong':
      with jax.enable_x64(True):
        outcome = self._compare('float64', 1e-5, 1e-12)
    return outcome

  def _compare(self, dtype: str, tolerance: float, rounding: float) -> Outcome:
    """Compares the step on the mesh with one device. An error on one device is raised.

    Args:
      dtype: what the model computes in.
      tolerance: the largest allowed error of an entry, as a share of the largest entry.
      rounding: gradients below this share of the largest one consist only of rounding errors, such as gradients of
        the bias of attention's keys, and may change their variables arbitrarily.
    """
    scope: dict[str, object] = {}
    exec(self.body(), scope)
    task: Callable[..., object] = scope['task']  # type: ignore[assignment]
    results: Callable[..., tuple[list[object], dict[str, object]]] = scope['results']  # type: ignore[assignment]
    alone = True
    try:
      on_mesh = task(tuple(size for _, size in self.mesh), dtype)
      _, right = results(task(None, dtype))
      alone = False
      guarded, found = results(on_mesh)
    except UserError as error:
      return Outcome('refused', re.sub(r"\(.*?\)|'.*?'|\d+|\[.*?\]", '…', str(error))[:160])
    except Exception as error:
      if alone:
        raise
      return Outcome('wrong', f'{type(error).__name__}: {str(error)[:300]}')
    worst, differing = 0.0, ''
    if not all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(right)) if x.dtype.kind == 'f'):
      raise FloatingPointError('not finite on one device')
    gradients = {name: np.abs(np.asarray(x)) for name, x in right.items() if name.startswith('gradient ')}
    largest = max((float(x.max(initial=0)) for x in gradients.values()), default=0.0)
    for name, expected in right.items():
      if 'grad_norm' in name:
        continue
      of_variable = name.replace('variable ', 'gradient ')
      for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found[name])):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = float(np.abs(one).max(initial=0)) + 1e-6
        if name in gradients:
          scale = max(scale, 1e-3 * largest)
        different = np.abs(one - other)
        if name != of_variable and of_variable in gradients:
          moved = np.maximum(gradients[of_variable], np.abs(np.asarray(found[of_variable])))
          is_rounding = moved <= rounding * largest
          if self.optimizer == 'adafactor' and np.any(moved[is_rounding]):
            continue  # It scales a whole variable by the size of its updates.
          different = different[~is_rounding]
        error_ = float(different.max(initial=0) / scale)
        if not error_ <= worst:
          worst, differing = error_, f'{name} {one.shape} differs by {error_:.2g} in {dtype}'
    if not worst <= tolerance:
      return Outcome('wrong', differing, len(guarded))
    return Outcome('right', guarded=len(guarded))

  def smaller(self) -> Iterator[Model]:
    """Yields models with one thing less: a mapping, an axis, a field at its simplest value, or part of a size."""
    if self.optimizer != 'sgd':
      yield dataclasses.replace(self, optimizer='sgd')
    if self.partitioning != 'auto':
      yield dataclasses.replace(self, partitioning='auto')
    for i in range(len(self.mappings)):
      yield dataclasses.replace(self, mappings=(*self.mappings[:i], *self.mappings[i + 1 :]))
    plain = _LM_PLAIN if self.family == 'lm' else _NET_PLAIN
    for i, (name, value) in enumerate(self.fields):
      simpler = [plain[name]] if name in plain else [*smaller_numbers(value)] if isinstance(value, int) else []
      for v in simpler:
        if v != value:
          mappings = tuple((path, entries) for path, entries in self.mappings if not _vanishes(path, name, v))
          yield dataclasses.replace(
            self, fields=(*self.fields[:i], (name, v), *self.fields[i + 1 :]), mappings=mappings
          )
    for mesh, removed in smaller_meshes(self.mesh):
      mappings = self.mappings
      if removed is not None:
        mappings = tuple((path, remove_axis(entries, removed)) for path, entries in mappings)
      yield dataclasses.replace(self, mesh=mesh, mappings=mappings)
    for i, (path, entries) in enumerate(self.mappings):
      for fewer in smaller_entries(entries):
        yield dataclasses.replace(self, mappings=(*self.mappings[:i], (path, fewer), *self.mappings[i + 1 :]))


def _vanishes(path: str, field: str, value: FieldValue) -> bool:
  """Returns whether the layer of a mapping no longer exists if a field has this value."""
  layers = {
    ('norm', None): ('norm_tpl',),
    ('pooling', None): ('.pooling_tpl',),
    ('style', 'llama'): ('position_tpl',),
    ('repeat', False): ('.stack',),
    ('tie_embeddings', False): ('.emb',),
  }
  return path.endswith(layers.get((field, value), ())) or any(  # type: ignore[arg-type]
    f'{layer}.' in path
    for layer in layers.get((field, value), ())  # type: ignore[arg-type]
  )


def _mapping(entries: Entries) -> tuple[object, ...]:
  return tuple(None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries)


_LEARNER = ('num_microbatches', 'clip_gradient_norm_to_value')
# The simplest values of fields. Sizes are not listed: they are reduced.
_LM_PLAIN: dict[str, FieldValue] = {
  **{'style': 'llama', 'repeat': False, 'remat': 'none', 'tie_embeddings': False, 'dropout': 0.0, 'segments': False},
  **{'combine_qkv': False, 'sliding_window': None, 'logit_soft_cap': None, 'qk_norm': False, 'relative_bias': False},
  **{'lookup_style': 'gather', 'z_loss_weight': 0.0, 'label_smoothing': 0.0, 'strategy': False},
  **{'num_microbatches': 1, 'clip_gradient_norm_to_value': 0.0},
}
_NET_PLAIN: dict[str, FieldValue] = {
  **{'pooling': None, 'norm': None, 'dropout': 0.0, 'strides': (1, 1), 'padding': 'SAME', 'strategy': False},
  **{'num_microbatches': 1, 'clip_gradient_norm_to_value': 0.0, 'pooling_strides': None, 'pooling_padding': 'VALID'},
}


def _size(value: FieldValue) -> int:
  return value if isinstance(value, int) else 1


def _lm_text(f: Mapping[str, FieldValue], step: str) -> str:
  names = ('style', 'repeat', 'remat', 'tie_embeddings', 'dropout')
  heads = _size(f['num_kv_heads']) * _size(f['heads_per_kv'])
  lines = [
    'def model():',
    f'  m = transformer_lm(vocab_size={f["vocab_size"]}, model_dims={f["model_dims"]}, num_layers={f["num_layers"]}, '
    f'num_heads={heads}, num_kv_heads={f["num_kv_heads"]}, dims_per_head={f["half_head"]} * 2, '
    f'hidden_dims={f["hidden_dims"]}, max_len=32, ' + ', '.join(f'{name}={f[name]!r}' for name in names) + ')',
    '  lm = m.lm_tpl; attention = lm.transformer_tpl.layers_tpl.attention_tpl',
    '  m.decoder_tpl.set(max_decode_steps=3, temperature=0.0)',
  ]
  for name in ('combine_qkv', 'sliding_window', 'logit_soft_cap'):
    if f[name]:
      lines.append(f'  attention.{name} = {f[name]!r}')
  if f['qk_norm']:
    lines.append('  attention.qk_norm_tpl = Config(RMSNorm)')
  if f['relative_bias']:
    lines.append('  attention.relative_bias_tpl = Config(RelativeBias, num_buckets=7, max_distance=9)')
  for name in ('z_loss_weight', 'label_smoothing'):
    if f[name]:
      lines.append(f'  lm.softmax_tpl.{name} = {f[name]!r}')
  if f['lookup_style'] != 'gather':
    lines.append(f'  (lm.embedding_tpl or lm.softmax_tpl).lookup_style = {f["lookup_style"]!r}')
  lines += [
    '  return m',
    '',
    f'rng = np.random.default_rng({f["seed"]})',
    f'shape, vocab = ({f["batch"]}, {f["length"]}), {f["vocab_size"]}',
    "batch = {'ids': rng.integers(0, vocab, shape).astype(np.int32)}",
  ]
  if step == 'decode':
    lines.append("batch['prompt_lengths'] = rng.integers(1, shape[1] + 1, shape[:1]).astype(np.int32)")
  else:
    lines += [
      "batch['labels'] = rng.integers(0, vocab, shape).astype(np.int32)",
      "batch['weights'] = (rng.integers(0, 5, shape) > 0).astype(np.float32)",
    ]
    if f['segments']:
      lines += [
        "batch['segment_ids'] = np.sort(rng.integers(1, 3, shape), axis=1).astype(np.int32)",
        "batch['segment_pos'] = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))",
      ]
  return '\n'.join(lines)


def _classifier_text(f: Mapping[str, FieldValue]) -> str:
  groups = _size(f['groups'])
  channels = tuple(groups * _size(f[f'channels_{i}']) for i in range(_size(f['num_layers'])))
  lines = [
    'def model():',
    f'  net = Config(ConvNet, input_channels={groups * _size(f["input_channels"])}, channels={channels}, '
    f'filter_size={(f["filter_height"], f["filter_width"])}, dropout_tpl=Config(Dropout, rate={f["dropout"]}))',
    f'  net.conv_tpl.set(groups={groups}, strides={f["strides"]}, padding={f["padding"]!r})',
  ]
  if f['norm'] is None:
    lines.append('  net.norm_tpl = None')
  elif f['norm'] == 'group':
    lines.append(f'  net.norm_tpl = Config(GroupNorm, num_groups={groups})')
  if f['pooling'] is None:
    lines.append('  net.pooling_tpl = None')
  else:
    lines.append(
      f'  net.pooling_tpl.set(kind={f["pooling"]!r}, window={(f["window_height"], f["window_width"])}, '
      f'strides={f["pooling_strides"]}, padding={f["pooling_padding"]!r})'
    )
  return '\n'.join(
    [
      *lines,
      f'  net.global_pooling_tpl.kind = {f["global_pooling"]!r}',
      f'  return Config(ClassificationModel, num_classes={f["num_classes"]}, network_tpl=net)',
      '',
      f'rng, rows = np.random.default_rng({f["seed"]}), {f["batch"]}',
      f'image = rng.normal(size=(rows, {f["height"]}, {f["width"]}, {groups * _size(f["input_channels"])}))',
      "batch = {'image': image.astype(np.float32), 'weights': (rng.integers(0, 5, rows) > 0).astype(np.float32),",
      f"         'label': rng.integers(0, {f['num_classes']}, rows).astype(np.int32)}}",
    ]
  )


def _draw_lm(rng: np.random.Generator) -> dict[str, FieldValue]:
  def one(*values: FieldValue) -> FieldValue:
    return values[rng.integers(len(values))]

  return {
    'style': one('llama', 'gpt2'),
    'repeat': one(True, False),
    'remat': one('none', 'none', 'full', 'dots_saveable', 'dots_with_no_batch_dims_saveable'),
    'tie_embeddings': one(True, False),
    'dropout': one(0.0, 0.0, 0.1),
    'segments': one(False, False, True),
    'combine_qkv': one(False, False, True),
    'sliding_window': one(None, None, 3),
    'logit_soft_cap': one(None, None, 5.0),
    'qk_norm': one(False, False, True),
    'relative_bias': one(False, False, True),
    'lookup_style': one('gather', 'gather', 'matmul'),
    'z_loss_weight': one(0.0, 0.0, 0.01),
    'label_smoothing': one(0.0, 0.0, 0.1),
    'strategy': bool(rng.random() < 0.1),
    'num_microbatches': one(1, 1, 1, 2, 3),
    'clip_gradient_norm_to_value': one(0.0, 0.0, 0.5),
    'vocab_size': one(16, 32, 37, 97),
    'model_dims': one(8, 8, 12, 16, 18, 30),
    'num_layers': one(1, 2, 3),
    'num_kv_heads': one(1, 2, 3),
    'heads_per_kv': one(1, 1, 2),
    'half_head': one(1, 2, 3, 4),
    'hidden_dims': one(8, 16, 21, 24, 32),
    'batch': one(1, 2, 3, 4, 7, 8, 8, 16, 24),
    'length': one(2, 4, 5, 8, 8, 16, 19),
    'seed': int(rng.integers(1 << 20)),
  }


def _draw_classifier(rng: np.random.Generator) -> dict[str, FieldValue]:
  def one(*values: FieldValue) -> FieldValue:
    return values[rng.integers(len(values))]

  return {
    'pooling': one(None, 'max', 'mean'),
    'norm': one(None, 'batch', 'group'),
    'dropout': one(0.0, 0.0, 0.1),
    'strides': one((1, 1), (1, 1), (2, 1)),
    'padding': one('SAME', 'SAME', 'VALID'),
    'pooling_strides': one(None, (1, 1), (2, 1)),
    'pooling_padding': one('VALID', 'SAME'),
    'strategy': bool(rng.random() < 0.1),
    'num_microbatches': one(1, 1, 1, 2, 3),
    'clip_gradient_norm_to_value': one(0.0, 0.0, 0.5),
    'global_pooling': one('mean', 'max'),
    'num_layers': one(1, 2),
    'groups': one(1, 1, 2, 3),
    'input_channels': one(1, 2, 3),
    'channels_0': one(1, 2, 3, 4),
    'channels_1': one(1, 2, 3, 4),
    'filter_height': one(1, 2, 3),
    'filter_width': one(1, 3),
    'window_height': one(1, 2, 3),
    'window_width': one(1, 2),
    'num_classes': one(2, 5, 8),
    'height': one(6, 8, 11),
    'width': one(6, 7, 8),
    'batch': one(1, 2, 4, 7, 8, 16),
    'seed': int(rng.integers(1 << 20)),
  }


def draw_model(rng: np.random.Generator) -> Model:
  """Returns a random task."""
  family = 'lm' if rng.random() < 0.75 else 'classifier'
  fields = _draw_lm(rng) if family == 'lm' else _draw_classifier(rng)
  mesh = random_mesh(rng)
  if family == 'lm':
    ranks = _LM_FIELDS | (_TIED_FIELDS if fields['tie_embeddings'] else _UNTIED_FIELDS)
    ranks |= {_STACK_FIELD: 1} if fields['repeat'] and rng.random() < 0.3 else {}
    ranks |= {f'{_LM}.position_tpl.{_WEIGHT}.wt': 2} if fields['style'] == 'gpt2' else {}
    ranks |= {_BLOCK_INPUTS: 3} if rng.random() < 0.2 else {}
  else:
    ranks = _NET_FIELDS | (_POOL_FIELDS if fields['pooling'] else {})
    ranks = {path: rank for path, rank in ranks.items() if fields['norm'] or '.norm_tpl.' not in path}
  step = str(rng.choice(['train', 'train', 'train', 'eval', 'decode']))
  partitioning = 'shard_map' if step == 'train' and rng.random() < 0.15 else 'auto'
  if partitioning == 'shard_map':
    fields |= {'dropout': 0.0}  # With shard_map, each device draws a different mask.
    ranks = {path: rank for path, rank in ranks.items() if _WEIGHT in path}
  elif family == 'lm' and rng.random() < 0.4:
    ranks = _usual(ranks)
  mappings = {} if fields['strategy'] else _draw_mappings(rng, ranks, mesh)
  return Model(
    family,
    tuple(fields.items()),
    mesh,
    tuple(mappings.items()),
    step,
    str(rng.choice([*_OPTIMIZERS])) if step == 'train' else 'sgd',
    partitioning,
  )


def _usual(ranks: Mapping[str, int]) -> dict[str, int]:
  """Asks `_draw_mappings` for a common layout, by making the ranks negative."""
  return {path: -rank for path, rank in ranks.items()}


def _draw_mappings(rng: np.random.Generator, ranks: Mapping[str, int], mesh: MeshSizes) -> dict[str, Entries]:
  """Draws entries for each field. For negative ranks, the layout is a common one: activations agree on their rows."""
  rows, columns, weights = random_entries(rng, 3, mesh, 1.0)
  if any(rank < 0 for rank in ranks.values()):
    return {path: _usual_entries(path, -rank, rows, columns, weights or rows) for path, rank in ranks.items()}
  mappings = {path: random_entries(rng, rank, mesh) for path, rank in ranks.items() if rng.random() < 0.85}
  stacked = [axis for axes in mappings.get(_STACK_FIELD, ()) for axis in axes]
  for path in mappings:
    if path.startswith(_BLOCK) and _WEIGHT in path:
      for axis in stacked:
        mappings[path] = remove_axis(mappings[path], axis)
  return mappings


def _usual_entries(
  path: str, rank: int, rows: tuple[str, ...], columns: tuple[str, ...], weights: tuple[str, ...]
) -> Entries:
  none: Entries = ((),)
  if path == _STACK_FIELD or 'norm_tpl' in path or 'position_tpl' in path:
    return none * rank
  if _WEIGHT not in path:
    wide = path.endswith(('hidden', 'blnh', 'blkh')) or path.endswith(f'softmax_tpl.{_ACTIVATION}.out')
    return (rows, *none * (rank - 2), columns if wide else ()) if rank < 4 else (rows, (), columns, ())
  entries = (weights, columns, *none * (rank - 2))
  table = 'embedding_tpl' in path
  return (columns, weights) if table or path.endswith('down') else entries
