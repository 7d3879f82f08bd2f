"""What a run directory says of its run: its config, metrics, heartbeats, and what became of it."""
