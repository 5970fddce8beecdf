"""What a launcher starts, and what it returns."""
