"""Files of text to indexed data, and the training of a tokenizer."""
