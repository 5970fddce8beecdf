"""The platform interface, and what this machine has."""
