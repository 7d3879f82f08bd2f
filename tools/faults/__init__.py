"""The faults of `tools/fault_campaign.py`, and the comparison of disturbed runs with an undisturbed one."""
