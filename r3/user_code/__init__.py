"""Users' code: load files, limit their time, run them while the engine samples."""
