"""`--launcher kubernetes`: TrainJobs of Kubeflow Trainer v2."""
