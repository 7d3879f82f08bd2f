"""Whole tasks with random splits of all arrays; two steps are compared with one device.

A task is drawn from a family, with random fields. Then a strategy gives each variable a random split, and each
activation that a layer constrains gets one too. These activations are found while layers are traced, so new layers need
no code here. The task is compared in losses, metrics, gradients and every array of the state after two steps of the
optimizer, in evaluation, in decoding, and in the initial state if it is made on the mesh. Where results differ, the
comparison is repeated in float64. Several layouts of a model are compared with the same run on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.common.config import Config
from praxis_lite.common.errors import UserError
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.layers import (
  ConvNet,
  Dropout,
  FeedForward,
  GatedFeedForward,
  GroupNorm,
  LayerNorm,
  Linear,
  MoeFeedForward,
  MultiHeadAttention,
  RelativeBias,
  RMSNorm,
)
from praxis_lite.layers.base import Layer
from praxis_lite.models import ClassificationModel, set_pipeline, transformer_lm
from praxis_lite.sharding.strategies import Op, Variable, register_rule
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask
from tools.graphs.layers import HeadProducts, IdSums, Mixer, Tower, Window
from tools.graphs.meshes import AXES, draw_mesh
from tools.hunt.cases import (
  Entries,
  MeshSizes,
  Outcome,
  num_devices,
  random_entries,
  remove_axis,
  smaller_entries,
  smaller_meshes,
)

_SCRIPT = """\
# From the root of the project: PYTHONPATH=. python this_file.py
import os
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count={devices}'
from tools.graphs.tasks import Task
print(Task(
{fields}
).run())
"""
_OPTIMIZERS = {
  'sgd': Config(optax.sgd),
  'momentum': Config(optax.sgd, momentum=0.9, nesterov=True),
  'adam': Config(optax.adam, eps=1e-3),
  'adamw': Config(optax.adamw, eps=1e-3, weight_decay=0.1),
  'rmsprop': Config(optax.rmsprop, eps=1e-3),
  'lamb': Config(optax.lamb, eps=1e-3),
  'lion': Config(optax.lion),
}
Value = Any
_Splits = tuple[tuple[str, Entries], ...]


@register_rule('split_as')
def split_as(entries: Entries) -> Op:
  """Returns an op of a strategy that splits a variable by these entries, one for each dimension."""

  def op(spec: tuple[Any, ...], variable: Variable, mesh: object) -> tuple[Any, ...]:
    del spec, mesh
    return (
      tuple(axes or None for axes in entries) if len(entries) == len(variable.shape) else (None,) * len(variable.shape)
    )

  return op


def record_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns an optimizer that also keeps the last gradients in its state."""
  keep = optax.GradientTransformation(lambda v: {'gradients': v}, lambda g, _, v=None: (g, {'gradients': g}))
  return optax.chain(keep, optimizer)


