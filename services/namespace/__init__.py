"""Make, find and connect to a namespace; its retention and its run's life cycle."""
