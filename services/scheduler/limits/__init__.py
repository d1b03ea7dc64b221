"""How the scheduler divides the limits that workers share."""
