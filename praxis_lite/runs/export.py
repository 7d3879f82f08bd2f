"""Exports a trained model as programs and variables that run without praxis_lite.

    OUT/README.md              what the export contains, and how to load and call it
        load.py                checks that all files belong to this export, and loads it: a copy of `exported.py`
        signature.json         the names, shapes and dtypes of inputs, outputs and variables; digests of all files
        variables.npz          the variables, by path            } for JAX
        <program>.stablehlo    each program, by `jax.export`     }
        saved_model/           the same programs as signatures of a TensorFlow SavedModel, which needs no JAX

    forward                    inputs -> predictions             `BaseModel.predict`
    decode: prefill            ids, lengths -> logits, caches    of whole prompts
            decode_step        ids, positions, caches -> logits, caches

A program takes variables and inputs, and returns outputs; each of these is a flat dict of arrays by name. It runs on
one device, with any batch size, whatever mesh the model was trained on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from praxis_lite.common.errors import ConfigError, UserError, check_choice, check_range, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import user_path
from praxis_lite.common.jax_internals import unless_unknown
from praxis_lite.common.jax_internals.lowering import used_inputs
from praxis_lite.common.trees import NestedDict, leaves, leaves_by_path, nest, path_name, to_path
from praxis_lite.common.versions import package_version
from praxis_lite.inputs.tensorflow import import_tensorflow, tf
from praxis_lite.models.base import BaseModel
from praxis_lite.runs import exported
from praxis_lite.runs.exported import Arrays
from praxis_lite.sharding.guards.guard import guarded_export

KINDS = ('forward', 'decode')
FORMATS = ('stablehlo', 'saved_model')
PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
DEFAULT_PLATFORMS = ('cpu', 'cuda', 'tpu')

ExportedFunction = Callable[[Arrays, Arrays], Arrays]  # (variables, inputs) -> outputs
_BATCH, _CACHE = 'batch', 'cache.'


class _Program(NamedTuple):
  name: str
  inputs: Arrays
  exported: export.Exported

  @property
  def outputs(self) -> Arrays:
    return jax.tree.unflatten(self.exported.out_tree, self.exported.out_avals)


class ExportSettings(NamedTuple):
  """What is exported, and how.

  Attributes:
    what: 'forward' for predictions, or 'decode' for the prefill and the decode step of a model that decodes.
    formats: 'stablehlo', 'saved_model' or both.
    batch_size: the number of rows; None exports programs for any number.
    prompt_length: P, the length to which prompts are padded; the prompts of an encoder-decoder are its sources.
    max_tokens: the largest number of tokens after a prompt; the caches have P + max_tokens - 1 slots, or max_tokens if
      prompts are sources. None takes the number of the model's sampler.
    platforms: the platforms that the programs run on: 'cpu', 'cuda', 'rocm', 'tpu'.
  """

  what: str = 'forward'
  formats: tuple[str, ...] = FORMATS
  batch_size: int | None = None
  prompt_length: int = 64
  max_tokens: int | None = None
  platforms: tuple[str, ...] = DEFAULT_PLATFORMS


class ExportOptions(TypedDict, total=False):
  """The settings of `TrainedModel.export`; see `ExportSettings`."""

  formats: tuple[str, ...]
  batch_size: int | None
  prompt_length: int
  max_tokens: int | None
  platforms: tuple[str, ...]


def check_export(model: BaseModel, directory: str | os.PathLike[str], settings: ExportSettings) -> None:
  """Raises a UserError if these settings are not valid for the model, or the directory exists and is not empty."""
  check_choice('what', settings.what, KINDS)
  for name, values, choices in (('format', settings.formats, FORMATS), ('platforms', settings.platforms, PLATFORMS)):
    if isinstance(values, str):
      raise ConfigError(f'{name}: expected a tuple, such as ({values!r},), got {values!r}')
    for value in values:
      if value == 'gpu':
        raise ConfigError("platforms: 'gpu' is two platforms here, 'cuda' (NVIDIA) and 'rocm' (AMD)")
      check_choice(name, value, choices)
    if not values:
      raise ConfigError(f'{name}: expected at least one of {", ".join(choices)}')
  for name in ('batch_size', 'prompt_length', 'max_tokens'):
    check_range(name, getattr(settings, name), least=1)
  if settings.what == 'decode' and not (hasattr(model, 'prefill') and hasattr(model, 'extend_step')):
    raise ConfigError(
      f"task.model: {type(model).__name__} has no prefill and extend_step, so it cannot be exported as 'decode'; "
      "'forward' exports its predictions"
    )
  positions = getattr(getattr(model, 'lm', None), 'max_positions', None)
  if settings.what == 'decode' and model.prompts_are_sources:
    _check_source_and_target(model, settings, positions)
  elif settings.what == 'decode' and positions is not None and _cache_length(model, settings) > positions:
    length, tokens = settings.prompt_length, _max_tokens(model, settings)
    most = positions + 1 - length
    remedy = f'pass max_tokens (--max_tokens) of at most {most}, or' if most >= 1 else 'pass'
    remedy = 'pass a smaller max_tokens (--max_tokens) and' if tokens > positions else remedy
    which = '' if settings.max_tokens else ', which is task.model.decoder_tpl.max_decode_steps'
    raise ConfigError(
      f'max_tokens: prompts of {number_of(length, "token")} (prompt_length) and {number_of(tokens, "token")} after '
      f'them (max_tokens{which}) need {number_of(length + tokens - 1, "position")}, and the model has {positions}; '
      f'{remedy} a smaller prompt_length (--prompt_length)'
    )
  path = user_path(directory)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise UserError(f'out: {path} exists and is not an empty directory; name another one, or remove it')
  if 'saved_model' in settings.formats:
    with prefix_errors('format saved_model'):
      import_tensorflow("export only StableHLO: formats=('stablehlo',), or --format=stablehlo")


def _check_source_and_target(model: Any, settings: ExportSettings, positions: int | None) -> None:
  """Raises a ConfigError if sources or targets of these settings are longer than an encoder-decoder can read."""
  most, tokens = model.most_prompt_tokens(), _max_tokens(model, settings)
  if most is not None and settings.prompt_length > most:
    raise ConfigError(
      f'prompt_length: the sources of {number_of(settings.prompt_length, "token")} are longer than the model can read; '
      f'pass at most {most} (--prompt_length)'
    )
  if positions is not None and tokens > positions:
    which = '' if settings.max_tokens else ', which is task.model.decoder_tpl.max_decode_steps'
    raise ConfigError(
      f'max_tokens: targets of {number_of(tokens, "token")}{which} need as many positions, and the model has '
      f'{positions}; pass at most {positions} (--max_tokens)'
    )


def export_model(
  model: BaseModel,
  variables: NestedDict,
  directory: str | os.PathLike[str],
  batch_struct: Callable[[], Mapping[str, Any]],
  settings: ExportSettings,
  about: Mapping[str, object],
) -> Path:
  """Writes the files listed at the top of this file. The directory appears complete or not at all.

  Args:
    model, variables: the model, and its variables in their true shapes, on the host.
    directory: does not exist, or is empty.
    batch_struct: for 'forward', returns the arrays of a batch by name, or their shapes and dtypes. Those that the
      predictions depend on become inputs, except `weights`, which are set to one.
    about: recorded in signature.json.

  Raises:
    UserError: `check_export` rejects the settings, or the model cannot be exported with them.
  """
  check_export(model, directory, settings)
  if settings.what == 'decode':
    programs = _decode_programs(model, variables, settings)
  else:
    programs = [_forward_program(model, variables, batch_struct(), settings)]
  flat = {path_name(path): x for path, x in leaves(variables).items()}
  out = user_path(directory).absolute()
  try:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f'.{out.name}-') as name:
      written = Path(name, 'export')
      written.mkdir()
      if 'stablehlo' in settings.formats:
        np.savez(written / exported.VARIABLES, **flat)
        for program in programs:
          (written / f'{program.name}{exported.PROGRAM}').write_bytes(program.exported.serialize())
      if 'saved_model' in settings.formats:
        _write_saved_model(written / exported.SAVED_MODEL, programs, flat)
      signature = exported.seal_signature(_signature(programs, flat, about), written)
      (written / exported.SIGNATURE).write_text(json.dumps(signature, indent=2) + '\n', encoding='utf-8')
      shutil.copyfile(exported.__file__, written / 'load.py')
      first_position = '1' if model.prompts_are_sources else '`lengths`'  # Of the first token after a prompt.
      (written / 'README.md').write_text(_readme(programs, settings, first_position), encoding='utf-8')
      if out.exists():
        out.rmdir()
      os.replace(written, out)
  except OSError as error:
    raise UserError(f'out: {out} cannot be written: {error.strerror or error}') from error
  return out


# -------------------------------------------------------------------- programs


def _forward_program(
  model: BaseModel, variables: NestedDict, batch: Mapping[str, Any], settings: ExportSettings
) -> _Program:
  size = _batch_dim(settings)
  shapes = {
    path: jax.ShapeDtypeStruct((size, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))
    for path, x in leaves(batch).items()
  }
  weights = shapes.pop(('weights',), jax.ShapeDtypeStruct((size,), np.float32))
  paths = {_identifier(path_name(path)): path for path in shapes}
  if unnamed := shapes.keys() - paths.values():
    one = min(unnamed)
    other = paths[_identifier(path_name(one))]
    raise ConfigError(f'export: the inputs {path_name(one)!r} and {path_name(other)!r} get the same name; rename one')

  def forward(flat: Arrays, inputs: Arrays) -> Arrays:
    ones = jnp.ones((next(iter(inputs.values())).shape[0], *weights.shape[1:]), weights.dtype)
    rows = nest({('weights',): ones, **{paths[name]: x for name, x in inputs.items()}})
    # Models that draw random numbers in predictions draw the same ones in each call.
    out, _ = model.apply(_variables(flat), rows, key=jax.random.key(0), do_eval=True, method='predict')
    return {_identifier(path_name(path) or 'predictions'): x for path, x in leaves_by_path(out).items()}

  inputs = {_identifier(path_name(path)): x for path, x in shapes.items()}
  return _export('forward', forward, variables, inputs, settings, only_used=True)


def _used_inputs(function: ExportedFunction, variables: Arrays, inputs: Arrays) -> Arrays:
  """Returns the inputs that the outputs of a function depend on."""
  program = jax.make_jaxpr(function)(variables, inputs).jaxpr
  everything = [True] * len(program.invars)
  used = unless_unknown('programs take inputs that they do not use', lambda: used_inputs(program), everything)
  names = [*[None] * len(variables), *sorted(inputs)]  # Sorted, because JAX flattens dicts in this order.
  return {name: inputs[name] for name, is_used in zip(names, used) if name is not None and is_used}


def _decode_programs(model: Any, variables: NestedDict, settings: ExportSettings) -> list[_Program]:
  size = _batch_dim(settings)
  cache_length = _cache_length(model, settings)
  # Tracing `prefill` adds one entry, a pair: the names of the caches, in the order in which JAX flattens them; and the
  # structure of their tree.
  caches: list[tuple[list[str], Any]] = []

  def prefill(flat: Arrays, inputs: Arrays) -> Arrays:
    arguments = inputs['ids'], inputs['lengths'], cache_length
    logits, side = model.apply(_variables(flat), *arguments, do_eval=True, method='prefill')
    names = [_identifier(_CACHE + path_name(path)) for path in leaves_by_path(side.decode_state)]
    arrays, tree = jax.tree.flatten(side.decode_state)
    caches.append((names, tree))
    return {'logits': logits, **dict(zip(names, arrays))}

  def decode_step(flat: Arrays, inputs: Arrays) -> Arrays:
    names, tree = caches[-1]
    state = jax.tree.unflatten(tree, [inputs[name] for name in names])
    arguments = inputs['ids'], inputs['positions']
    logits, side = model.apply(_variables(flat), *arguments, do_eval=True, decode_state=state, method='extend_step')
    return {'logits': logits, **dict(zip(names, jax.tree.leaves(side.decode_state)))}

  ids = jax.ShapeDtypeStruct((size,), np.int32)
  prompts = jax.ShapeDtypeStruct((size, settings.prompt_length), np.int32)
  first = _export('prefill', prefill, variables, {'ids': prompts, 'lengths': ids}, settings)
  state = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in first.outputs.items() if name != 'logits'}
  inputs = {'ids': ids, 'positions': ids, **state}
  return [first, _export('decode_step', decode_step, variables, inputs, settings)]


def _max_tokens(model: Any, settings: ExportSettings) -> int:
  return settings.max_tokens or model.decoder.max_decode_steps


def _cache_length(model: Any, settings: ExportSettings) -> int:
  # The last token needs no cache slot. Before a target, there is only a start token.
  before = 1 if model.prompts_are_sources else settings.prompt_length
  return before + _max_tokens(model, settings) - 1


def _export(
  name: str,
  function: ExportedFunction,
  variables: NestedDict,
  inputs: Arrays,
  settings: ExportSettings,
  only_used: bool = False,
) -> _Program:
  """Exports a function; `only_used` drops the inputs that it does not depend on."""
  shapes = {path_name(path): jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in leaves(variables).items()}
  function.__name__ = name
  try:
    inputs = _used_inputs(function, shapes, inputs) if only_used else inputs
    program = guarded_export(function, settings.platforms)(shapes, inputs)
  except Exception as error:
    if settings.batch_size is not None or not _traces_with_rows(function, shapes, inputs):
      raise
    reason = str(error.__cause__ or error).strip().splitlines()[0].rstrip('.')
    able = [p for p in settings.platforms if _works(guarded_export(function, (p,)), shapes, inputs)]
    fewer = f', or one platform: {" or ".join(able)}' if able else ''
    raise ConfigError(
      f'task.model: its {name} cannot be exported for any batch size on {", ".join(settings.platforms)} ({reason}); '
      f'choose a size, such as batch_size=8 (--batch_size=8){fewer}'
    ) from error
  return _Program(name, inputs, program)


def _works(call: Callable[..., object], *arguments: Any) -> bool:
  try:
    call(*arguments)
  except Exception:
    return False
  return True


def _traces_with_rows(function: ExportedFunction, variables: Arrays, inputs: Arrays) -> bool:
  """Whether a function can be traced with a batch size of 2; called if a symbolic batch size has failed."""
  known = {n: jax.ShapeDtypeStruct(_concrete_shape(x.shape, 2), x.dtype) for n, x in inputs.items()}
  return _works(jax.eval_shape, function, variables, known)


def _concrete_shape(shape: Sequence[Any], size: int | None) -> list[int | None]:
  """Returns a shape with `size` in place of a symbolic batch size."""
  return [dim if isinstance(dim, int) else size for dim in shape]


def _batch_dim(settings: ExportSettings) -> Any:
  return export.symbolic_shape(_BATCH)[0] if settings.batch_size is None else settings.batch_size


def _variables(flat: Arrays) -> NestedDict:
  return nest({to_path(name): x for name, x in flat.items()})


def _identifier(name: str) -> str:
  """Returns a name that is a valid argument name, as TensorFlow's signatures require."""
  return re.sub(r'\W', '_', name)


