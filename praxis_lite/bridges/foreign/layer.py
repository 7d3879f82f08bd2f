"""ForeignLayer: what the layers around modules of Flax, Equinox and Haiku share.

A subclass knows one library, and answers three questions about a module. This file does the rest. Each variable has a
path, such as ('params', 'dense', 'kernel').

    declare()                 which variables does the module have?       without computing anything
    draw(key)                 what are their initial values?
    run(values, args, ...)    what does the module return, and what are the new values of variables it updates itself?

The variables belong to a tree of `Variables` layers, so they are split, saved, trained and explained
like the variables of other layers. Nothing of the library is kept in a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.config import REQUIRED, Config, field_names, target
from praxis_lite.common.errors import ConfigError, UserError, error_summary
from praxis_lite.common.figures import number_of
from praxis_lite.common.importing import user_code_error
from praxis_lite.common.trees import NestedDict, Path, nest, node_at, path_matches, path_name, suggest_pattern
from praxis_lite.layers.base import Layer
from praxis_lite.sharding.weights import DeclaredSplit, JointInit, WeightHParams, WeightHParamsCollection

VariableValues = dict[Path, jax.Array]

# For an error message about a class of another package: the package, and the advice with which the message ends.
_LAYER_OF = {
  'flax.linen': 'use LinenLayer',
  'flax.nnx': 'use NnxLayer',
  'equinox': 'use EquinoxLayer',
  'haiku': 'use HaikuLayer',
  'praxis_lite': 'it is a layer already, so use its config instead of this one',
}


class ForeignVariable(NamedTuple):
  """A variable of a module of another library."""

  shape: tuple[int, ...]
  dtype: DTypeLike
  trainable: bool  # True if the optimizer trains the variable, False if the module itself updates it in training.
  # The split in the module's own metadata, one mesh or logical axis per dimension; None if it has none.
  split: tuple[Any, ...] | None = None


class RunResult(NamedTuple):
  """The result of a call of a module, and the new values of the variables that the call updates, by path."""

  outputs: Any
  updated: Mapping[Path, jax.Array]


class Variables(Layer):
  """The variables of one submodule, with a child layer for each of its own submodules.

  Attributes:
    declared: nested dict of `WeightHParams`.
    field: path of the config field that says how the variables are split.
  """

  declared: dict[str, Any] = REQUIRED
  field: str = REQUIRED

  def setup(self) -> None:
    for name, entry in self.declared.items():
      if isinstance(entry, dict):
        self.create_child(name, Config(Variables, declared=entry, field=self.field))
      else:
        self.create_variable(name, entry)
        self._weights[name] = dataclasses.replace(self._weights[name], mapping_field=self.field)

  def read(self) -> NestedDict:
    """In a call: returns the values, nested like `declared`."""
    own = {name: self._read_weight(name, self._read_dtype(weight)) for name, weight in self._weights.items()}
    return own | {name: child.read() for name, child in self.named_children() if isinstance(child, Variables)}

  def update(self, path: Path, value: jax.Array) -> None:
    """In a call: sets the new value of the variable at `path` below this layer."""
    if len(path) > 1:
      getattr(self, path[0]).update(path[1:], value)
    else:
      self.update_var(path[0], value)


# Many modules have an argument that says whether this is training. The keys are common names of this argument, and the
# values are the fields of `ExampleInputs` that a user sets to the name.
_MODE_ARGUMENTS = {
  **dict.fromkeys(('train', 'training', 'is_training'), 'train_argument'),
  **dict.fromkeys(('deterministic', 'use_running_average', 'eval', 'inference'), 'eval_argument'),
}
_MISSING_ARGUMENT = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: .*?'(\w+)'")


class ForeignLayer(Layer):
  """Base of the layers that call a module of another library.

  Attributes:
    module_tpl: config of the module's class, or of a function that returns the module, with its arguments, as in
      `Config(nn.Dense, features=6)`.
    variable_splits: pairs (pattern, mapping). A pattern is a regular expression for the whole path of a variable, such
      as 'params.dense.kernel'; the mapping of the first pattern that matches says how the variable is split. A mapping
      has a mesh axis, a logical axis or None for each dimension; a mapping None declares no split.
    use_own_splits: whether variables that no pattern matches are split as the module's own metadata says.
  """

  # The library: what to import, its name in messages, and the extra that installs it.
  package: ClassVar[str] = ''
  library: ClassVar[str] = ''
  extra: ClassVar[str] = ''
  # The arguments of a module's class that this layer passes; a config must not set them.
  given: ClassVar[tuple[str, ...]] = ()

  module_tpl: Config = REQUIRED
  variable_splits: tuple[Any, ...] = ()
  use_own_splits: bool = True

  def setup(self) -> None:
    with self._named_errors('cannot be built'):
      self._declared = self.declare()
    if not self._declared:
      return  # A module without variables, such as an activation or dropout.
    splits = self._splits()
    weights = {path: self._to_weight(path, variable, splits.get(path)) for path, variable in self._declared.items()}
    self._check_names(weights)
    for name, tree in nest(weights).items():
      self.create_child(name, Config(Variables, declared=tree, field=f'{self.path_name}.variable_splits'))

  # ---------------------------------------------------------------- what a subclass defines

  def declare(self) -> dict[Path, ForeignVariable]:
    """Returns the variables of the module, without computing values."""
    raise NotImplementedError

  def draw(self, key: jax.Array) -> VariableValues:
    """Returns initial values of all declared variables."""
    raise NotImplementedError

  def run(self, values: VariableValues, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RunResult:
    """In a call: calls the module with these variables."""
    raise NotImplementedError

  # ---------------------------------------------------------------- the call

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Returns what the module returns for these arguments.

    Raises:
      ConfigError: the module raises an error, which becomes the cause of this one. Or the module updates variables in
        training, and the layer does not see exactly the rows of the batch. That is so under
        `partitioning='shard_map'`, and in a pipeline that pads a microbatch with copies of rows.
    """
    self._check_sees_all_rows()
    read = {name: child.read() for name, child in self.named_children() if isinstance(child, Variables)}
    values = {path: node_at(read, path) for path in self._declared}
    with self._named_errors('raised an error'):
      outputs, updated = self.run(values, args, kwargs)
    if not self.do_eval:
      for path, value in updated.items():
        if path in self._declared and not self._declared[path].trainable:
          getattr(self, path[0]).update(path[1:], jax.lax.stop_gradient(value))
    return self.shard(outputs) if isinstance(outputs, jax.Array) else outputs

  def draw_key(self) -> jax.Array | None:
    """In a call: returns a new key, or None if the call was given no key."""
    return self.next_prng_key() if self.has_prng_key() else None

  def _check_sees_all_rows(self) -> None:
    updated = [path for path, variable in self._declared.items() if not variable.trainable]
    if self.do_eval or not updated:
      return
    variable = path_name((*self.path, *updated[0]))
    if self.surroundings.manual_axes:
      raise ConfigError(
        f'{variable}: the module updates it in training, from the rows that it sees, and under shard_map each device '
        "sees only its own; set task.partitioning='auto'"
      )
    if self.surroundings.real_rows is not None:
      raise ConfigError(
        f'{variable}: the module updates it in training, from the rows that it sees, and a pipeline fills up '
        'microbatches with copies of rows; choose num_microbatches so that it divides the batch, or another norm'
      )

  # ---------------------------------------------------------------- building the module

  def build_module(self, **given: Any) -> Any:
    """Builds the module of `module_tpl`, and returns it. It gets only those arguments in `given` that it takes."""
    self._check_library()
    known = field_names(self.module_tpl)
    return self.module_tpl.instantiate(**{k: v for k, v in given.items() if known is None or k in known})

  @property
  def _a_module(self) -> str:
    return f'{"an" if self.package[0] in "aeiou" else "a"} {self.package}.Module'

  def check_module(self, module: Any) -> None:
    """Raises ConfigError unless what `module_tpl` has built is a `Module` of the library."""
    if not isinstance(module, self.import_library().Module):
      raise ConfigError(
        f'{self.path_name}.module_tpl: expected the config of {self._a_module}, which returned {type(module).__name__}'
      )

  def _check_library(self) -> None:
    """Raises a ConfigError if the class of the module is known to belong to another library, or to this package."""
    built = target(self.module_tpl)
    bases = [f'{base.__module__}.' for base in getattr(built, '__mro__', ())]
    found = [package for package in _LAYER_OF if any(base.startswith(f'{package}.') for base in bases)]
    if found and self.package not in found:
      raise ConfigError(
        f'{self.path_name}.module_tpl: expected the config of {self._a_module}, got {built.__name__}; '
        f'{_LAYER_OF[found[0]]}'
      )

  def import_library(self) -> ModuleType:
    """Returns the library; raises ConfigError if it is not installed."""
    try:
      return importlib.import_module(self.package)
    except ImportError:
      raise ConfigError(
        f'{self.path_name}: {self.library} is not installed; pip install praxis_lite[{self.extra}]'
      ) from None

  @contextlib.contextmanager
  def _named_errors(self, what: str) -> Iterator[None]:
    """Converts errors of the library to a ConfigError of one line that names this layer and the module."""
    try:
      yield
    except UserError:
      raise
    except Exception as error:  # A module may raise anything.
      built = target(self.module_tpl)
      name = getattr(built, '__qualname__', str(built))
      cause = f'{user_code_error(error) or error_summary(error)}{self.remedy_of(error)}'
      raise ConfigError(f'{self.path_name}.module_tpl: the {self.library} module {name} {what}: {cause}') from error

  def remedy_of(self, error: Exception) -> str:
    """Returns the end of an error message, which names a field to change; '' if no remedy is known."""
    return ''

  # ---------------------------------------------------------------- variables

  def _to_weight(self, path: Path, variable: ForeignVariable, split: DeclaredSplit | None) -> WeightHParams:
    is_stored_as_ours = variable.trainable and jnp.issubdtype(variable.dtype, jnp.floating)
    marks = (
      set() if variable.trainable else {WeightHParamsCollection.NON_TRAINABLE, WeightHParamsCollection.KEEP_FLOAT32}
    )
    return WeightHParams(
      variable.shape,
      init=JointInit(path, self._draw_named),
      dtype=None if is_stored_as_ours else variable.dtype,
      tensor_split_dims_mapping=split,
      collections=frozenset(marks),
    )

  def _draw_named(self, key: jax.Array) -> VariableValues:
    with self._named_errors('cannot draw its initial values'):
      return self.draw(key)

  def _splits(self) -> dict[Path, DeclaredSplit]:
    """Returns the declared splits by path; leaves out variables that neither a pattern nor metadata split."""
    field, found = f'{self.path_name}.variable_splits', {}
    matched: set[int] = set()
    for path, variable in self._declared.items():
      for i, pattern, mapping in self._patterns(field):
        if path_matches(pattern, path):
          matched.add(i)
          if path not in found:
            found[path] = DeclaredSplit(mapping, [f'{field}[{i}]'] * len(mapping)) if mapping is not None else None
      if path not in found and self.use_own_splits and variable.split is not None:
        source = f'the metadata of {path_name(path)} in {self.path_name}.module_tpl'
        found[path] = DeclaredSplit(variable.split, [source] * len(variable.split))
    for i, pattern, _ in self._patterns(field):
      if i not in matched:
        names = [path_name(path) for path in self._declared]
        near = suggest_pattern(pattern, names)
        raise ConfigError(f'{field}[{i}]: {pattern!r} matches no variable; there are {", ".join(names)}.{near}')
    return {path: split for path, split in found.items() if split is not None}

  def _patterns(self, field: str) -> list[tuple[int, str, Sequence[Any] | None]]:
    """Returns (index, pattern, mapping) of each entry of `variable_splits`; raises ConfigError if one is not a pair."""
    entries: list[tuple[int, str, Sequence[Any] | None]] = []
    for i, entry in enumerate(self.variable_splits):
      is_pair = isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str)
      if not is_pair or not isinstance(entry[1], tuple | list | None):
        raise ConfigError(
          f"{field}[{i}]: expected a pair of a pattern and a mapping, such as ('.*kernel', ('data', None)), "
          f'got {entry!r}'
        )
      try:
        re.compile(entry[0])
      except re.error as error:
        raise ConfigError(f'{field}[{i}]: {entry[0]!r} is not a regular expression: {error}') from None
      entries.append((i, entry[0], entry[1]))
    return entries

  def _check_names(self, paths: Mapping[Path, object]) -> None:
    for path in paths:
      inner = next((path[:i] for i in range(1, len(path)) if path[:i] in paths), None)
      if inner is not None:
        raise ConfigError(
          f'{self.path_name}: the module has a variable and a submodule of the name {path_name(inner)}; rename one'
        )


