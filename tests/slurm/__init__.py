"""A Slurm cluster inside one machine, for tests of launch/slurm.sbatch."""
