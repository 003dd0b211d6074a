"""Read the folder of a run for people: samples of a dump, metric columns, settings. Starts nothing, writes nothing."""
