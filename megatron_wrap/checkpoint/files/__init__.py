"""The folders of checkpoints, when they are complete and how they are published; the files of one: their hashes, and
for asynchronous saves the copy in host memory and the process that writes them."""
