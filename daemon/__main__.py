"""`python -m llmd.daemon` is the daemon."""

import sys

from .start import main

if __name__ == "__main__":
    sys.exit(main())
