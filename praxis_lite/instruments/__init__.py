"""Looking at a task without training it: explanations and checks, proofs of its gradients, plans."""
