"""Items that processes and threads compute, in order."""
