"""The losses of policies, one file each, and the interface that all of them have."""
