"""Tests that need a GPU; skipped without one."""
