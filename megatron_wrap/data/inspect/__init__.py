"""What a run is trained on, and the usual mistakes in it."""
