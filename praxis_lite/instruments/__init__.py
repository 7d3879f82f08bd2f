"""Tools that study a task without training it: explanations, checks, verification of gradients, and plans."""
