"""The program of a worker process. A run may start hundreds of them: it imports little."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from r3.runtime.process import die_with_parent
from r3.user_code.calls import failure_of, outcome
from r3.user_code.loading import load


def serve(descriptor: int) -> None:
    """Run a worker process: load, report, then serve calls until the connection closes."""
    connection = Connection(descriptor)
    parent, preload, sys.path[:] = connection.recv()  # users' files import as in the run itself
    die_with_parent(parent)
    _, failure = outcome(lambda: [load(spec) for spec in preload], ())
    connection.send((None, failure))
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        except BaseException as error:
            # The function or its arguments cannot be unpickled here: that is the call's result.
            connection.send((None, failure_of(error)))
            continue
        value, failure = outcome(function, arguments)
        try:
            connection.send((value, failure))
        except BaseException as error:  # the value cannot be pickled
            connection.send((None, failure_of(error)))
