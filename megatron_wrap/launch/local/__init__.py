"""The processes of a run on this node, under torchrun's agent."""
