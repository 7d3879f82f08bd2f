"""Tools that inspect a task without training it: explanations, checks, verification of gradients, and plans."""
