"""In the processes of a run: that they make progress, what stops them, and their last collectives."""
