"""What every stateless worker does about its partitions, from assignment to commit."""
