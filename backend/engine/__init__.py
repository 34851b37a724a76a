"""Which sequences run in the next step; integers only, no torch."""
