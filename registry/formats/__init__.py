"""The headers of model files, checked against the file's size; standard library only."""
