"""`python -m dpi_engine` is `dpi`."""

import sys

from dpi_engine.cli import main

sys.exit(main())
