"""Versions of installed packages, for records and messages."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str:
  """Returns the version of an installed package; '' if it is not installed, even if it can be imported."""
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return ''


def package_version() -> str:
  """Returns the version of praxis_lite; 'not installed' if it is only a folder on PYTHONPATH."""
  return version_of('praxis_lite') or 'not installed'
