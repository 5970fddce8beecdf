"""Files of checkpoints: the run's folder, hashes, reading that verifies them, the process that writes asynchronous
saves, and copies in object stores and Hugging Face repositories."""
