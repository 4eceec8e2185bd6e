"""`python -m compilespec`: the same program as the console script."""

import sys

from compilespec.cli import main

if __name__ == "__main__":
    sys.exit(main())
