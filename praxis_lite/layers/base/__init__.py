"""Layer: a tree of hyperparameters that declares variables and computes.

A layer's annotated attributes are its hyperparameters. `setup` declares variables and children; `__call__` computes
with them. A layer holds no arrays: `abstract_init` returns the declarations of its variables, `init(key)` makes their
initial values, and `apply(variables, ...)` is the pure call. The variable tree has the same paths as the layer tree.

    class Scale(Layer):
      dims: int = REQUIRED

      def setup(self):
        self.create_variable('s', WeightHParams((self.dims,), init=WeightInit.Constant(1.0)))

      def __call__(self, x_BD):
        return x_BD * self.theta.s

    layer = Config(Scale, dims=4).instantiate()
    variables = layer.init(jax.random.key(0))            # {'s': f32[4]}
    y_BD, side = layer.apply(variables, jnp.ones((2, 4)))
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.config import Config, Configurable, build_at, field_names, target, template
from praxis_lite.common.config.editing import set_up
from praxis_lite.common.errors import ConfigError, UnknownFieldError, check_range, did_you_mean
from praxis_lite.common.figures import number_of
from praxis_lite.common.importing import calling_line
from praxis_lite.common.mistakes import missing_call
from praxis_lite.common.trees import NestedDict, Path, leaves, leaves_by_path, map_with_path, node_at, path_name
from praxis_lite.layers.base import call
from praxis_lite.layers.base.call import SideOutputs, Surroundings
from praxis_lite.layers.base.facts import Facts
from praxis_lite.layers.base.growth import GrownLayer
from praxis_lite.layers.base.in_call import find_misspelled_setup
from praxis_lite.layers.base.scope import run_in_scope
from praxis_lite.layers.base.splits import MappedSplits
from praxis_lite.layers.base.stored import StoredWeight
from praxis_lite.sharding.constraints import manual_axes
from praxis_lite.sharding.weights import (
  SplitDimsMapping,
  WeightHParams,
  WeightHParamsCollection,
  WeightInit,
  check_weight,
  init_weights,
  is_dtype,
)

LayerT = TypeVar('LayerT', bound='Layer')


class SplitMapping(Configurable):
  """Base of the split mappings of a layer: each field maps one tensor, one entry per dimension."""


class WeightSplit(SplitMapping):
  """How the weights of a layer are split; `wt` is the mapping of its main weight."""

  wt: SplitDimsMapping = None


class ActivationSplit(SplitMapping):
  """How the activations of a layer are split; `out` is the mapping of its output."""

  out: SplitDimsMapping = None


# Hyperparameters that a child takes from its parent if it leaves them None.
_INHERITED = ('dtype', 'fprop_dtype', 'params_init', 'mesh_axis_names', 'logical_axis_rules')

_parent: contextvars.ContextVar[Layer | None] = contextvars.ContextVar('praxis_lite_parent', default=None)


class ChildEdits(Protocol):
  """Edits of all layers below a layer. They change a layer's config before it is built, and how weights are stored."""

  def edit(self, path: Path, config: Config) -> Config:
    """Returns the config from which the layer at `path` is built: `config` itself, or an edited copy."""

  def stored_weight(self, layer: Layer, name: str, weight: WeightHParams) -> StoredWeight | None:
    """Returns how a weight of a layer is stored; None if it is stored as it is declared."""

  def check(self) -> None:
    """Raises ConfigError if the edits did not fit the layers; called when all layers are built."""


