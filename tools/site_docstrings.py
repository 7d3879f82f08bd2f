"""For the reference pages of the site: allows one line of a docstring to describe several arguments or attributes.

Griffe, which reads the docstrings, would interpret the second name in `rows, columns: how many` as a type. A no-break
space keeps the names together. An empty type is set as well, because otherwise the type of the previous line would be
used. `mkdocs.yml` names this extension.
"""

from __future__ import annotations

import re

import griffe

_SEVERAL = re.compile(r'^( +)((?:\*{0,2}\w+, )+\*{0,2}\w+): ', re.MULTILINE)


class GroupedNames(griffe.Extension):
  """Edits each docstring before it is parsed."""

  def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
    """Called for each module, class, function and attribute."""
    if obj.docstring is not None:
      obj.docstring.value = _SEVERAL.sub(
        lambda line: f'{line[1]}{line[2].replace(" ", chr(0xA0))} (): ', obj.docstring.value
      )
