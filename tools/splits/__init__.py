"""Every way to split the arrays of one operation over a mesh: which of them XLA computes rightly.

`tools/enumerate_splits.py` is the command. A kind of operation (`kinds.py`) is a list of `Program`s, each of which makes
one operation; `assign.py` lists the splits of its arrays; `batches.py` puts hundreds of cases into one program, states
their splits, runs the guards on it, and compares the results; `workers.py` does so in processes of their own, and finds
the case for which XLA ends one.
"""
