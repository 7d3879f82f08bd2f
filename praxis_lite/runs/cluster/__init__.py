"""The processes of a run and their devices: how they start, meet, watch each other and stop."""
