"""Concrete tasks: each a kind of model with training settings that usually suit it."""
