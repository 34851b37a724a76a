"""The building blocks that the models share."""
