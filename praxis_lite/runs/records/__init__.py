"""The records in a run directory: config, metrics, heartbeats, and the state of the run."""
