"""Clients that others wrote, each in its own environment, on a live daemon; scripts/clients."""
