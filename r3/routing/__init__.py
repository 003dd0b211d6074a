"""Captured routes: checks at capture, replay in the routers, and the ledger that counts every
row.
"""