class ExampleInputs(ForeignLayer):
  """Base of layers around modules that declare their variables when they are called, so they need examples of inputs.

  Attributes:
    example_shapes: the shape of each positional argument of a call, as in ((1, 6),). A size that no variable depends
      on, such as the batch size, may be 1.
    example_dtypes: the dtypes of these arguments; by default `fprop_dtype` for all.
    train_argument: the keyword of the module that is True in training, such as 'train' or 'is_training'; '' for none.
    eval_argument: the keyword of the module that is True in evaluation, such as 'deterministic'; '' for none.
  """

  example_shapes: tuple[Any, ...] = REQUIRED
  example_dtypes: tuple[Any, ...] = ()
  train_argument: str = ''
  eval_argument: str = ''

  def examples(self) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each example argument; raises ConfigError if a field has the wrong form."""
    field = f'{self.path_name}.example_shapes'
    for i, shape in enumerate(self.example_shapes):
      if not isinstance(shape, tuple | list) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ConfigError(f'{field}[{i}]: expected the shape of an argument, such as (1, 6), got {shape!r}')
    dtypes = self.example_dtypes or (self.fprop_dtype,) * len(self.example_shapes)
    if len(dtypes) != len(self.example_shapes):
      raise ConfigError(
        f'{self.path_name}.example_dtypes: {number_of(len(dtypes), "entry")} for {len(self.example_shapes)} '
        'example_shapes'
      )
    return [jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for shape, dtype in zip(self.example_shapes, dtypes)]

  def zeros(self) -> list[jax.Array]:
    """Returns the examples as arrays of zeros."""
    return [jnp.zeros(x.shape, x.dtype) for x in self.examples()]

  def remedy_of(self, error: Exception) -> str:
    text = str(error) if isinstance(error, TypeError) else ''
    for field in ('train_argument', 'eval_argument'):
      name = getattr(self, field)
      if name and f"unexpected keyword argument '{name}'" in text:
        return f'; {self.path_name}.{field} = {name!r} must be a keyword of the module, or empty if it has none'
    missing = _MISSING_ARGUMENT.search(text)
    if missing is not None and missing[1] in _MODE_ARGUMENTS:
      field = _MODE_ARGUMENTS[missing[1]]
      return f'; set {self.path_name}.{field} = {missing[1]!r}, so that the module knows whether it is trained'
    return ''

  def mode(self, train: bool) -> dict[str, bool]:
    """Returns the keyword arguments that tell the module whether this is training."""
    names = {self.train_argument: train, self.eval_argument: not train}
    return {name: value for name, value in names.items() if name}
