"""Which field an error is about: the outermost field that has the wrong value, its path, and the line that set it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import fiddle as fdl

from praxis_lite.common.config.configurable import REQUIRED
from praxis_lite.common.config.editing import line_of_edit
from praxis_lite.common.errors import ConfigError, RangeError, UserError


def name_field_at_fault(
  error: ConfigError, build: Callable[..., object], values: Mapping[str | int, object], where: str
) -> None:
  """Changes the message of an error about a value out of range, to name the field that the value was passed on from.

  So a message about `model_dims = 0` names the field of the model, not a weight or a layer that it was passed on to.
  The error was raised while the class `build` was called with `values`, from the config at the path `where`.
  """
  if not isinstance(error, RangeError) or _is_set_below(error, list(values.values())):
    return
  field, bracket, _ = error.field.partition('[')
  # In these cases the message is clear already: it names an entry of the field, or begins with the object's name and
  # the field.
  if field in values and (bracket or str(error).startswith(f'{values.get("name")}.{field}:')):
    return
  changed = {
    name: value
    for name, value in values.items()
    if isinstance(name, str) and value is not REQUIRED and getattr(build, name, REQUIRED) is not value
  }
  names = [name for name, value in changed.items() if any(_is_same(x, error.value) for x in _numbers(value))]
  if not names and error.weight:  # The size of a weight may be a multiple of a field.
    names = [name for name, value in changed.items() if any(isinstance(x, int) and x < 1 for x in _numbers(value))]
  if error.field in names:
    names = [error.field]
  if len(names) == 1:
    value = changed[names[0]]
    if isinstance(value, int):
      error.value = value
    error.field, each = names[0], ' each' if isinstance(value, tuple) else ''
    made = f'; it makes {error.weight}' if error.weight else ''
    error.args = (f'{where}.{error.field}: expected {error.expected}{each}, got {value}{made}',)


def name_config(error: UserError, config: fdl.Config, where: str) -> None:
  """Adds to an error about a field the path `where` of its config, and the line of the user's code that sets the field.

  The error was raised while an object was built from `config`. Its message begins with the path or the class of the
  config and the name of the field, such as `Linear.input_dims: ...`. Other messages do not change.
  """
  text, kind = str(error), getattr(config.__fn_or_cls__, '__qualname__', where)
  found = re.match(rf'(?:{re.escape(where)}|{re.escape(kind)})\.(\w+)(?=[: .\[])', text)
  if not found or found[1] not in config.__signature_info__.parameters:
    return
  line = '' if text[found.end()] == '.' else line_of_edit(config, found[1])
  shown = f' ({line})' if line and not re.search(r'\([^()]+:\d+\)$', text) else ''
  error.args = (f'{where}.{found[1]}{text[found.end() :]}{shown}',)


def name_settable_fields(error: UserError, config: fdl.Config, where: str) -> None:
  """Replaces paths of layers' fields in a message, such as `lm.softmax.epsilon`, by the paths that `--set` takes.

  `config`, at the path `where`, is the config of the outermost layer. Paths of layers whose config is made by a `setup`
  do not change, because `--set` does not reach such a config.
  """
  kind = getattr(config.__fn_or_cls__, '__qualname__', '')

  def settable(match: re.Match[str]) -> str:
    names = match[0].split('.')
    below = _settable_path(config, names[1:] if names[0] == kind else names)
    return match[0] if below is None else f'{where}.{below}'

  error.args = (_DOTTED.sub(settable, str(error)),)


def _settable_path(config: object, names: list[str]) -> str | None:
  """Returns the path of a layer's field below a config, without `_tpl`; None if nobody can set such a field there.

  A child of a list, such as `blocks_0`, is made from the template of the list: `blocks_tpl` or `block_tpl`.
  """
  if not isinstance(config, fdl.Config) or not names:
    return None
  fields, name, of_list = config.__signature_info__.parameters, names[0], _ENTRY.fullmatch(names[0])
  spellings = [name, *((of_list[1], of_list[1].removesuffix('s')) if of_list else ())]
  found = next((spelling for spelling in spellings for end in ('', '_tpl') if f'{spelling}{end}' in fields), None)
  if found is None:
    return None
  field = found if found in fields else f'{found}_tpl'
  value = getattr(config, field, REQUIRED)
  if value is None and len(names) > 1 and not field.endswith('_tpl'):
    return None  # Not a layer, such as a mapping that another config has.
  if value is None or value is REQUIRED or len(names) == 1:
    return None if value is REQUIRED else found  # A parent sets what a template requires.
  below = _settable_path(value, names[1:])
  return below and f'{found}.{below}'


_DOTTED = re.compile(r"""(?<![\w.'"/\]])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w/(])""")
_ENTRY = re.compile(r'(\w+)_\d+')


def _is_set_below(error: RangeError, value: object) -> bool:
  """Whether `value` contains a config that sets the field at fault to the wrong value itself.

  If it does, no parent passed the wrong value on.
  """
  if isinstance(value, fdl.Config):
    field = error.field.partition('[')[0]
    is_this = any(_is_same(x, error.value) for x in _numbers(value.__arguments__.get(field)))
    return bool(field) and (is_this or _is_set_below(error, list(value.__arguments__.values())))
  if isinstance(value, dict):
    return _is_set_below(error, list(value.values()))
  return isinstance(value, list | tuple) and any(_is_set_below(error, entry) for entry in value)


def _numbers(value: object) -> Iterator[int | float]:
  """Yields `value` if it is an int or float, or the ints and floats in `value` if it is a tuple; leaves out bools."""
  for x in value if isinstance(value, tuple) else (value,):
    if isinstance(x, int | float) and not isinstance(x, bool):
      yield x


def _is_same(x: int | float, wrong: object) -> bool:
  return type(x) is type(wrong) and x == wrong
