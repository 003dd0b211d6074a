"""How runs are started: from Python, by launch/local.sh, under Slurm."""
