"""``python -m labkit.train``: see `labkit.train.program`."""

import sys

from .program import main

sys.exit(main())
