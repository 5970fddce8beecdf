"""Runs on Kubernetes, as TrainJobs of Kubeflow Trainer v2."""
