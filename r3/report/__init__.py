"""One HTML page about one or several runs: charts, settings, and a browser of rollouts. Works without a network."""
