"""Costs of a model on a layout, without torch: costs of its layers, and splits over pipeline stages by cost."""
