"""Exit codes of `dpi` and of the processes that `dpi serve` starts, each defined once.

docs/reference/exit-codes.md lists them by the names here.
"""

from __future__ import annotations

EXIT_OK = 0
"""Done, or stopped because it was told to."""

EXIT_CRASHED = 1
"""An error that a restart may mend; of a tool: the endpoint did not answer as asked."""

EXIT_USAGE = 2
"""Flags, environment, YAML file or manifest cannot be used; nothing was started."""

EXIT_HANDSHAKE = 3
"""Not all ranks and front ends were there by `--handshake-timeout`."""

EXIT_CHILD = 4
"""A process of the pod ended more often than the restart policy allows."""

EXIT_LOST_HEAD = 5
"""A rank found no head by its deadline, at the start or after losing one; whoever runs the pod decides what follows."""

EXIT_REFUSED = 78
"""EX_CONFIG: refused by the head, or a configuration that cannot run here; starting again changes nothing."""

EXIT_INTERRUPTED = 130
"""Ctrl-C."""

EXIT_PIPE = 141
"""Whoever read the output closed it before its end."""
