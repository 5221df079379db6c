"""Entry point of `python -m weightcast`."""

import sys

from weightcast.cli import main

if __name__ == "__main__":
    sys.exit(main())