@dataclasses.dataclass(frozen=True)
class Task:
  """A task on a mesh.

  Attributes:
    family: 'lm', 'tower' or 'convolutions'.
    fields: values of fields of the model, the batch and the learner.
    mesh: names and sizes of the axes.
    weights: how variables are split, by path.
    activations: how activations are split, by path of the layer's mapping.
    inputs: how inputs are split, by rank.
    steps: some of 'init', 'train', 'evaluate' and 'decode'. Without 'init', the state is initialized on one device and
      then placed on the mesh.
    strategy: an op for variables that `weights` does not name; '' for none.
    partitioning: 'auto' or 'shard_map'.
  """

  family: str
  fields: tuple[tuple[str, Value], ...]
  mesh: MeshSizes
  weights: _Splits = ()
  activations: _Splits = ()
  inputs: _Splits = ()
  steps: tuple[str, ...] = ('train',)
  strategy: str = ''
  partitioning: str = 'auto'

  @property
  def size(self) -> int:
    return 1

  def script(self) -> str:
    """Returns a standalone program, to run from the project's root."""
    fields = '\n'.join(f'  {f.name}={getattr(self, f.name)!r},' for f in dataclasses.fields(self))
    return _SCRIPT.format(devices=num_devices(self.mesh), fields=fields)

  def alone(self) -> Task:
    """Returns the same task on one device. It is equal for all layouts of a model."""
    return Task(self.family, self.fields, tuple((axis, 1) for axis in AXES), steps=self.steps)

  def task(self, dtype: str = 'float32') -> SingleTask:
    """Returns the task as an object, on its mesh."""
    f = dict(self.fields)
    config = Config(SingleTask, model=_MODELS[self.family](f))
    config.model.dtype = dtype
    optimizer = Config(record_gradients, optimizer=_OPTIMIZERS[f['optimizer']])
    config.train.learner.set(optimizer=optimizer, learning_rate=0.05)
    config.train.learner.set(num_microbatches=f['num_microbatches'], ema_decay=f['ema_decay'])
    config.train.learner.clip_gradient_norm_to_value = f['clip']
    config.mesh_axis_names = tuple(name for name, _ in self.mesh)
    config.ici_mesh_shape = tuple(size for _, size in self.mesh)
    rules = [(re.escape(path), f'split_as({entries!r})') for path, entries in self.weights]
    config.strategy = rules + ([('.*', self.strategy)] if self.strategy else [])
    config.partitioning = self.partitioning
    if self.inputs:
      known: dict[str, object] = {f'map_{n}d': None for n in range(1, 6)}
      config.train.inputs_split_mapping = known | {f'map_{rank}d': _mapping(e) for rank, e in self.inputs}
    task = config.instantiate()
    layers = {layer.path_name: layer for layer in task.model.descendants()}
    for path, entries in self.activations:
      layer, _, name = path.rpartition('.')
      if layer in layers:
        layers[layer].change_split_mappings('activation_split_dims_mapping', **{name: _mapping(entries)})
    return task

  def run(self) -> Outcome:
    """Compares the task on its mesh with one device.

    Raises:
      Exception: it does not run on one device either.
    """
    outcome = self._compare('float32', 2e-3)
    if outcome.kind == 'wrong':
      with jax.enable_x64(True):
        try:
          exact = self._compare('float64', 1e-6)
        except Exception as error:
          return Outcome('wrong', f'{outcome.why}; in float64 on one device: {type(error).__name__}', outcome.guarded)
      return exact if exact.kind != 'wrong' else outcome
    return outcome

  def _compare(self, dtype: str, tolerance: float) -> Outcome:
    alone = True
    try:
      first_state, expected = _results_alone(self.alone(), dtype)
      alone = False
      found, guarded = self.results(dtype, first_state)
    except UserError as error:
      return Outcome('refused', re.sub(r"\(.*?\)|'.*?'|\d+|\[.*?\]", '…', str(error))[:160])
    except Exception as error:
      if alone:
        raise
      return Outcome('wrong', f'{type(error).__name__}: {str(error)[:300]}')
    if not all(np.isfinite(x).all() for x in expected.values()):
      raise FloatingPointError('not finite on one device')
    largest: dict[str, float] = {}
    for name, x in expected.items():
      kind = name.split(' ')[0]
      largest[kind] = max(largest.get(kind, 0.0), float(np.abs(x).max(initial=0)))
    wrong = []
    for name, one in expected.items():
      scale = max(float(np.abs(one).max(initial=0)), 0.01 * largest[name.split(' ')[0]])
      off = float(np.abs(one - found[name]).max(initial=0)) if found[name].shape == one.shape else math.inf
      if not off <= tolerance * scale + 1e-9:
        wrong.append((off / max(scale, 1e-30), f'{name} {one.shape}'))
    if wrong:
      worst = '; '.join(f'{name} is off by {off:.2g}' for off, name in sorted(wrong, reverse=True)[:4])
      return Outcome('wrong', f'{len(wrong)} results differ: {worst}', guarded)
    return Outcome('right', guarded=guarded)

  def results(self, dtype: str, first_state: Any = None) -> tuple[dict[str, np.ndarray], int]:
    """Returns the results of the steps by name, in true shapes, and how many operations the guards changed.

    Args:
      dtype: the dtype in which the model computes.
      first_state: the first train state, in true shapes; 'init' does not use it. None makes one.
    """
    found: dict[str, np.ndarray] = {}
    task, batch, guarded = self.task(dtype), self.batch(), 0
    on_mesh = PartitionedTask(task, batch)

    def note(kind: str, tree: object) -> None:
      for path, x in leaves_by_path(tree).items():
        if not jnp.issubdtype(getattr(x, 'dtype', np.float32), jax.dtypes.extended):
          found[f'{kind} {path_name(path)}'] = np.asarray(x).astype(np.float64)

    def note_state(prefix: str, state: Any) -> None:
      unpadded = on_mesh.unpad(state)
      for name in ('mdl_vars', 'opt_states', 'ema_vars'):
        note(f'{prefix}{name}', getattr(unpadded, name))

    if first_state is None or 'init' in self.steps:
      state = on_mesh.init_state(jax.random.key(0))
      note_state('first_', state)
    else:
      state = on_mesh.pad(first_state)
    if 'train' in self.steps:
      for i in range(2):
        out = on_mesh.train_step(state, jax.random.key(1 + i), batch)
        state = out.state
        found[f'loss of step {i}'] = np.asarray(out.weighted_loss, np.float64)
      note('metric', {name: metric for name, metric in out.mean_metrics.items() if 'accuracy' not in name})
      note_state('', state)
      guarded += len(on_mesh.train_step.guarded)
    if 'evaluate' in self.steps:
      evaluated = on_mesh.eval_step(state.mdl_vars, jax.random.key(5), state.step, batch)
      found['loss of evaluation'] = np.asarray(evaluated.weighted_loss, np.float64)
      guarded += len(on_mesh.eval_step.guarded)
    if 'decode' in self.steps:
      prompts = self.batch(for_decoding=True)
      on_mesh = PartitionedTask(task, prompts)
      decoded = on_mesh.decode_step(state.mdl_vars, jax.random.key(5), state.step, prompts)
      note('decoded', {k: v for k, v in decoded.decoded.items() if np.issubdtype(v.dtype, np.number)})
      guarded += len(on_mesh.decode_step.guarded)
    return found, guarded

  def batch(self, for_decoding: bool = False) -> dict[str, np.ndarray]:
    """Returns a batch with values that depend only on the seed."""
    f = dict(self.fields)
    rng, rows = np.random.default_rng(f['seed']), f['batch']
    weights = (rng.integers(0, 5, rows) > 0).astype(np.float32)
    weights[0] = 1.0
    if self.family == 'lm':
      shape = rows, f['length']
      ids = rng.integers(0, f['vocab_size'], shape).astype(np.int32)
      if for_decoding:
        return {'ids': ids, 'prompt_lengths': rng.integers(1, shape[1] + 1, rows).astype(np.int32)}
      labels = rng.integers(0, f['vocab_size'], shape).astype(np.int32)
      batch = {'ids': ids, 'labels': labels, 'weights': weights[:, None] * np.ones(shape, np.float32)}
      if f['segments']:
        batch['segment_ids'] = np.sort(rng.integers(1, 3, shape), axis=1).astype(np.int32)
        batch['segment_pos'] = np.tile(np.arange(shape[1], dtype=np.int32), (rows, 1))
      return batch
    names = ['length', 'dims'] if self.family == 'tower' else ['height', 'width', 'channels']
    shape = tuple(f[name] for name in names)
    image = rng.standard_normal((rows, *shape)).astype(np.float32)
    return {'image': image, 'label': rng.integers(0, f['classes'], rows).astype(np.int32), 'weights': weights}

  # -------------------------------------------------------------- smaller

  def smaller(self) -> Iterator[Task]:
    """Yields smaller tasks: with fewer steps, splits or axes, or with a field at its simplest value."""
    for step in self.steps if len(self.steps) > 1 else ():
      yield dataclasses.replace(self, steps=(step,))
    if self.strategy:
      yield dataclasses.replace(self, strategy='')
    if self.partitioning != 'auto':
      yield dataclasses.replace(self, partitioning='auto')
    splits: _Splits
    for name in ('weights', 'activations', 'inputs'):
      splits = getattr(self, name)
      if len(splits) > 3:
        half = len(splits) // 2
        for kept in ((), splits[:half], splits[half:]):
          yield dataclasses.replace(self, **{name: kept})  # type: ignore[arg-type]
      for i in range(len(splits)):
        yield dataclasses.replace(self, **{name: (*splits[:i], *splits[i + 1 :])})  # type: ignore[arg-type]
    for mesh, removed in smaller_meshes(self.mesh):
      if removed is not None:
        groups = {
          name: tuple((path, remove_axis(entries, removed)) for path, entries in getattr(self, name))
          for name in ('weights', 'activations', 'inputs')
        }
        if f"'{removed}'" not in self.strategy and dict(self.fields).get('context_axis') != removed:
          yield dataclasses.replace(self, mesh=mesh, **groups)  # type: ignore[arg-type]
      else:
        yield dataclasses.replace(self, mesh=mesh)
    for i, (name, value) in enumerate(self.fields):
      if name in _PLAIN and value != _PLAIN[name]:
        yield dataclasses.replace(self, fields=(*self.fields[:i], (name, _PLAIN[name]), *self.fields[i + 1 :]))
      elif name == 'layers' and len(value) > 1:
        for layer in value:
          yield dataclasses.replace(self, fields=(*self.fields[:i], (name, (layer,)), *self.fields[i + 1 :]))
    for name in ('weights', 'activations', 'inputs'):
      splits = getattr(self, name)
      for i, (path, entries) in enumerate(splits):
        for fewer in smaller_entries(entries):
          yield dataclasses.replace(self, **{name: (*splits[:i], (path, fewer), *splits[i + 1 :])})  # type: ignore[arg-type]


