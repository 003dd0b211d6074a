"""The command line: parse it, check it, describe it."""
