"""Read the folder of a run for people: samples of a dump, metric rows, settings. Writes nothing."""
