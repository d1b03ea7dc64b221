"""`headrace prune`: removes what the namespaces of a broker no longer need."""
