"""Concrete tasks. Each combines a kind of model with training settings that usually suit it."""