# -------------------------------------------------------------------- files


def _write_saved_model(path: Path, programs: Sequence[_Program], variables: Arrays) -> None:
  from jax.experimental import jax2tf

  module = tf.Module()
  module.model_variables = {n: tf.Variable(x, trainable=False, name=_identifier(n)) for n, x in variables.items()}

  def signature(program: _Program) -> Any:
    shapes = {name: f'({", ".join(map(str, x.shape))})' for name, x in program.inputs.items()}
    call = jax2tf.convert(
      program.exported.call,
      polymorphic_shapes=[None, shapes],
      with_gradient=False,
      native_serialization_platforms=program.exported.platforms,
    )

    def run(**inputs: Any) -> Any:
      return call({name: variable.value() for name, variable in module.model_variables.items()}, inputs)

    specs = {
      name: tf.TensorSpec(_concrete_shape(x.shape, None), x.dtype, name=name) for name, x in program.inputs.items()
    }
    return tf.function(run, autograph=False).get_concrete_function(**specs)

  signatures = {program.name: signature(program) for program in programs}
  if len(signatures) == 1:  # Servers use this name for requests that name no program.
    signatures['serving_default'] = signatures[programs[0].name]
  tf.saved_model.save(module, str(path), signatures=signatures)


def _signature(programs: Sequence[_Program], variables: Arrays, about: Mapping[str, object]) -> dict[str, object]:
  def records(arrays: Arrays) -> dict[str, object]:
    shapes = {n: [d if isinstance(d, int) else str(d) for d in x.shape] for n, x in arrays.items()}
    return {name: {'shape': shape, 'dtype': str(arrays[name].dtype)} for name, shape in shapes.items()}

  return {
    **about,
    'praxis_lite': package_version(),
    'jax': jax.__version__,
    'programs': {
      program.name: {
        'inputs': records(program.inputs),
        'outputs': records(program.outputs),
        'platforms': list(program.exported.platforms),
        'calling_convention_version': program.exported.calling_convention_version,
      }
      for program in programs
    },
    'variables': records(variables),
  }


