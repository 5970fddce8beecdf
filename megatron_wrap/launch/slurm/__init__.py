"""`--launcher slurm`: the job, the script that it runs, its record and its state."""
