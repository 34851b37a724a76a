"""`python -m llmd.daemon` is the daemon."""

import sys

from .lifecycle import main

if __name__ == "__main__":
    sys.exit(main())
