"""Start the ranks of this machine as torchrun does, without a traceback of the launcher itself.

    python launch/ranks.py --standalone --nproc_per_node 2 train.py PRESET ...

The exit code is that of the rank that failed first. SIGTERM, SIGINT and SIGUSR1 go to the ranks,
which stop after their step with a checkpoint; the exit code is then 75, or 130 after Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

# Seconds between a signal and the end by force: for the step and its checkpoint.
_SHUTDOWN_S = "600"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_REQUEUE = 75


def launch(argv: list[str]) -> int:
    """Run the ranks to their end; returns the exit code of the first rank that failed, or 0."""
    print("starting the ranks", flush=True)  # importing torch takes seconds, here and in each rank
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main, parse_args

    # The launcher reports which processes it ends. The rank that failed has printed why.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S)
    words = parse_args(argv)
    if words.max_restarts or not words.standalone:
        # Ranks that are restarted would otherwise read the addresses of the dead ones. The price:
        # rank 0 listens on a port that was free seconds ago, when the launcher chose it.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        main(["--signals-to-handle", _SIGNALS, *argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code: int = failure.exitcode
        if code < 0:  # it could not print anything
            text = f"rank {rank} was ended by {signal.Signals(-code).name}"
            hint = "; out of memory?" if -code == signal.SIGKILL else ""
            print(f"r3: {text}{hint}", file=sys.stderr, flush=True)
        return code if code > 0 else 1
    except SignalException as error:
        return 130 if error.sigval == signal.SIGINT else _REQUEUE
    return 0


if __name__ == "__main__":
    try:
        sys.exit(launch(sys.argv[1:]))
    except KeyboardInterrupt:  # before there were ranks
        sys.exit(130)
