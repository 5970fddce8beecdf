"""Jobs of Slurm: the script that each of them runs, their record and their state."""