def _readme(programs: Sequence[_Program], settings: ExportSettings, first_position: str) -> str:
  parts = [_README_HEAD.format(what=_WHAT[settings.what], platforms=', '.join(settings.platforms))]
  for program in programs:
    parts.append(f'## {program.name}\n\n{_table("input", program.inputs)}\n{_table("output", program.outputs)}')
  if settings.what == 'decode':
    parts.append(_README_DECODE.format(most=settings.prompt_length, first=first_position))
  first = programs[0]
  size = 2 if settings.batch_size is None else settings.batch_size
  zeros = ', '.join(
    f"'{name}': np.zeros({tuple(_concrete_shape(x.shape, size))}, '{x.dtype}')" for name, x in first.inputs.items()
  )
  if 'stablehlo' in settings.formats:
    parts.append(_README_JAX.format(name=first.name, inputs=zeros))
  if 'saved_model' in settings.formats:
    parts.append(_README_TF.format(name=first.name, inputs=zeros))
  return '\n'.join(parts)


def _table(kind: str, arrays: Arrays) -> str:
  rows = [f'| {kind} | shape | dtype |', '|---|---|---|']
  rows += [f'| `{n}` | {" x ".join(map(str, x.shape)) or "scalar"} | {x.dtype} |' for n, x in sorted(arrays.items())]
  return '\n'.join(rows) + '\n'