class Layer(MappedSplits, GrownLayer, Facts, Configurable):
  """Base of all layers.

  Attributes:
    name: the last part of the layer's path; set by the parent.
    dtype: storage dtype of the weights; inherited, float32 at the root.
    fprop_dtype: dtype of the computation; inherited, `dtype` at the root.
    params_init: initializer of weights that do not set their own; inherited, Xavier at the root.
    mesh_axis_names: names of the mesh axes that split mappings refer to; inherited. With None, names are not
      checked.
    logical_axis_rules: pairs (logical name, mesh axes) that allow mappings to name logical axes; inherited.
    weight_split_dims_mapping: how each weight is split over the mesh; a layer with its own weights declares a field for
      each, as in `template(WeightSplit)`.
    activation_split_dims_mapping: how each activation is split.
    inputs_split_mapping: `map_1d`, `map_2d`, ...: how the first argument of a call, an array or a tree of them, is
      split on entry, by rank; None does not constrain it.
  """

  # Whether `__call__` takes the keyword `paddings`, [B, T], which is nonzero for padding tokens.
  takes_paddings: ClassVar[bool] = False
  # Names of arguments of a call, and for each the value that marks a padding token or row.
  marks_of_padding: ClassVar[Mapping[str, int]] = {'paddings': 1, 'segment_ids': 0, 'weights': 0}

  name: str = ''
  dtype: DTypeLike | None = None
  fprop_dtype: DTypeLike | None = None
  params_init: WeightInit | None = None
  mesh_axis_names: tuple[str, ...] | None = None
  logical_axis_rules: tuple[tuple[str, Any], ...] | None = None
  weight_split_dims_mapping: Config = template(SplitMapping)
  activation_split_dims_mapping: Config = template(ActivationSplit)
  inputs_split_mapping: dict[str, Any] | None = None

  # ---------------------------------------------------------------- construction

  _set_up_in = 'setup'

  def __init_subclass__(cls, **kwargs: Any) -> None:
    if '__post_init__' in vars(cls):
      raise ConfigError(f'{cls.__qualname__} defines __post_init__, which builds the layer; write setup(self) instead')
    super().__init_subclass__(**kwargs)
    if len(inspect.signature(cls.setup).parameters) != 1:
      raise ConfigError(
        f'{cls.__qualname__}.setup takes only self; declare what it needs as an attribute, name: type = default'
      )
    for name, method in list(cls.__dict__.items()):
      if inspect.isfunction(method) and (name == '__call__' or not (name.startswith('_') or hasattr(Layer, name))):
        setattr(cls, name, run_in_scope(method))

  def __post_init__(self) -> None:
    parent = _parent.get()
    above = () if parent is None else parent._path
    self._path: Path = (*above, self.name) if self.name else above
    self._names: set[str] = set()  # Names of variables, children and lists of children.
    self._weights: dict[str, WeightHParams] = {}
    self._stored: dict[str, StoredWeight] = {}  # Weights that are not stored as they are declared.
    self._children: dict[str, Layer] = {}
    if self.dtype is None:
      self.dtype = 'float32'
    if self.fprop_dtype is None:
      self.fprop_dtype = self.dtype
    if self.params_init is None:
      self.params_init = WeightInit.Xavier()
    for field in ('dtype', 'fprop_dtype'):
      value = getattr(self, field)
      if not is_dtype(value, jnp.floating):
        raise ConfigError(
          f'{self.path_name}.{field}: expected a floating dtype, such as float32 or bfloat16, got {value}'
        )
    self._declare_split_mappings()
    own_edits = self._child_edits()
    self._edits: ChildEdits | None = own_edits or (None if parent is None else parent._edits)
    self._counterpart = self._find_counterpart(parent, self.name)
    with set_up(self):
      self.setup()
    if own_edits is not None:
      own_edits.check()
    self._ready = True

  def __setattr__(self, name: str, value: Any) -> None:
    if '_ready' in self.__dict__:
      raise UnknownFieldError(
        f'{self.path_name}.{name}: a layer does not change after setup(); keep state in variables or decode_state'
      )
    if '_children' in self.__dict__:
      self._check_built_here(name, value)
    super().__setattr__(name, value)

  def _check_built_here(self, name: str, value: object) -> None:
    """Raises ConfigError if `value` is a JAX array, or contains a layer that `create_child` did not build."""
    if isinstance(value, jax.Array):
      raise ConfigError(
        f'{self.path_name}.{name}: a layer holds no arrays; declare a weight by self.create_variable({name!r}, '
        f'WeightHParams({value.shape})); make a constant in the call, or as an array of NumPy'
      )
    several = list(value.values()) if isinstance(value, dict) else value
    for layer in several if isinstance(several, list | tuple) else [value]:
      if isinstance(layer, Layer) and not layer.name:
        raise ConfigError(
          f'{self.path_name}.{name}: {type(layer).__name__} was built without create_child, so it has no variables; '
          f'write self.create_child({name!r}, Config({type(layer).__name__}, ...)), or create_children for a list'
        )

  def setup(self) -> None:
    """Declares the layer's variables and children. Override it; do not call it."""

  def _child_edits(self) -> ChildEdits | None:
    """Returns the edits of the configs of all layers below this one; None if only layers above edit them."""
    return None

  def create_variable(self, name: str, weight: WeightHParams, trainable: bool = True) -> None:
    """Declares a variable of this layer, which a call reads as `self.theta.<name>`.

    Raises:
      ConfigError: the name is taken, or a dimension is not positive.
      ShardingError: the split mapping has the wrong rank, an unknown axis, or an axis twice.
    """
    self._claim(name, 'create_variable')
    check_weight(weight, f'{self.path_name}.{name}')
    mapping, field = weight.tensor_split_dims_mapping, f'{self.path_name}.{name}.tensor_split_dims_mapping'
    # A variable without a mapping, in an error message: users set the layer's first mapping, which is for its main
    # weight. So if that mapping is None too, the message names its field.
    if mapping is None:
      of_main, mapping_of_main = next(iter(self.split_mappings('weight_split_dims_mapping').items()), (field, None))
      field = of_main if mapping_of_main is None else field
    self._resolve(mapping, f'{self.path_name}.{name}', rank=len(weight.shape))
    declared = dataclasses.replace(
      weight,
      dtype=weight.dtype or self.dtype,
      init=weight.init or self.params_init,
      collections=weight.collections | (set() if trainable else {WeightHParamsCollection.NON_TRAINABLE}),
      mapping_field=field,
    )
    self._weights[name] = declared = self._grow(name, declared)
    stored = None if self._edits is None else self._edits.stored_weight(self, name, declared)
    if stored is not None:
      for part in stored.parts.keys() - {name}:
        self._claim(part, 'create_variable')
      self._stored[name] = stored

  def create_child(self, name: str, config: Config[LayerT]) -> LayerT:
    """Builds a child from a copy of `config`, with inherited values, as `self.<name>`; its path is `<path>.<name>`."""
    self._claim(name, 'create_child')
    built = target(config) if isinstance(config, Config) else None
    if not (isinstance(built, type) and issubclass(built, Layer)):
      got = repr(config) if built is None else f'that of {getattr(built, "__qualname__", built)}'
      raise ConfigError(
        f'{self.path_name}.{name}: create_child takes the Config of a layer, as in Config(MyLayer, ...), got {got}'
      )
    if self._edits is not None:
      config = self._edits.edit((*self._path, name), config)
    inherited = {f: getattr(self, f) for f in _INHERITED if getattr(config, f) is None}
    token = _parent.set(self)
    try:
      child = build_at(path_name((*self._path, name)), config, name=name, **inherited)
    finally:
      _parent.reset(token)
    self._children[name] = child
    setattr(self, name, child)
    return child

  def create_children(
    self, *names: str, template: Config[LayerT] | None = None, templates: Sequence[Config[LayerT]] | None = None
  ) -> list[LayerT]:
    """Builds several children: all `names` from one `template`, or a list `self.<name>` from `templates`.

    The children of a list have the paths `<name>_0`, `<name>_1`, ...
    """
    if template is not None:
      return [self.create_child(name, template) for name in names]
    if templates is None or len(names) != 1:
      raise ConfigError(f'{self.path_name}: create_children takes names and template=, or one name and templates=')
    self._claim(names[0], 'create_children')
    children = [self.create_child(f'{names[0]}_{i}', config) for i, config in enumerate(templates)]
    setattr(self, names[0], children)
    return children

  def _check_range(self, *fields: str, **limits: float) -> None:
    """Raises ConfigError if one of these fields is out of range; see `check_range` for the limits."""
    for field in fields:
      check_range(f'{self.path_name}.{field}', getattr(self, field), **limits)

  def _claim(self, name: str, by: str) -> None:
    """Reserves a name that the method `by` gives to a variable or child; raises ConfigError if this is not allowed."""
    if not (isinstance(name, str) and name.isidentifier()):
      raise ConfigError(f'{self.path_name}.{by}: a name is a Python identifier, such as head or layer_0, not {name!r}')
    if '_ready' in self.__dict__:
      remedy = f'self.theta.{name}' if by == 'create_variable' else f'self.{name}'
      raise ConfigError(f'{self.path_name}.{name}: call {by} in setup(); in a call, use {remedy}')
    if name in self._names:
      raise ConfigError(f"{self.path_name}: the name '{name}' is declared twice")
    self._names.add(name)
    if by != 'create_variable' and (hasattr(type(self), name) or name in self.__dict__):
      raise ConfigError(
        f"{self.path_name}: a child cannot be named '{name}', which is an attribute of {type(self).__name__} already"
      )

  # ---------------------------------------------------------------- structure

  def named_children(self) -> Iterator[tuple[str, Layer]]:
    """Yields (name, child) in the order of creation, including the children in lists."""
    yield from self._children.items()

  def descendants(self) -> Iterator[Layer]:
    """Yields this layer and all layers below it, parents first."""
    yield self
    for _, child in self.named_children():
      yield from child.descendants()

  if TYPE_CHECKING:  # Type checkers accept calls of a child of any class, and reject attributes that do not exist.

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

  else:

    def __getattr__(self, name: str) -> NoReturn:
      if name.startswith('_'):
        raise AttributeError(name)
      if isinstance(inspect.getattr_static(type(self), name, None), property | functools.cached_property):
        object.__getattribute__(self, name)  # Evaluates a failed property again, to raise its own error.
      where = f'{self.path_name} ({type(self).__name__})'
      if name in self._weights:
        raise UnknownFieldError(f'{where}: {name!r} is a variable; read it in a call as self.theta.{name}')
      close = did_you_mean(name, {*(self._names - self._weights.keys()), *(field_names(type(self)) or ())})
      inherits = '; its setup() may lack super().setup()' if _overrides_a_setup(type(self)) else ''
      raise UnknownFieldError(
        f'{where} has no attribute or child {name!r}.{close}{find_misspelled_setup(type(self))} A child is made in '
        'setup() by '
        f'self.create_child({name!r}, Config(...)), a hyperparameter is an annotated attribute of the class{inherits}'
        f'{calling_line()}'
      )

  def __repr__(self) -> str:
    return f'<{type(self).__name__} {self.path_name}>'

  def __str__(self) -> str:
    """Returns the tree of this layer: each layer with its number of parameters, each variable with shape and dtype."""
    return '\n'.join(self._lines(self.path_name, self.abstract_init()))

  def _lines(self, name: str, tree: NestedDict) -> Iterator[str]:
    """Yields the lines of `__str__` for this layer, called `name`, and its children; `tree` declares its variables."""
    count, kind = sum(w.num_params for w in leaves(tree).values()), type(self).__name__
    yield f'{kind if name == kind else f"{name}: {kind}"}, {number_of(count, "parameter")}'
    own = [key for name in self._weights for key in (self._stored[name].parts if name in self._stored else (name,))]
    for key in own:
      weight: WeightHParams = tree[key]
      shape = ' x '.join(map(str, weight.full_shape)) or 'scalar'
      yield f'  {key}: {shape} {weight.as_struct().dtype.name}{"" if weight.trainable else ", not trainable"}'
    for key, child in self.named_children():
      yield from (f'  {line}' for line in child._lines(key, tree.get(key, {})))

  # ---------------------------------------------------------------- variables

  def abstract_init(self) -> NestedDict:
    """Returns the declarations of all variables below this layer: the variable tree with `WeightHParams` leaves."""
    tree: NestedDict = {}
    for name, weight in self._weights.items():
      tree |= {name: weight} if name not in self._stored else self._stored[name].parts
    for name, child in self.named_children():
      if below := child.abstract_init():
        tree[name] = below
    return tree

  def cast_variables(self, variables: NestedDict) -> NestedDict:
    """Returns variables for `apply`, in the dtypes in which a call reads them.

    Do this once before a loop of calls. XLA would cast weights again in each iteration if it slices them from a stack.
    """
    tree = dict(variables)
    for name in self._weights.keys() & tree.keys():
      dtype = self._read_dtype(self._weights[name])
      if dtype is not None and jnp.issubdtype(tree[name].dtype, jnp.floating):
        tree[name] = tree[name].astype(dtype)
    return tree | {name: child.cast_variables(tree[name]) for name, child in self.named_children() if name in tree}

  def init(self, key: jax.Array) -> NestedDict:
    """Returns initial values of all variables, each drawn with `key` folded with the variable's path.

    Variables with a `JointInit` are drawn together, with `key` folded with the path of their layer.
    """
    if isinstance(key, int):
      raise ConfigError(f'{self.path_name}.init({key}): expected a key, such as jax.random.key({key})')
    if isinstance(key, dict):
      raise ConfigError(f'{self.path_name}.init: expected one key, such as jax.random.key(0), got a dict')
    declared = self.abstract_init()
    values = init_weights(leaves_by_path(declared), lambda paths: call.fold_in_paths(key, paths))
    return map_with_path(lambda path, _: values[path], declared)

  # ---------------------------------------------------------------- the pure call

  def apply(
    self,
    variables: NestedDict,
    *args: Any,
    key: jax.Array | None = None,
    do_eval: bool | None = None,
    decode_state: NestedDict | None = None,
    method: str = '__call__',
    surroundings: Surroundings | None = None,
    **kwargs: Any,
  ) -> tuple[Any, SideOutputs]:
    """Calls a method of this layer as a pure function.

    Args:
      variables: this layer's variables, with the structure and shapes of `abstract_init()`. Variables of a padded train
        state are rejected; `praxis_lite.unpad(task, state)` returns them in their true shapes.
      *args, **kwargs: arguments of the method.
      key: PRNG key; None is allowed if nothing is drawn at random.
      do_eval: evaluate instead of train (no dropout, moving statistics); None means as in the enclosing call, or train.
      decode_state: caches returned by an earlier call; None if there are no caches yet.
      method: which method to call.
      surroundings: what the call needs to know about its environment; None means as in the enclosing call.

    Returns:
      The method's result and the call's `SideOutputs`.

    Raises:
      ConfigError: a variable does not have the shape that the layer declares. Nested calls are not checked.
    """
    if not isinstance(variables, dict):
      raise ConfigError(
        f'{self.path_name}.apply(variables, *args): the first argument is the variables, a dict as init() returns; '
        f'got {type(variables).__name__}'
      )
    outer = call.current_frame()
    if outer is None and surroundings is None:
      self._check_shapes(variables)
    if do_eval is None:
      do_eval = outer is not None and outer.do_eval
    if surroundings is None:
      surroundings = outer.surroundings if outer else Surroundings(manual_axes=manual_axes())
    frame = call.Frame(
      self._path, variables, key=key, do_eval=do_eval, decode_state=decode_state, surroundings=surroundings
    )
    if method == '__call__' and not callable(self):
      raise ConfigError(f'{self.path_name}: {missing_call(type(self))}')
    with call.enter(frame):
      outputs = getattr(self, method)(*args, **kwargs)
    if outer is None:
      self._check_keeps_nothing()
    return outputs, frame.side_outputs()

  def _check_shapes(self, variables: NestedDict) -> None:
    if manual_axes():  # Inside a user's `shard_map`, each device has only its part of a variable.
      return
    for path, shape in self._declared_shapes.items():
      given = getattr(node_at(variables, path), 'shape', shape)
      if given != shape:
        larger = len(given) == len(shape) and all(g >= d for g, d in zip(given, shape))
        padded = '; if it is the padded state of a mesh, pass unpad(task, state).mdl_vars' if larger else ''
        name = path_name((*self._path, *path))
        raise ConfigError(f'{name} has shape {given} in the variables, and the layer declares {shape}{padded}')

  def _check_keeps_nothing(self) -> None:
    """Raises ConfigError if an attribute of a layer holds a tracer, which becomes invalid when the trace ends."""
    for layer in self.descendants():
      for name, value in vars(layer).items():
        if isinstance(value, jax.core.Tracer | list | dict) and any(
          isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)
        ):
          raise ConfigError(
            f'{layer.path_name}.{name} keeps an array of the call, which has no value after it. Return it, or keep it '
            'in a variable: create_variable(name, ..., trainable=False) in setup(), update_var in the call'
          )

  @functools.cached_property
  def _declared_shapes(self) -> dict[Path, tuple[int, ...]]:
    return {path: weight.full_shape for path, weight in leaves(self.abstract_init()).items()}


def _overrides_a_setup(cls: type[Layer]) -> bool:
  """Whether a class overrides the `setup` of a base class other than `Layer`, whose `setup` declares nothing."""
  return 'setup' in vars(cls) and any('setup' in vars(base) for base in cls.__mro__[1:] if base is not Layer)
