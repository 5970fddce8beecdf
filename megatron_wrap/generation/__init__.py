"""Text generation on any layout."""
