"""Models on disk and where they come from; no web server, no torch."""