# The simplest value of each field.
_PLAIN: dict[str, Value] = {
  **{'optimizer': 'sgd', 'num_microbatches': 1, 'ema_decay': 0.0, 'clip': 0.0, 'dropout': 0.0, 'segments': False},
  **{'experts': 0, 'stages': 0, 'remat': 'none', 'sliding_window': None, 'logit_soft_cap': None, 'qk_norm': False},
  **{'relative_bias': False, 'combine_qkv': False, 'implementation': 'dense', 'context_axis': None, 'norm': None},
  **{'num_layers': 1, 'pooling': None, 'tie': False, 'lookup_style': 'gather', 'z_loss_weight': 0.0},
  **{'label_smoothing': 0.0},
}


@functools.lru_cache(maxsize=2)
def _results_alone(case: Task, dtype: str) -> tuple[Any, dict[str, np.ndarray]]:
  """Returns the first state of a task on one device, and the results of its steps."""
  on_device = PartitionedTask(case.task(dtype), case.batch())
  first_state = on_device.unpad(on_device.init_state(jax.random.key(0)))
  found, _ = case.results(dtype, first_state)
  return first_state, found


def _mapping(entries: Entries) -> tuple[object, ...]:
  return tuple(None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries)


# ---------------------------------------------------------------- models


def _lm(f: dict[str, Value]) -> Config:
  experts = None
  if f['experts']:
    experts = Config(MoeFeedForward, num_experts=f['experts'], dispatch=f['dispatch'], hidden_dims=f['hidden_dims'])
    experts.set(num_experts_per_token=min(2, f['experts']), num_shared_experts=f['shared'])
    experts.router_tpl.set(load_balance_loss_weight=0.1, z_loss_weight=0.01)
  model = transformer_lm(
    vocab_size=f['vocab_size'], model_dims=f['dims'], num_layers=f['num_layers'],
    num_heads=f['kv_heads'] * f['groups'], num_kv_heads=f['kv_heads'], dims_per_head=f['head_dims'],
    hidden_dims=f['hidden_dims'], style=f['style'], max_len=32, tie_embeddings=f['tie'], dropout=f['dropout'],
    repeat=f['repeat'] or bool(f['stages']), remat=f['remat'],
    experts=experts,
  )  # fmt: skip
  attention = model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl
  for name in ('sliding_window', 'logit_soft_cap', 'combine_qkv', 'implementation'):
    setattr(attention, name, f[name])
  attention.context_axis = f['context_axis']
  model.lm_tpl.softmax_tpl.set(z_loss_weight=f['z_loss_weight'], label_smoothing=f['label_smoothing'])
  (model.lm_tpl.embedding_tpl or model.lm_tpl.softmax_tpl).lookup_style = f['lookup_style']
  if f['qk_norm']:
    attention.qk_norm_tpl = Config(RMSNorm)
  if f['relative_bias']:
    attention.relative_bias_tpl = Config(RelativeBias, num_buckets=7, max_distance=9)
  if f['stages']:
    set_pipeline(model, num_stages=f['stages'], num_microbatches=f['stages'], stage_axis=f['stage_axis'])
  model.decoder_tpl.set(max_decode_steps=3, temperature=0.0)
  return model


