"""Network architectures, their configuration and their weights."""
