"""The files of one checkpoint: their hashes, and for asynchronous saves the copy in host memory and the process that
writes them."""
