"""Users' code: load files, limit their time, run them beside the engine, check the results."""
