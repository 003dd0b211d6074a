"""Tools around a run: plan, dry run, check, viewers, report. The core does not need them."""
