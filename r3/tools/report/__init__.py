"""One HTML page about one or several runs: charts, settings, rollouts. Needs no network."""
