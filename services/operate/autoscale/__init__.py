"""How many inference workers a run needs, from the log alone; and `headrace autoscale`."""
