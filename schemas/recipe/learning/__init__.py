"""The parts of a policy that learn beside its model: a critic, and an adapter."""
