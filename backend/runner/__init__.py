"""From a Batch of integers to tensors, and back to token ids."""
