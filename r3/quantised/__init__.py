"""Checkpoints whose matrices are stored in fp8, mxfp4 or int4."""
