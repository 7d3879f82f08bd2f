"""What libraries below Python log is collected, and all else is shown."""

import os

from praxis_lite.common.native_log import collected_log


def test_warnings_are_collected_and_errors_are_shown(capfd):
  warning = 'W1122 11:24:22.7 1 spmd_partitioner.cc:656] a warning'
  with collected_log() as log:
    os.write(2, f'{warning}\nE1122 11:24:22.7 1 x.cc:1] an error\nanother line\n'.encode())
  assert log == [warning]
  os.write(2, b'afterwards\n')
  assert capfd.readouterr().err == 'E1122 11:24:22.7 1 x.cc:1] an error\nanother line\nafterwards\n'
