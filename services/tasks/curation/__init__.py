"""Which items of a data set become tasks: their statistics, curators, mixtures, curricula."""
