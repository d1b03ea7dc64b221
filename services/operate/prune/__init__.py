"""`headrace prune`: what a broker's namespaces no longer need."""
