"""HTTP bodies in, HTTP bodies out."""
