"""Shows the data that a run is trained on, and finds the usual mistakes in it."""
