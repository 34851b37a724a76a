"""What depends on the vocabulary: tokens, templates, text out."""
