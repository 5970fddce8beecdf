"""Programs that train the same model on the same tokens, measured in turn by `scripts/benchmark/compare.py`."""
