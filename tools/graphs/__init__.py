"""Random graphs of operations, and random tasks, on meshes of 2 to 24 devices; see `hunt_shardings.py`."""
