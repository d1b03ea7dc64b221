"""The services, each in its own folder, and the folders that they share."""
