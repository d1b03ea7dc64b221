"""The files that come out of the attempts of an episode."""
