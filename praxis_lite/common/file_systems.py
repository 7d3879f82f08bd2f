"""Opens the file system of a URL, such as s3://bucket/data, through fsspec; `s3://` and `gs://` need s3fs and gcsfs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from praxis_lite.common.errors import ConfigError, DataError, error_summary
from praxis_lite.common.foreign_text import has_lost_secret, remove_secrets

if TYPE_CHECKING:
  from fsspec import AbstractFileSystem


@contextlib.contextmanager
def store_errors(named: str) -> Iterator[None]:
  """Turns any error of a package that reads a store into a DataError of one line, which begins with `named`."""
  try:
    yield
  except DataError:
    raise
  except Exception as error:
    raise DataError(f'{named}: {remove_secrets(error_summary(error))}') from error


def open_file_system(url: str, where: str = '', **options: object) -> tuple[AbstractFileSystem, str]:
  """Returns the file system of a URL, and the path of the URL in it.

  Args:
    url: a URL with the scheme of a package that fsspec knows.
    where: the config field that has the URL, for errors; '' if it comes from elsewhere.
    **options: arguments of the file system.

  Raises:
    ConfigError: fsspec or the package for the scheme is not installed, the scheme is unknown, or the URL has lost its
      password.
  """
  shown = remove_secrets(url)
  named = f'{where} = {shown!r}' if where else shown
  if has_lost_secret(url):
    example = f', as in --set {where}=...' if where else ''
    raise ConfigError(
      f'{named}: passwords are not recorded; give the URL again{example}, or one without a password, and '
      'store the credentials where the package of its scheme looks for them'
    )
  try:
    import fsspec.core
  except ImportError:
    raise ConfigError(f"{named}: object stores need fsspec: pip install 'praxis_lite[remote]'") from None
  try:
    fs, path = fsspec.core.url_to_fs(url, **options)
  except ImportError as error:  # The message names the package: 'Install s3fs to access S3'.
    told = error_summary(error).partition(': ')[2]
    package = re.search(r'[Ii]nstall (\w+)', told)
    raise ConfigError(f'{named}: {told}' + (f': pip install {package[1]}' if package else '')) from None
  except Exception as error:
    told = error_summary(error).partition(': ')[2]
    raise ConfigError(f'{named}: {told}; there are s3://, gs://, az://, file:// and others') from None
  return fs, path
