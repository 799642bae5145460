"""``python -m plaid_tilemaxsim``: the command line without its console script."""

import sys

from plaid_tilemaxsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
