"""The recipe of a run: its tables, its loading from TOML, and its checks."""
