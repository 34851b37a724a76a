"""The command line: words in, HTTP out, an exit code back."""
