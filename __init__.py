"""llmd: a desktop daemon that runs language models on a person's own machine."""

__version__ = "0.1.0"