def _tower(f: dict[str, Value]) -> Config:
  D, T = f['dims'], f['length']
  makers: dict[str, Config] = {
    'ff': Config(FeedForward, input_dims=D, hidden_dims=f['hidden_dims']),
    'gated': Config(GatedFeedForward, input_dims=D, hidden_dims=f['hidden_dims']),
    'attention': Config(MultiHeadAttention, input_dims=D, num_heads=f['heads'], dims_per_head=f['head_dims']),
    'norm': Config(LayerNorm, dims=D) if f['seed'] % 2 else Config(RMSNorm, dims=D),
    'linear': Config(Linear, input_dims=D, output_dims=D),
    'mixer': Config(Mixer, length=T),
    'heads': Config(HeadProducts, dims=D, heads=f['heads']),
    'window': Config(Window, dims=D, groups=f['heads']),
    'memory': Config(IdSums, dims=D, rows=f['rows']),
    'experts': Config(
      MoeFeedForward, input_dims=D, hidden_dims=f['hidden_dims'], num_experts=3, dispatch=f['dispatch']
    ),
  }
  network = Config(Tower, dims=D, layers_tpl=tuple(makers[name] for name in f['layers']))
  return Config(ClassificationModel, num_classes=f['classes'], network_tpl=network)


def _convolutions(f: dict[str, Value]) -> Config:
  groups = f['groups']
  net = Config(ConvNet, input_channels=f['channels'], channels=tuple(groups * n for n in f['filters']))
  net.set(filter_size=f['filter_size'], dropout_tpl=Config(Dropout, rate=f['dropout']))
  net.conv_tpl.set(groups=groups, strides=f['strides'], padding=f['padding'])
  if f['norm'] is None:
    net.norm_tpl = None
  elif f['norm'] == 'group':
    net.norm_tpl = Config(GroupNorm, num_groups=groups)
  if f['pooling'] is None:
    net.pooling_tpl = None
  else:
    net.pooling_tpl.set(kind=f['pooling'], window=(2, 2), strides=(1, 1), padding='SAME')
  return Config(ClassificationModel, num_classes=f['classes'], network_tpl=net)


