"""Registered experiments. `praxis-lite list` prints them."""
