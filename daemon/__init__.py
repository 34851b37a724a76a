"""The long-lived process: which models are loaded, and for how long."""