_MODELS = {'lm': _lm, 'tower': _tower, 'convolutions': _convolutions}
_LAYERS = ('ff', 'gated', 'attention', 'norm', 'linear', 'mixer', 'heads', 'window', 'memory', 'experts')


# ---------------------------------------------------------------- drawing


def draw_task(rng: np.random.Generator, of_model: np.random.Generator | None = None, only: str = '') -> Task:
  """Returns a random layout of a random model that runs on one device.

  Args:
    rng: where choices come from.
    of_model: where the choices of the model come from, by default `rng`. Equal generators give the same model.
    only: the family; '' for any.
  """
  model = _draw_model(of_model or rng, only)
  fields = dict(model.fields)
  names_an_axis = fields.get('context_axis') is not None or bool(fields.get('stages'))
  return _draw_splits(rng, model if names_an_axis else dataclasses.replace(model, mesh=draw_mesh(rng)))


def _draw_model(rng: np.random.Generator, only: str) -> Task:
  while True:
    mesh = draw_mesh(rng)
    family = only or ('lm', 'tower', 'tower', 'tower', 'convolutions')[rng.integers(5)]
    model = Task(family, tuple(_draw_fields(rng, family, mesh).items()), mesh)
    try:
      _arrays(model.alone())
    except (UserError, TypeError, ValueError):
      continue  # These fields do not fit together.
    kinds: list[tuple[str, ...]] = [('train',)] * 3 + [('train', 'evaluate'), ('train', 'decode'), ('init', 'train')]
    return dataclasses.replace(model, steps=kinds[rng.integers(len(kinds))])


