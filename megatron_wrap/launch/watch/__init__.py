"""What the program that starts a run observes of its processes."""
