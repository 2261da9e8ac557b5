"""Run torchrun, and end with the exit code of its processes.

    python launch/torchrun.py --standalone --nproc_per_node 2 -m train ...

torchrun ends with code 1 and prints a traceback with the rank that failed. After a message for the user this
is left out. It is printed after other ends, such as a bug or a lack of memory.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

REPORTED = (2, 75, 130)  # a user's mistake, a run that can continue, Ctrl-C
# Warnings and errors in torchrun's log that ChildFailedError repeats.
REPEATED = ("failed (exitcode", "Sending process")


def run() -> None:
    """Run torchrun; exit with the code of its processes if they have reported their end."""
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    log.addFilter(lambda record: not str(record.msg).startswith(REPEATED))
    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode not in REPORTED:
            raise
        sys.exit(failure.exitcode)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)


if __name__ == "__main__":
    run()