def _draw_fields(rng: np.random.Generator, family: str, mesh: MeshSizes) -> dict[str, Value]:
  def one(*values: Value) -> Value:
    return values[rng.integers(len(values))]

  fields: dict[str, Value] = {
    'optimizer': one(*_OPTIMIZERS, *['sgd'] * len(_OPTIMIZERS)),
    'num_microbatches': one(1, 1, 1, 2, 3),
    'ema_decay': one(0.0, 0.0, 0.9),
    'clip': one(0.0, 0.0, 0.5),
    'batch': one(1, 2, 3, 4, 6, 8, 8, 12, 24),
    'seed': int(rng.integers(1 << 20)),
    'dropout': one(0.0, 0.0, 0.0, 0.1),
    'classes': one(2, 3, 5, 8),
  }
  if family == 'tower':
    fields |= {'dims': one(6, 8, 12), 'length': one(2, 3, 4, 6, 8), 'hidden_dims': one(6, 8, 9, 12, 16)}
    fields |= {'heads': one(1, 2), 'head_dims': one(2, 3, 4), 'rows': one(3, 5, 8)}
    fields |= {'dispatch': one('dropless', 'capacity'), 'layers': tuple(one(*_LAYERS) for _ in range(one(1, 2, 2, 3)))}
  elif family == 'convolutions':
    fields |= {'groups': one(1, 1, 2, 3), 'height': one(4, 6, 8), 'width': one(4, 5, 6)}
    fields |= {'filters': tuple(one(1, 2, 4) for _ in range(one(1, 2))), 'filter_size': one((3, 3), (1, 1), (2, 3))}
    fields |= {'channels': fields['groups'] * one(1, 2), 'strides': one((1, 1), (1, 1), (2, 1))}
    fields |= {
      'padding': one('SAME', 'VALID'),
      'norm': one(None, 'batch', 'group'),
      'pooling': one(None, 'max', 'mean'),
    }
  else:
    fields |= _draw_lm(rng, mesh)
  return fields


