"""`python -m hvdtrain.guard`."""

import sys

from hvdtrain.guard import main

if __name__ == "__main__":
    sys.exit(main())
