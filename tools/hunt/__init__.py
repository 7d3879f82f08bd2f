"""Random programs on random meshes with random shardings, each compared with one device; see `hunt_shardings.py`."""