_WHAT = {'forward': 'Predictions for a batch', 'decode': 'Logits of next tokens with caches, for a loop of decoding'}

_README_HEAD = """# An exported model

{what}, as programs of one device for these platforms: {platforms}.
`signature.json` says the same in JSON. `batch` in a shape stands for any size.

`load.py` checks that the files are complete and belong to one export, and loads them. A server that loads them by
itself checks nothing, so run `python load.py` first.
"""

_README_DECODE = """## The loop

`ids` are the tokens of the prompts, padded at their end to {most}; `lengths` are the lengths of the prompts. `prefill`
returns the logits of the next token of each row, and the caches. Then, for each further token: choose a token for each
row from the logits, and call `decode_step` with these tokens as `ids`, their `positions` ({first} for the first
tokens, one more for each next ones), and the caches that the last call returned.
"""

_README_JAX = """## With JAX

```python
import numpy as np
from load import load_for_jax

programs = load_for_jax('.')
outputs = programs['{name}']({{{inputs}}})
```

Without `load.py`, `jax.export.deserialize` reads `{name}.stablehlo`. Its `call` takes the variables, a dict of arrays
in the dtypes of `signature.json` (NumPy does not know bfloat16 and stores its bytes), and the inputs.
"""

_README_TF = """## With TensorFlow

```python
import numpy as np
import tensorflow as tf
from load import load_for_tensorflow

model = load_for_tensorflow('.')
inputs = {{{inputs}}}
outputs = model.signatures['{name}'](**{{name: tf.constant(x) for name, x in inputs.items()}})
```
"""
