"""What `tools/fault_campaign.py` does to training runs, and how it compares what becomes of them."""
