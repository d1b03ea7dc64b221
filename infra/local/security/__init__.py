"""The secrets of a local stack that authenticates its clients, and the settings that use them."""
