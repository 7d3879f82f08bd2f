"""The parts of one attempt to train, which the executor puts together: see `docs/architecture.md`."""
