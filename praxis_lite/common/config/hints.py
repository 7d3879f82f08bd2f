"""Annotations of fields: what they accept, and how messages describe them."""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import sys
import types
import typing
from typing import Any, TypeGuard

from praxis_lite.common.config.base import Config
from praxis_lite.common.config.configurable import Configurable


def members_of(hint: object) -> list[Any]:
  """Returns the members of an annotation that is a union; otherwise a list of only the annotation."""
  if typing.get_origin(hint) is typing.Annotated:
    return members_of(typing.get_args(hint)[0])
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return [member for argument in typing.get_args(hint) for member in members_of(argument)]
  return [hint]


def describe_hint(hint: object) -> str:
  """Returns an annotation as people write it."""
  members = members_of(hint)
  if typing.get_origin(hint) is typing.Literal:
    return f'one of {", ".join(map(repr, typing.get_args(hint)))}'
  if len(members) > 1:
    return ' | '.join(map(describe_hint, members))
  if hint is types.NoneType:
    return 'None'
  if is_configurable(hint):
    return f'the config of {"an" if hint.__qualname__[0] in "AEIOU" else "a"} {hint.__qualname__}'
  if hint is Config:
    return 'a Config'
  if is_callable_hint(hint):
    return 'a function or class'
  if isinstance(hint, type) and not typing.get_args(hint):
    return hint.__qualname__
  return re.sub(r'(?:\w+\.)+(?=\w)', '', str(hint))


def is_config(hint: object) -> bool:
  """Whether the annotation is the class of a config."""
  origin = typing.get_origin(hint) or hint
  return isinstance(origin, type) and issubclass(origin, Config)


def is_configurable(hint: object) -> TypeGuard[type[Configurable]]:
  """Whether the annotation is a class that a config builds."""
  return isinstance(hint, type) and issubclass(hint, Configurable)


def accepts_config(hint: object) -> bool:
  """Whether a config fits the annotation."""
  return any(is_config(member) or is_configurable(member) for member in members_of(hint))


def is_callable_hint(hint: object) -> bool:
  """Whether the annotation accepts functions or classes."""
  return (typing.get_origin(hint) or hint) in (collections.abc.Callable, type)


def is_dtype_hint(members: list[Any]) -> bool:
  """Whether the annotation contains DTypeLike. Only code that has imported JAX can contain such an annotation."""
  jax_typing = sys.modules.get('jax.typing')
  spellings = typing.get_args(jax_typing.DTypeLike) if jax_typing else ()
  return bool(spellings) and all(spelling in members for spelling in spellings)


def is_value_class(kind: object) -> bool:
  """Whether `kind` is a frozen dataclass, which an override may write as a call."""
  return isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore
