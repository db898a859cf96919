"""`python -m quire.cli`: the `quire` command without its script."""

import sys

from quire.cli import main

sys.exit(main())
