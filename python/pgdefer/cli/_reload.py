"""`pgdefer worker --reload`: restarts the worker when the code changes.

Tests: integration/test_reload.py.
"""

from __future__ import annotations

import logging
import math
import shlex
import sys
from pathlib import Path

from ._base import Exit, fail

# How long running jobs may take to end, in seconds; the worker itself may take as long after that.
PATIENCE = 3.0
MARGIN = 10


def run_and_reload(shutdown_timeout: float | None, *, is_plain: bool) -> int:
    """Run this command in a process; restart it when a Python file below this folder changes.

    Also a worker that has ended, because its code could not be imported, starts again at the next
    change. Return the exit code.
    """
    if not is_plain:
        fail(Exit.USAGE, "--reload can't be combined with --processes, --drain or --max-jobs.")
    try:
        from watchfiles import PythonFilter, run_process  # noqa: PLC0415
    except ImportError:
        fail(Exit.USAGE, "--reload needs watchfiles: pip install 'pgdefer[reload]'")
    logging.getLogger("watchfiles").setLevel(logging.ERROR)  # it logs each signal
    arguments = [word for word in sys.argv[1:] if word != "--reload"]
    if shutdown_timeout is None:
        shutdown_timeout = PATIENCE
        arguments += ["--shutdown-timeout", str(PATIENCE)]
    run_process(
        Path.cwd(),
        target=shlex.join([sys.executable, "-P", "-m", "pgdefer", *arguments]),
        target_type="command",
        watch_filter=PythonFilter(),
        sigint_timeout=math.ceil(shutdown_timeout) + MARGIN,
    )
    return Exit.DONE
