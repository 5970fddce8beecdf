"""The platform interface, and the hardware and packages of this machine."""
