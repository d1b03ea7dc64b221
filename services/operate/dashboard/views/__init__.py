"""What the pages of the dashboard show, as JSON values."""
