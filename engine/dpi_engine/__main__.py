"""`python -m dpi_engine` is `dpi`, and what the installed script runs."""

import sys

from dpi_engine import collector
from dpi_engine.launch.exit_codes import EXIT_INTERRUPTED


def main() -> int:
    """As `main` of dpi_engine.cli; a Ctrl-C that comes while that is imported is one, too."""
    try:
        with collector.paused():
            from dpi_engine import cli

        return cli.main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
