"""The contract between a flow and the engine, and its validation."""
