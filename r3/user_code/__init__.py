"""Code of users: files loaded, limited in time, run beside the engine; what goes in and out."""
