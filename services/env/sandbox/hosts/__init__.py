"""The engines that an environment uses: which one an episode goes to, and what each does."""
