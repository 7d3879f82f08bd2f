"""Concrete tasks: a kind of model together with the training settings that usually suit it."""
