"""Configurable: classes whose annotated attributes are hyperparameters; REQUIRED: the value of fields that must be set.

Mistakes in a class body are reported when the class is defined, in terms of configs rather than of dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn, dataclass_transform

import fiddle as fdl

from praxis_lite.common.errors import ConfigError, did_you_mean


class _Required:
  """The value of a required field that is not set. Using it as a value raises `ConfigError`."""

  def __repr__(self) -> str:
    return 'REQUIRED'

  def __reduce__(self) -> str:  # A copy is the same object.
    return 'REQUIRED'

  def _complain(self, *args: object) -> NoReturn:
    raise ConfigError('a required field is used before it is set')

  __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __call__ = _complain
  __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _complain
  __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = _complain
  __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = _complain


REQUIRED: Any = _Required()
"""The value of a field that has no default and must be set; any use of it is an error that names the field."""


def child(*, init: Literal[False] = False) -> Any:
  """Declares an attribute that is a child layer, or a list of them, which `setup` creates; not a hyperparameter.

      class Block(Layer):
        ff_tpl: Config = template(FeedForward)
        ff: FeedForward = child()

        def setup(self) -> None:
          self.create_child('ff', self.ff_tpl)

  The annotation tells readers, editors and type checkers what `self.ff(x)` returns. Nothing checks it when the program
  runs, so a template may be replaced by any layer that is called in the same way.
  """
  return dataclasses.field(init=init)


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field, child))
class Configurable:
  """Base of classes whose annotated attributes are hyperparameters.

  Each subclass becomes a keyword-only dataclass. Configs in its fields are passed to it unbuilt. Code that needs the
  values of the fields belongs in `__post_init__`.

  Defining a subclass raises ConfigError if its body has an `__init__`, or a default that all objects would share.
  """

  _set_up_in = '__post_init__'  # The method that messages tell users to define.
  _config_path = ''  # The path of this class's configs in messages, if all its configs have the same path.

  def __init_subclass__(cls, **kwargs: object) -> None:
    super().__init_subclass__(**kwargs)
    for problem in _problems(cls):
      raise ConfigError(f'{cls.__qualname__}{problem}')
    dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)
    type.__setattr__(cls, '__init__', _explain_mistakes(cls, cls.__init__))


def _explain_mistakes(cls: type[Configurable], init: Callable[..., None]) -> Callable[..., None]:
  """Returns the `__init__` of a class, which says what to write if it is called like one of PyTorch or Flax."""
  names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]

  @functools.wraps(init)
  def call(self: Configurable, *args: object, **values: object) -> None:
    try:
      init(self, *args, **values)
    except TypeError:
      if args:
        raise TypeError(not_by_name(cls)) from None
      for name in values:
        if name not in names:
          raise TypeError(f'{cls.__qualname__} has no field {name!r}.{did_you_mean(name, names)}') from None
      raise

  return call


def not_by_name(cls: type[Configurable]) -> str:
  """Returns the message about arguments of a class that are given by position."""
  own = {name: value for name, value in vars(cls).items() if name in inspect.get_annotations(cls)}
  names = [name for name, value in own.items() if value is REQUIRED] or list(own)
  fields = ''.join(f', {name}=...' for name in names[:2])
  return f'{cls.__qualname__} takes its fields by name, in a config: Config({cls.__name__}{fields})'


def _problems(cls: type[Configurable]) -> Iterator[str]:
  """Yields the mistakes in the body of a class, each as the text that follows the name of the class in the message."""
  if '__init__' in vars(cls):
    yield (
      ' defines __init__, which its annotated attributes make; declare each argument as an attribute, '
      f'name: type = default, and do the rest in {cls._set_up_in}(self)'
    )
  annotations = inspect.get_annotations(cls)
  for name, value in vars(cls).items():
    annotation = annotations.get(name)
    if annotation is None:
      if isinstance(value, dataclasses.Field) or value is REQUIRED:
        form = 'int = REQUIRED'
        if isinstance(value, dataclasses.Field) and value.default_factory is not dataclasses.MISSING:
          form = 'Config = template(...)'
        elif isinstance(value, dataclasses.Field) and not value.init:
          form = 'Linear = child()'
        yield f'.{name} has no type annotation, so it is not a field; write {name}: {form}, with its type'
    elif 'ClassVar' in str(annotation):
      continue
    elif isinstance(value, fdl.Config):
      built = getattr(fdl.get_callable(value), '__name__', '...')
      yield (
        f'.{name}: a Config as a default would be shared by all objects; write {name}: Config = template({built}), '
        'with its fields as keywords'
      )
    elif isinstance(value, list | dict | set):
      yield (
        f'.{name}: a {type(value).__name__} as a default would be shared by all objects; write a tuple, or '
        f'dataclasses.field(default_factory=lambda: {value!r})'
      )
