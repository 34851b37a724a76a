"""The places a model can be pulled from, behind one interface."""
