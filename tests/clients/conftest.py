"""The programs run in their clients' own environment; see run.py."""

collect_ignore = ["programs"]
