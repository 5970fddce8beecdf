"""Runs on clusters: Ray, Slurm, Kubernetes."""
