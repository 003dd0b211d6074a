"""Start the ranks of this machine as torchrun does, without a traceback of the launcher itself.

    python launch/ranks.py --standalone --nproc_per_node 2 train.py PRESET ...

The exit code is that of the rank that failed first.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch(argv: list[str]) -> int:
    """Run the ranks to their end; returns the exit code of the first rank that failed, or 0."""
    # The launcher reports which processes it ends. The rank that failed has said why already.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(argv)
    except ChildFailedError as error:
        code: int = error.get_first_failure()[1].exitcode
        return code if code > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
