"""Captured routes: checks at capture, replay in the routers, and the ledger that counts every
row.
"""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    ledger="LedgerError admit captured_rows check_routes reconcile routing_metrics",
    replay="Mode Replay RouterTap attach_replay",
)
