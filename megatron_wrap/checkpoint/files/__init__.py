"""The folders and files of checkpoints: which folders are complete, their publication, the hashes of files, and for
asynchronous saves the copy in host memory and the process that writes."""
