"""Versions of packages."""

from importlib import metadata

import pytest

from praxis_lite.common.versions import package_version, version_of


def test_versions_are_those_of_installed_packages():
  assert version_of('jax') == metadata.version('jax')
  assert version_of('no-such-package') == ''


def test_a_folder_on_the_path_has_no_version(monkeypatch: pytest.MonkeyPatch):
  def refuse(package: str) -> str:
    raise metadata.PackageNotFoundError(package)

  monkeypatch.setattr(metadata, 'version', refuse)
  assert package_version() == 'not installed'
