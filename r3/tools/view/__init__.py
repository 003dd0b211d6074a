"""Read the folder of a run for display: samples of a dump, metrics, settings. Writes nothing."""
