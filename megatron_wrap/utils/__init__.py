"""Text logs, metric loggers and the progress bar."""
