"""One file per model family: its configuration as flags, and where its tensors lie."""
