"""Weights in 8 or 4 bits in the format `pack-quantized` of compressed-tensors, which vLLM reads.

The weight [O, I] of a module is stored as

    weight_packed       int32 [O, ceil(I b / 32)]   q + 2^(b-1), the first value in the lowest bits
    weight_scale        [O, I / g], or [O, 1]
    weight_zero_point   int32 [ceil(O b / 32), I / g]   z + 2^(b-1), packed along O; only if not symmetric
    weight_shape        int64 [2]

and w = s (q - z), with q and z in -2^(b-1) ... 2^(b-1) - 1. In checkpoints of the format `int-quantized`, a tensor
`weight`, int8 [O, I], replaces `weight_packed`; it is q itself.

O is the number of outputs, I of inputs, b of bits, and g of inputs in a group; s is the scale, and z the zero point.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from praxis_lite.bridges.hf.files import Declared, DerivedTensor, StoredTensor, Tensor
from praxis_lite.bridges.hf.tensors import Piece
from praxis_lite.bridges.hf.writer import tensors_to_write
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, path_name
from praxis_lite.layers.weight_formats import WeightFormat
from praxis_lite.runs.quantized_arrays import SpreadPart

_READ = ('pack-quantized', 'int-quantized', 'naive-quantized')


def is_compressed(quantization: object) -> bool:
  """Whether this `quantization_config` of config.json describes a format that this module can read."""
  if not isinstance(quantization, dict) or quantization.get('quant_method') != 'compressed-tensors':
    return False
  return quantization.get('format') in _READ


# ---------------------------------------------------------------- to write


class CompressedTensors(NamedTuple):
  """The tensors of a checkpoint, some of them in few bits."""

  declared: dict[str, Declared]  # Dtype and shape of each tensor, by name.
  tensor: Callable[[str], np.ndarray]  # A function that returns a tensor, given its name.
  quantization: dict[str, object]  # The field `quantization_config` of config.json.


def compress_tensors(
  variables: NestedDict,
  spread: Mapping[str, NestedDict],
  found: Mapping[Path, Sequence[Piece]],
  head: str,
  dtype: str | None = None,
) -> CompressedTensors:
  """Returns the tensors of a checkpoint. Weights that have few bits in the run keep these bits.

  Args:
    variables, found: the variables of the network, with plain weights, and the pieces of each by path.
    spread: the result of `spread_streamed` for the network.
    head: the head's tensor, which `quantization_config` lists as not quantized, even if the checkpoint lacks it.
    dtype: dtype of the plain tensors and of the scales; None keeps the dtypes that they have.

  Raises:
    ConfigError: compressed-tensors cannot store the format or the groups of a weight, or weights of different formats
      share a tensor.
  """
  plain, tensor = tensors_to_write(variables, found, dtype)
  parts: dict[str, Callable[[str], np.ndarray]] = {}
  for kind, tree in spread.items():
    parts[kind] = tensors_to_write(tree, {path: found[path] for path in leaves(tree)})[1]
  forms = _forms_of_tensors(spread['integers'], found)
  declared: dict[str, Declared] = {}
  sources: dict[str, tuple[str, str]] = {}  # Which weight each stored part belongs to, and the kind of part, by name.
  for name, as_plain in plain.items():
    form = forms.get(name)
    if form is None:
      declared[name] = as_plain
      continue
    if len(as_plain.shape) != 2:
      raise ConfigError(
        f'--quantized: the tensor {name} has {len(as_plain.shape)} dimensions, and compressed-tensors has only '
        'matrices in few bits; leave out --quantized'
      )
    (outputs, inputs), count = as_plain.shape, _num_groups(form, as_plain)
    own = {
      'packed': Declared(np.dtype(np.int32), (outputs, -(-inputs * form.bits // 32))),
      'scale': Declared(np.dtype(dtype or form.scale_dtype), (outputs, count)),
      'shape': Declared(np.dtype(np.int64), (2,)),
    }
    if form.has_zeros:
      own['zero_point'] = Declared(np.dtype(np.int32), (-(-outputs * form.bits // 32), count))
    declared |= {f'{name}_{kind}': of_part for kind, of_part in own.items()}
    sources |= {f'{name}_{kind}': (name, kind) for kind in own}

  def make(whole_name: str) -> np.ndarray:
    if whole_name not in sources:
      return tensor(whole_name)
    name, kind = sources[whole_name]
    form, count = forms[name], _num_groups(forms[name], plain[name])
    match kind:
      case 'packed':
        return pack(parts['integers'](name), form.bits)
      case 'scale':
        return _one_of_group(parts['scale'](name), count, name)
      case 'shape':
        return np.array(plain[name].shape)
    return pack(_one_of_group(parts['zero'](name), count, name).T, form.bits).T

  ignored = [_module(name) for name, as_plain in plain.items() if name not in forms and len(as_plain.shape) == 2]
  quantization = _describe(forms, [*dict.fromkeys((*ignored, _module(head)))])
  return CompressedTensors(declared, make, quantization)


def _num_groups(form: WeightFormat, weight: Declared) -> int:
  return 1 if form.group_size is None else weight.shape[1] // form.group_size


def _module(name: str) -> str:
  return name.removesuffix('.weight')


def _forms_of_tensors(integers: NestedDict, found: Mapping[Path, Sequence[Piece]]) -> dict[str, WeightFormat]:
  """Returns, by name, the format of each tensor that has few bits."""
  by_path: dict[Path, SpreadPart] = leaves(integers)
  forms: dict[str, set[WeightFormat | None]] = {}
  for path, of_variable in found.items():
    form = None
    if path in by_path:
      form = by_path[path].stored.format
      _check_form(form, by_path[path].stored.weight.shape, path_name(path))
    for piece in of_variable:
      forms.setdefault(piece.name, set()).add(
        None if form is None else dataclasses.replace(form, num_inputs=1, num_outputs=1)
      )
  mixed = next((name for name, of_tensor in forms.items() if len(of_tensor) > 1), None)
  if mixed is not None:
    raise ConfigError(f'task.model.quantized: the weights that are together in {mixed} need the same format')
  return {name: form for name, (form,) in forms.items() if form is not None}


def _check_form(form: WeightFormat, shape: tuple[int, ...], name: str) -> None:
  if form.name not in ('int8', 'int4'):
    raise ConfigError(
      f'task.model.quantized: {name} has the format {form.name!r}; compressed-tensors has int8 and int4. Export it '
      'without --quantized'
    )
  inputs = shape[form.group_axis(len(shape))]
  if form.group_size is not None and inputs % form.group_size:
    raise ConfigError(
      f'task.model.quantized: group_size = {form.group_size} does not divide {inputs}, the last dimension of the '
      f'inputs of {name}, as compressed-tensors needs'
    )


def _one_of_group(spread_OI: np.ndarray, count: int, name: str) -> np.ndarray:
  """Returns the value of each of `count` groups of inputs, [O, count]; `spread_OI` has it once for each input."""
  groups = spread_OI.reshape(len(spread_OI), count, -1)
  if (groups != groups[..., :1]).any():
    raise ConfigError(f'task.model.quantized: the inputs of a group of {name} are not adjacent in that tensor')
  return groups[..., 0]


def _describe(forms: Mapping[str, WeightFormat], ignored: list[str]) -> dict[str, object]:
  """Returns `quantization_config`."""
  different = list(dict.fromkeys(forms.values()))
  groups = {}
  for i, form in enumerate(different):
    targets = ['Linear'] if len(different) == 1 else [_module(name) for name, own in forms.items() if own == form]
    weights = {
      'num_bits': form.bits,
      'type': 'int',
      'symmetric': form.symmetric,
      'strategy': 'channel' if form.group_size is None else 'group',
      'group_size': form.group_size,
      'dynamic': False,
    }
    groups[f'group_{i}'] = {
      'targets': targets,
      'weights': weights,
      'input_activations': None,
      'output_activations': None,
    }
  return {
    'quant_method': 'compressed-tensors',
    'format': 'pack-quantized',
    'quantization_status': 'compressed',
    'config_groups': groups,
    'ignore': ignored,
    'kv_cache_scheme': None,
  }


def pack(q: np.ndarray, bits: int) -> np.ndarray:
  """Returns integers [M, N], each -2^(bits - 1) ... 2^(bits - 1) - 1, as int32 [M, ceil(N bits / 32)]."""
  in_word = 32 // bits
  shifted = (q.astype(np.int64) + 2 ** (bits - 1)).astype(np.uint32)
  padded = np.pad(shifted, ((0, 0), (0, -q.shape[1] % in_word))).reshape(len(q), -1, in_word)
  return np.bitwise_or.reduce(padded << np.arange(0, 32, bits, dtype=np.uint32), axis=-1).view(np.int32)


def unpack(packed: np.ndarray, bits: int, num: int) -> np.ndarray:
  """Inverts `pack`: returns the first `num` integers of each of the M rows of `packed`, int32 [M, num]."""
  words = packed.view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
  q = (words & np.uint32(2**bits - 1)).reshape(len(packed), -1)[:, :num]
  return q.astype(np.int32) - 2 ** (bits - 1)


# ---------------------------------------------------------------- to read


def _read(
  values: StoredTensor,
  scale: StoredTensor,
  zero: StoredTensor | None,
  shape: tuple[int, ...],
  bits: int,
  index: tuple[slice, ...],
) -> np.ndarray:
  """Returns a part of a weight [O, I] in the dtype of its scales; reads whole rows, with all inputs of an output."""
  rows, columns = (slice(*i.indices(size)[:2]) for i, size in zip(index, shape))
  whole = slice(0, None)
  stored = values.read_integers((rows, whole))
  q = stored if values.kind == 'I8' else unpack(stored, bits, shape[1])
  factors = scale.read((rows, whole)).astype(np.float32)
  groups = q.astype(np.float32).reshape(len(q), factors.shape[1], -1)
  if zero is not None:
    zeros = unpack(np.ascontiguousarray(zero.read_integers((whole, whole)).T), bits, shape[0])
    groups = groups - zeros.T[rows][..., None]
  return (groups * factors[..., None]).reshape(q.shape)[:, columns].astype(scale.dtype)


def join_packed(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
  """Returns the tensors of a checkpoint; joins each weight with its scales and zero points.

  Raises:
    CheckpointError: a weight lacks its scales or its shape, its scales or values do not fit that shape, its zero
      points are not packed, or its inputs are permuted.
  """
  found: dict[str, Tensor] = {}
  of_weights = {name.removesuffix('_scale') for name in tensors if name.endswith('.weight_scale')}
  for name, tensor in tensors.items():
    base = name.removesuffix('_packed')
    if name.endswith('.weight_packed') or (name in of_weights and tensor.kind == 'I8'):
      found[base] = _join(base, tensor, tensors)
    elif not any(name.endswith(f'.weight_{kind}') for kind in _KINDS):
      found[name] = tensor
  return found


_KINDS = ('scale', 'shape', 'zero_point')


def _join(name: str, values: StoredTensor, tensors: Mapping[str, StoredTensor]) -> DerivedTensor:
  scale, shape, zero = (tensors.get(f'{name}_{kind}') for kind in _KINDS)
  if f'{name}_g_idx' in tensors:
    raise CheckpointError(f'{values.file}: {name} has its inputs in another order (actorder), which is not supported')
  if values.kind == 'I8':
    size, bits = values.shape, 8
  elif shape is None:
    raise CheckpointError(f'{values.file}: {name}_packed has no {name}_shape beside it')
  else:
    outputs, inputs = (int(n) for n in shape.read_integers((slice(0, 2),)))
    size, bits = (outputs, inputs), next((b for b in (4, 8) if values.shape == (outputs, -(-inputs * b // 32))), 0)
  fits = (
    scale is not None and len(scale.shape) == 2 and scale.shape[0] == size[0] and not size[1] % max(scale.shape[1], 1)
  )
  if scale is None or not fits or not bits:
    raise CheckpointError(
      f'{values.file}: {name} has values of shape {list(values.shape)} and scales of shape '
      f'{None if scale is None else list(scale.shape)}, which do not fit a weight of shape {list(size)} in 4 or 8 bits'
    )
  if zero is not None and zero.kind != 'I32':
    raise CheckpointError(f'{values.file}: {name}_zero_point is {zero.kind}; only packed ones, I32, are supported')
  read = functools.partial(_read, values, scale, zero, size, bits)
  return DerivedTensor(name, values.file, size, scale.dtype, read)