def _draw_lm(rng: np.random.Generator, mesh: MeshSizes) -> dict[str, Value]:
  def one(*values: Value) -> Value:
    return values[rng.integers(len(values))]

  axis, size = mesh[rng.integers(len(mesh))]
  pipelined = rng.random() < 0.1
  in_context = not pipelined and rng.random() < 0.15
  return {
    'style': one('llama', 'gpt2'), 'repeat': one(True, False), 'tie': one(True, False),
    'segments': one(False, False, True),
    'remat': one('none', 'none', 'full', 'dots_saveable'), 'vocab_size': one(12, 16, 21), 'dims': one(6, 8, 12),
    'num_layers': size if pipelined else one(1, 1, 2), 'kv_heads': one(1, 2, 3), 'groups': one(1, 1, 2),
    'head_dims': one(2, 4, 6), 'hidden_dims': one(8, 9, 12, 16), 'length': one(3, 4, 6, 8, 12),
    'sliding_window': one(None, None, 3), 'logit_soft_cap': one(None, None, 5.0), 'qk_norm': one(False, False, True),
    'relative_bias': not in_context and one(False, False, True), 'combine_qkv': one(False, False, True),
    'implementation': 'auto' if in_context else one('dense', 'blockwise', 'auto'),
    'context_axis': axis if in_context else None, 'stages': size if pipelined else 0, 'stage_axis': axis,
    'experts': one(0, 0, 0, 2, 3, 4), 'dispatch': one('dropless', 'capacity'), 'shared': one(0, 1),
    'lookup_style': one('gather', 'gather', 'matmul'), 'z_loss_weight': one(0.0, 0.0, 0.01),
    'label_smoothing': one(0.0, 0.0, 0.1),
  }  # fmt: skip


def _draw_splits(rng: np.random.Generator, case: Task) -> Task:
  fields = dict(case.fields)
  taken = {fields.get('context_axis'), fields['stage_axis'] if fields.get('stages') else None}
  free = tuple((name, size) for name, size in case.mesh if name not in taken)
  share = float(rng.choice([0.4, 0.7, 1.0]))

  def entries(rank: int) -> Entries:
    return random_entries(rng, rank, free, 0.8) if free else ((),) * rank

  variables, constrained = _arrays(dataclasses.replace(case, steps=('train',)).alone())
  weights = [(path, entries(rank)) for path, rank in variables.items() if rank and rng.random() < share]
  strategy = ''
  if rng.random() < 0.2:
    names = tuple(name for name, _ in free)
    strategy = f'fsdp(axis={names!r}, min_size_to_shard_mb=0)' if names else ''
    weights = weights[: len(weights) // 2] if rng.random() < 0.5 else []
  activations = [(path, entries(rank)) for path, rank in constrained.items() if rng.random() < share]
  inputs = [(str(rank), entries(rank)) for rank in (1, 2, 3, 4) if rng.random() < share]
  if case.steps == ('train',) and not taken - {None} and not fields['dropout'] and rng.random() < 0.15:
    return dataclasses.replace(case, weights=tuple(weights), strategy=strategy, partitioning='shard_map')
  if inputs:  # All activations split their rows in the same way.
    rows = next((e[0] for _, e in inputs if e), ())
    inputs = [(rank, (rows, *(tuple(a for a in axes if a not in rows) for axes in e[1:]))) for rank, e in inputs]
  return dataclasses.replace(
    case, weights=tuple(weights), activations=tuple(activations), inputs=tuple(inputs), strategy=strategy
  )


@functools.lru_cache(maxsize=2)
def _arrays(case: Task) -> tuple[dict[str, int], dict[str, int]]:
  """Returns the ranks of a task's variables, and of the activations that its layers constrain, by mapping.

  It finds the activations by recording the calls of `Layer.shard`.
  """
  found: dict[str, int] = {}
  original = Layer.shard

  def noting(layer: Layer, x: jax.Array, mapping: Any = 'out', remark: str = '') -> jax.Array:
    if isinstance(mapping, str):
      found[f'{layer.path_name}.{mapping}'] = x.ndim
    return original(layer, x, mapping, remark)

  task = case.task()
  variables = leaves_by_path(task.model.abstract_init())
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch())
  with mock.patch.object(Layer, 'shard', noting):
    PartitionedTask(task, batch).eval_step.trace()
  return {path_name(path): len(weight.full_shape) for path, weight in variables.items()}, found
