"""What learns or teaches beside a model: a critic, an adapter, a teacher."""
